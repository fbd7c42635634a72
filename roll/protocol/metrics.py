"""Metrics that survive being reduced twice: over micro-batches on a rank, and over ranks on the driver.

A mean is carried as (total, weight), so that merging keeps the weights; a maximum stays a maximum.  Losses and
strategies return ``Metrics``; only the tracker turns them into numbers (:func:`to_floats`).

A rank's coordinates (:class:`RankInfo`) select the ranks whose metrics count, so that each counts once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


class Metric(Protocol):
    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean as its parts: ``total`` is the weighted sum, ``weight`` the sum of weights."""

    total: float
    weight: float = 1.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class _Reduced:
    """A number that one operation of two numbers merges."""

    number: float
    operation: ClassVar[Callable[..., float]]

    def merge(self, other: Self) -> Self:
        return type(self)(type(self).operation(self.number, other.number))

    def value(self) -> float:
        return self.number


class Sum(_Reduced):
    operation = operator.add


class Max(_Reduced):
    operation: ClassVar[Callable[..., float]] = max


class Min(_Reduced):
    operation: ClassVar[Callable[..., float]] = min


@dataclass(frozen=True, slots=True)
class Deviation:
    """A weighted standard deviation as its moments."""

    total: float
    squares: float
    weight: float

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Deviation:
        """The deviation of ``values`` (N,) with ``weights`` (N,)."""
        # Float64, since value() subtracts two nearly equal moments; in float32 a small deviation of large scores
        # vanishes.
        exact = values.double()
        return cls(*(float((exact**power * weights).sum()) for power in (1, 2, 0)))

    def merge(self, other: Deviation) -> Deviation:
        return Deviation(self.total + other.total, self.squares + other.squares, self.weight + other.weight)

    def value(self) -> float:
        if not self.weight:
            return 0.0
        mean = self.total / self.weight
        # Rounding may leave a tiny negative variance where all values are equal.
        return math.sqrt(max(0.0, self.squares / self.weight - mean**2))


Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Merge metrics of several micro-batches, optimizer steps or ranks, name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(metric.value()) for name, metric in metrics.items()}


@dataclass(frozen=True)
class RankInfo:
    """Coordinates of a rank in every parallel dimension (data, tensor, pipeline, context)."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @property
    def is_data_source(self) -> bool:
        """True on the one rank of a data-parallel replica whose results are collected."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def is_first_of_replica(self) -> bool:
        """True on the one rank of a data-parallel replica that is handed data when it passes them on itself."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0
