"""Times of a run: the driver's phases by step, and the calls of every worker, for the timeline of a report.

Times are seconds since the epoch on the clock of whoever writes.  The driver's file has a line a step::

    {"step": 3, "begin": ..., "end": ..., "phases": [["step_generate", begin, end], ...]}

and a worker's, next to its log, a line that says who it is and then one a call (:class:`roll.distributed.actor.
CallTimes`)::

    {"role": "actor_train", "rank": 0, "devices": [0], "host": "node-1"}
    ["update", begin, end]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

TIMELINE_NAME = "timeline.jsonl"
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
    return [row for row in _lines(path) if isinstance(row, dict) and "phases" in row]


def read_calls(folder: Path, since: float = 0.0) -> list[WorkerCalls]:
    """The calls of all workers whose files are in ``folder``, those that ended before ``since`` left out."""
    found = []
    for path in sorted(folder.glob(f"*{CALLS_SUFFIX}")):
        who: dict[str, Any] = {}
        spans: list[Span] = []
        for row in _lines(path):
            if isinstance(row, dict):
                who = row
            elif isinstance(row, list) and len(row) == 3 and row[2] >= since:
                spans.append((str(row[0]), float(row[1]), float(row[2])))
        if who and spans:
            devices = tuple(who.get("devices", ()))
            found.append(
                WorkerCalls(str(who["role"]), int(who["rank"]), devices, str(who.get("host", "")), tuple(spans))
            )
    return found


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
