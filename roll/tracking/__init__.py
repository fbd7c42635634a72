"""Metrics, logs, progress, and what a run ends with. Nothing here imports torch or ray."""

from roll.tracking.console import (
    ENDING_LOGGER,
    LOG_NAME,
    ProgressReporter,
    RunSummary,
    setup_logging,
)
from roll.tracking.records import METRICS_NAME, CompositeTracker, SampleTable, Tracker, read_metrics
from roll.tracking.run_record import PeakMemory, PhaseTimer
from roll.tracking.trackers import TrackedRun, build_trackers

__all__ = [
    "ENDING_LOGGER",
    "LOG_NAME",
    "METRICS_NAME",
    "CompositeTracker",
    "PeakMemory",
    "PhaseTimer",
    "ProgressReporter",
    "RunSummary",
    "SampleTable",
    "TrackedRun",
    "Tracker",
    "build_trackers",
    "read_metrics",
    "setup_logging",
]
