"""Metrics, logs, progress, and what a run ends with. Nothing here imports torch or ray."""

from roll.tracking.build import TrackedRun, build_trackers
from roll.tracking.jsonl import METRICS_NAME, read_metrics
from roll.tracking.logs import ENDING_LOGGER, LOG_NAME, setup_logging
from roll.tracking.phases import PeakMemory, PhaseTimer
from roll.tracking.progress import RLVR_HEADLINES, SFT_HEADLINES, Headline, ProgressReporter
from roll.tracking.summary import RunSummary
from roll.tracking.tracker import CompositeTracker, SampleTable, Tracker

__all__ = [
    "ENDING_LOGGER",
    "LOG_NAME",
    "METRICS_NAME",
    "RLVR_HEADLINES",
    "SFT_HEADLINES",
    "CompositeTracker",
    "Headline",
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
