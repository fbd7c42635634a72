"""Which groups of samples are worth training on (dynamic sampling, DAPO: arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward has zero advantage everywhere and only dilutes the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

GroupFilter = Callable[[np.ndarray], bool]
"""Takes the scores of a group, float32 (num_samples,) with NaN where a reward is missing; True keeps the group."""


def mean_filter(threshold_down: float = 0.0, threshold_up: float = 1.0) -> GroupFilter:
    """Keep groups whose mean score lies strictly between the two thresholds."""
    return lambda scores: bool(threshold_down < np.nanmean(scores) < threshold_up)


def std_filter(std_threshold: float = 0.0) -> GroupFilter:
    """Keep groups whose scores spread by more than ``std_threshold`` (population standard deviation)."""
    return lambda scores: bool(np.nanstd(scores) > std_threshold)


def no_filter() -> GroupFilter:
    """Keep every group."""
    return lambda scores: True


FILTERS: dict[str, Callable[..., GroupFilter]] = {
    "no_filter": no_filter,
    "mean_filter": mean_filter,
    "std_filter": std_filter,
}


def build_filter(kind: str, filter_args: Mapping[str, Any]) -> GroupFilter:
    """The filter that a ``query_filter_config`` section asks for.

    A group without any reward is never kept, whatever the filter.
    """
    keep = FILTERS[kind](**filter_args)
    return lambda scores: not np.isnan(scores).all() and keep(scores)
