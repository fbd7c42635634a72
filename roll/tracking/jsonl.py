"""The run's own record: a JSON object a line in ``metrics.jsonl``, and texts in ``samples-<name>.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from roll.tracking.tracker import SampleTable, Tracker

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends a line a call: ``{"step": 3, "time": <seconds since 1970>, <name>: <number>, ...}``.

    JSON has no nan or infinity: null stands for a number that is not finite.

    Args:
        folder: where the files are.
        resume_step: the last step that counts: rows after it, and a torn last line, are dropped. None: a new run, an
            earlier run's files are renamed to ``<name>.previous``.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in (folder / METRICS_NAME, *folder.glob("samples-*.jsonl")):
            if path.exists():
                _cut_after(path, resume_step)
        self._files: dict[str, TextIO] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._append(METRICS_NAME, {"step": step, "time": time.time(), **metrics})

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        for row in rows:
            self._append(f"samples-{name}.jsonl", {"step": step, **row})

    def files(self) -> dict[str, Path]:
        return {"metrics": self._folder / METRICS_NAME}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._files:
            # Line buffering: whoever watches the file sees whole lines, and a killed run loses none.
            self._files[name] = open(self._folder / name, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._files[name].write(json.dumps(finite, ensure_ascii=False, default=str) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` in order, rows of the same step merged; null is read as nan.

    Raises:
        FileNotFoundError: there is no such file.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in _rows(path):
        numbers = {key: math.nan if value is None else value for key, value in row.items()}
        rows.setdefault(row["step"], {}).update(numbers)
    return list(rows.values())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a run that was killed may leave half of its last one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                logger.warning("%s: line %d is torn and left out", path, number)
                continue
            yield row


def _cut_after(path: Path, resume_step: int | None) -> None:
    if resume_step is None:
        path.replace(path.with_name(path.name + ".previous"))
        return
    kept = path.with_name(path.name + ".kept")
    with open(kept, "w", encoding="utf-8") as file:
        for row in _rows(path):
            if row["step"] <= resume_step:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
