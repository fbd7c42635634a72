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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

TIMELINE_NAME = "timeline.jsonl"
REQUESTS_NAME = "requests.jsonl"
CALLS_SUFFIX = ".calls.jsonl"

Span = tuple[str, float, float]
"""Name, begin, end."""


PeakMemory = Callable[[], Mapping[str, float]]
"""Peak bytes since the last call, by a name such as a role's; a call starts a new measurement."""


class PhaseTimer:
    """Wall-clock seconds per named phase. Phases nest; an outer one's time and memory include the inner ones'.

        timer = PhaseTimer()
        with timer.phase("step_generate"):
            ...
        metrics |= timer.pop()          # {"time/step_generate": 0.87}

    Args:
        peak_memory: called at both ends of every phase if given; its values come out as
            ``memory/<phase>/<name>`` (bytes).
    """

    def __init__(self, peak_memory: PeakMemory | None = None) -> None:
        self._peak_memory = peak_memory
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, float] = {}
        self._open: list[str] = []
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; a name used several times before :meth:`pop` is summed. Counts also when the block raises."""
        self._credit_memory()
        self._open.append(name)
        start, began = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._spans.append((name, began, time.time()))
            self._credit_memory()
            self._open.pop()

    def pop(self) -> dict[str, float]:
        """``time/<phase>`` in seconds and ``memory/<phase>/<name>`` in bytes since the last call; starts anew."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()} | self._bytes
        self._seconds, self._bytes = {}, {}
        return metrics

    def pop_spans(self) -> list[tuple[str, float, float]]:
        """Name, begin and end (seconds since the epoch) of every phase that has ended since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _credit_memory(self) -> None:
        """Read the peak since the last reading: it belongs to every phase open since then."""
        if self._peak_memory is None:
            return
        for name, value in self._peak_memory().items():
            for phase in self._open:
                key = f"memory/{phase}/{name}"
                self._bytes[key] = max(self._bytes.get(key, 0.0), float(value))


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
    return [row for row in _lines(path) if isinstance(row, dict) and "phases" in row]


def read_requests(path: Path) -> list[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin, end and attributes of single requests and calls of environments; [] where there is no file."""
    return [(row[0], row[1], row[2], row[3]) for row in _lines(path) if isinstance(row, list) and len(row) == 4]


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
