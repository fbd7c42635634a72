"""What a tracker is: where the numbers of a run go."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SampleTable = Sequence[Mapping[str, Any]]
"""Rows with the same keys: prompt, response, reward and whatever else is worth reading."""

_REDUCER_TAG = re.compile(r"@(sum|mean|max|min|p\d+|std)$")


class Tracker(ABC):
    """Takes the metrics of each step. Steps never go back; the same step may come more than once with other names."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` (plain numbers) of ``step``."""

    @abstractmethod
    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        """Record texts of ``step`` under ``name`` (``train``, ``validation``)."""

    def files(self) -> dict[str, Path]:
        """Where on disk to look, by what it is; empty if nowhere."""
        return {}

    def close(self) -> None:
        """Write out what is still in memory; nothing is logged afterwards."""


class CompositeTracker(Tracker):
    """Several trackers as one. Reducer tags of names (``actor/loss@max``) end here: trackers see ``actor/loss``."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        plain = strip_reducer_tags(metrics)
        for tracker in self.trackers:
            tracker.log(plain, step)

    def log_samples(self, name: str, rows: SampleTable, step: int) -> None:
        for tracker in self.trackers:
            tracker.log_samples(name, rows, step)

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
    bare = Counter(_REDUCER_TAG.sub("", name) for name in metrics)
    return {
        (_REDUCER_TAG.sub("", name) if bare[_REDUCER_TAG.sub("", name)] == 1 else name.replace("@", "/")): value
        for name, value in metrics.items()
    }
