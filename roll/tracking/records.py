"""The tracker interface, and the trackers that need no service: ``metrics.jsonl`` and standard output."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from roll.checkpoint.folders import atomic_file
from roll.config.installation import install_command

logger = logging.getLogger(__name__)


SampleTable = Sequence[Mapping[str, Any]]
"""Rows with the same keys: prompt, response, reward and whatever else is worth reading."""

_REDUCER_TAG = re.compile(r"@(sum|mean|max|min|p\d+|std)$")


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a configuration with their dotted keys; lists and empty sections stay whole."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class TrackedRun:
    """The run as every tracker sees it."""

    log_dir: Path  # the run's own folder of logs; files go there unless `tracker_kwargs.log_dir` names another place
    exp_name: str  # name of the experiment; a folder of that name is made under `tracker_kwargs.log_dir`
    config: Mapping[str, Any]  # the effective configuration, secrets masked
    resume_step: int | None = None
    """The last finished step of the checkpoint that the run resumes from; None: a new run."""

    def folder(self, tracker: str, log_dir: str | None) -> Path:
        """Of a tracker's files. No time stamp in the path: a resumed run has to find its own curves."""
        return Path(log_dir) / self.exp_name if log_dir else self.log_dir / tracker


class Tracker(ABC):
    """Takes the metrics of each step. Steps never go back; the same step may come more than once with other names."""

    paths: Mapping[str, Path] = MappingProxyType({})  # of what is on disk, by kind

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` (plain numbers) of ``step``."""

    @abstractmethod
    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """Record texts of ``step`` under ``name`` (``train``, ``validation``)."""

    def files(self) -> dict[str, Path]:
        """:attr:`paths`; empty if nothing is on disk."""
        return dict(self.paths)

    def close(self) -> None:
        """Write out what is still in memory; nothing is logged afterwards."""


def tracker_package(name: str) -> Any:
    """The package of a tracker; a ``ModuleNotFoundError`` tells how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"track_with: {name} is not installed; {install_command(name)}") from error


class CompositeTracker(Tracker):
    """Several trackers as one. Reducer tags of names (``actor/loss@max``) end here: trackers see ``actor/loss``."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)
        self._failed: set[Tracker] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        plain = strip_reducer_tags(metrics)
        for tracker in self.trackers:
            with self._disk_may_be_full(tracker, step):
                tracker.log(plain, step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        for tracker in self.trackers:
            with self._disk_may_be_full(tracker, step):
                tracker.log_samples(name, rows, step)

    @contextmanager
    def _disk_may_be_full(self, tracker: Tracker, step: int) -> Iterator[None]:
        """Drop events that cannot be written, with one line in the log; training continues."""
        try:
            yield
        except OSError as error:
            if tracker not in self._failed:
                name = type(tracker).__name__
                logger.error("%s could not write step %d, which is lost; the run goes on: %s", name, step, error)
            self._failed.add(tracker)
        else:
            self._failed.discard(tracker)

    def files(self) -> dict[str, Path]:
        return {kind: path for tracker in self.trackers for kind, path in tracker.files().items()}

    def close(self) -> None:
        """Close all, also when one of them fails; the first failure is raised after the last."""
        failure: Exception | None = None
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:
                logger.exception("%s could not be closed", type(tracker).__name__)
                failure = failure or error
        if failure is not None:
            raise failure


def strip_reducer_tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop ``@sum``, ``@mean``, ``@max``, ``@min``, ``@p50``, ``@p99``, ``@std`` at the end of names.

    Where two names would become one (``length@max`` and ``length@min``), they become ``length/max`` and ``length/min``.
    """
    bare = {name: _REDUCER_TAG.sub("", name) for name in metrics}
    count = Counter(bare.values())
    return {bare[k] if count[bare[k]] == 1 else k.replace("@", "/"): value for k, value in metrics.items()}


METRICS_NAME = "metrics.jsonl"


class JsonLines:
    """Appends to a file of rows, a line of JSON each; every row has a ``step``.

    Args:
        path: of the file; its folder is made if need be.
        resume_step: the last step that counts: rows after it, and a torn last line, are dropped. None: a new run, an
            earlier run's file is renamed to ``<name>.previous``.
        max_bytes: of the file.
    """

    def __init__(self, path: Path, resume_step: float | None, max_bytes: float = math.inf) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and resume_step is None:
            path.replace(path.with_name(f"{path.name}.previous"))
        elif path.exists():
            with atomic_file(path) as kept, open(kept, "w", encoding="utf-8") as file:
                rows = (row for row in read_rows(path) if row["step"] <= resume_step)
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        self._path, self._max_bytes = path, max_bytes
        self._file: IO[bytes] | None = None
        self._torn = False

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write a row; False where there is no room for it within ``max_bytes``. JSON has no nan or infinity: such
        numbers are null. Raises ``OSError``: the disk is full; the row is lost."""
        if self._file is None:
            # Unbuffered: whoever watches the file sees whole lines, and a killed run loses none.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        text = json.dumps(finite, ensure_ascii=False, default=str) + "\n"
        # A line that a full disk has cut off is ended before the next one.
        line = b"\n" * self._torn + text.encode("utf-8", "surrogatepass")
        if self._max_bytes < math.inf and self._file.tell() + len(line) > self._max_bytes:
            return False
        # Marked before the write: an exception leaves the line torn as well as a short write does.
        self._torn = True
        written = self._file.write(line)
        # An unbuffered write may be short on a full disk, without an exception.
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._torn = False
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class JsonlTracker(Tracker):
    """Appends a line a call: ``{"step": 3, "time": <seconds since 1970>, <name>: <number>, ...}``, to files in
    ``folder``. ``resume_step``: as in :class:`JsonLines`."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        self._folder, self.paths = folder, {"metrics": folder / METRICS_NAME}
        files = (folder / METRICS_NAME, *folder.glob("samples-*.jsonl"))
        self._files = {path.name: JsonLines(path, resume_step) for path in files}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._files[METRICS_NAME].append({"step": step, "time": time.time(), **metrics})

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        file = f"samples-{name}.jsonl"
        if file not in self._files:
            self._files[file] = JsonLines(self._folder / file, None)
        for row in rows:
            self._files[file].append({"step": step, **row})

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` in order, rows of the same step merged; null is read as nan. Raises
    ``FileNotFoundError``: there is no such file."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        numbers = {key: math.nan if value is None else value for key, value in row.items()}
        rows.setdefault(row["step"], {}).update(numbers)
    return list(rows.values())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a run that was killed may leave half of its last one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                logger.warning("%s: line %d is torn and left out", path, number)
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row
            else:
                logger.warning("%s: line %d is no row of a step and left out", path, number)


class StdoutTracker(Tracker):
    """Writes ``step 3  actor/pg_loss=0.0123 ...``, names in order, numbers to four digits."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = " ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items()))
        sys.stdout.write(f"step {step}  {numbers}\n")
        sys.stdout.flush()

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """One sample, on one line: the rest is in the run's own files."""
        if rows:
            sample = " ".join(f"{key}={value!r}" for key, value in rows[0].items())
            sys.stdout.write(f"step {step}  {name} sample  {sample}\n")
            sys.stdout.flush()
