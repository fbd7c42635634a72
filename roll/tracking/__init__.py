"""Metrics, logs, progress, and what a run ends with. Nothing here imports torch or ray."""

from roll.tracking.console import ENDING_LOGGER, LOG_NAME, ProgressReporter, RunSummary, setup_logging
from roll.tracking.records import METRICS_NAME, SampleTable, TrackedRun, Tracker, read_metrics
from roll.tracking.trackers import build_trackers

__all__ = [
    "ENDING_LOGGER",
    "LOG_NAME",
    "METRICS_NAME",
    "ProgressReporter",
    "RunSummary",
    "SampleTable",
    "TrackedRun",
    "Tracker",
    "build_trackers",
    "read_metrics",
    "setup_logging",
]
