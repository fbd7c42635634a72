"""Metrics on standard output, one line a step: for terminals, and for whatever collects a job's output."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from roll.tracking.tracker import SampleTable, Tracker


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
