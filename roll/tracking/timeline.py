"""Times of a run: the driver's phases by step, and the calls of every worker, for the timeline of a report.

Times are seconds since the epoch on the clock of whoever writes.  The driver's file has a line a step::

    {"step": 3, "begin": ..., "end": ..., "phases": [["step_generate", begin, end], ...]}

and a worker's, next to its log, a line that says who it is and then one a call (:class:`roll.distributed.actor.
CallTimes`)::

    {"role": "actor_train", "rank": 0, "devices": [0], "host": "node-1"}
    ["update", begin, end]

With ``otlp_output_dir``, ``requests.jsonl`` next to the driver's file has a line for every single request to an engine
and every call of an environment (:class:`SpanLog`)::

    ["request", begin, end, {"id": "12", "samples": 8, "tokens": 210}]
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

TIMELINE_NAME = "timeline.jsonl"
REQUESTS_NAME = "requests.jsonl"
CALLS_SUFFIX = ".calls.jsonl"

Span = tuple[str, float, float]
"""Name, begin, end."""


class TimelineLog:
    """Appends the phases of steps.

    Args:
        path: of the file; its folder is made if need be.
        resumed: go on in an earlier run's file; else that is renamed to ``<name>.previous``.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resumed:
            path.replace(path.with_name(f"{path.name}.previous"))
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)

    def append(self, step: int, begin: float, end: float, phases: Sequence[Span]) -> None:
        spans = [[name, round(first, 4), round(last, 4)] for name, first, last in phases]
        row = {"step": step, "begin": round(begin, 4), "end": round(end, 4), "phases": spans}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


class SpanLog:
    """Single pieces of work of the driver's event loop, by whoever does them; nothing is kept while it is closed."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def open(self, path: Path, resumed: bool) -> None:
        """Keep them in ``path`` from now on; ``resumed``: behind those of an earlier run."""
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a" if resumed else "w", encoding="utf-8")  # noqa: SIM115 (open for the whole run)

    def note(self, name: str, seconds: float, attributes: Mapping[str, str | int]) -> None:
        """Something called ``name`` has ended now, after ``seconds``."""
        if self._file is not None:
            end = time.time()
            self._file.write(json.dumps([name, round(end - seconds, 4), round(end, 4), dict(attributes)]) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


span_log = SpanLog()
"""That of this process: a driver has one run at a time."""


@dataclass(frozen=True)
class WorkerCalls:
    """The calls of one rank's process."""

    role: str
    rank: int
    devices: tuple[int, ...]
    host: str
    spans: tuple[Span, ...]


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The driver's lines, in order; [] where there is no file."""
    return [row for row in _lines(path) if _is_step(row)]


def read_requests(path: Path) -> list[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin, end and attributes of single requests and calls of environments; [] where there is no file."""
    return [(row[0], row[1], row[2], row[3]) for row in _lines(path) if _is_span(row, 4)]


def read_calls(folder: Path, since: float = 0.0) -> list[WorkerCalls]:
    """The calls of all workers whose files are in ``folder``, those that ended before ``since`` left out."""
    found = []
    for path in sorted(folder.glob(f"*{CALLS_SUFFIX}")):
        who: dict[str, Any] = {}
        spans: list[Span] = []
        for row in _lines(path):
            if isinstance(row, dict) and isinstance(row.get("rank"), int) and "role" in row:
                who = row
            elif _is_span(row, 3) and row[2] >= since:
                spans.append((str(row[0]), float(row[1]), float(row[2])))
        if who and spans:
            devices = tuple(who["devices"]) if isinstance(who.get("devices"), list) else ()
            found.append(
                WorkerCalls(str(who["role"]), int(who["rank"]), devices, str(who.get("host", "")), tuple(spans))
            )
    return found


def _is_span(row: Any, length: int) -> bool:
    """A list whose second and third entries are times."""
    return isinstance(row, list) and len(row) == length and all(isinstance(time, int | float) for time in row[1:3])


def _is_step(row: Any) -> bool:
    """A whole row of the driver's; another one may be damaged."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("step"), int)
        and all(isinstance(row.get(key), int | float) for key in ("begin", "end"))
        and isinstance(row.get("phases"), list)
        and all(_is_span(span, 3) for span in row["phases"])
    )


def _lines(path: Path) -> Iterator[Any]:
    """Whole lines only."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the end of a process that was killed
                continue
