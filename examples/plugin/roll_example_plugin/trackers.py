"""``track_with: csv``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from roll.tracking import SampleTable, TrackedRun, Tracker


class CsvTracker(Tracker):
    """Appends a line per metric (step, name, value) to ``file_name`` in the run's log folder."""

    def __init__(self, run: TrackedRun, file_name: str = "metrics.csv") -> None:
        self._path = Path(run.log_dir) / file_name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows((step, name, value) for name, value in metrics.items())

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """Nothing: samples are no numbers."""
