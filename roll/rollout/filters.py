"""Filters of groups that are worth training on (dynamic sampling, DAPO: arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward has zero advantage everywhere and only dilutes the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.algorithms.registry import Registry
from roll.algorithms.samples import EPS

if TYPE_CHECKING:
    from roll.rollout.groups import SampleGroup

GroupFilter = Callable[[np.ndarray], bool]
"""Takes the scores of a group, float32 (num_samples,) with NaN where a reward is missing; True keeps the group."""


def mean_filter(threshold_down: float = 0.0, threshold_up: float = 1.0) -> GroupFilter:
    """Keep groups whose mean score lies strictly between the two thresholds; compared in the scores' float32."""
    low, high = np.float32(threshold_down), np.float32(threshold_up)
    return lambda scores: bool(low < np.float32(np.nanmean(scores, dtype=np.float64)) < high)


def std_filter(std_threshold: float = 0.0) -> GroupFilter:
    """Keep groups whose scores differ, by a population standard deviation of more than ``std_threshold``, and by more
    than arithmetic in float32 leaves of equal ones: a millionth of their size."""

    def keep(scores: np.ndarray) -> bool:
        exact = scores.astype(np.float64)
        return bool(np.nanstd(exact) > max(std_threshold, EPS * np.nanmax(np.abs(exact))))

    return keep


def no_filter() -> GroupFilter:
    """Keep every group."""
    return lambda scores: True


FilterFactory = Callable[..., GroupFilter]
"""Makes a filter from ``filter_args``, given as keywords."""

group_filters: Registry[FilterFactory] = Registry("query_filter_config.type")
for _factory in (no_filter, mean_filter, std_filter):
    group_filters.add(_factory, _factory.__name__)


def by_domain(filters: Mapping[str, GroupFilter]) -> Callable[[SampleGroup], bool]:
    """The filter of each group's domain; a domain without one keeps all."""
    return lambda group: group.item.domain not in filters or filters[group.item.domain](group.scores())


def response_mask(scores: np.ndarray, domains: np.ndarray, filters: Mapping[str, GroupFilter]) -> np.ndarray:
    """Responses that the filters of their domains keep, each judged as a group of one: bool (B,).

    Args:
        scores: float (B,), NaN where a reward is missing.
        domains: object (B,).
        filters: by domain; a domain without one keeps all.
    """
    pairs = zip(scores[:, None], domains, strict=True)
    return np.array([domain not in filters or filters[domain](score) for score, domain in pairs], dtype=bool)


def build_filter(kind: str, filter_args: Mapping[str, Any]) -> GroupFilter:
    """Build the filter of a ``query_filter_config`` section.

    ``kind`` is a name or the dotted path of a :data:`FilterFactory`.  A group without any reward is never kept,
    whatever the filter.

    Raises:
        ValueError: no such factory, or one that does not take these arguments.
    """
    factory = group_filters.resolve(kind)
    try:
        keep = factory(**filter_args)
    except TypeError as error:
        raise ValueError(f"query_filter_config.filter_args {dict(filter_args)} do not fit {kind}: {error}") from error
    return lambda scores: not np.isnan(scores).all() and keep(scores)
