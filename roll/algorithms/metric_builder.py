"""Collecting metrics of one micro-batch with a single transfer from the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.protocol.metrics import Max, Mean, Metric, Metrics, Min, Sum


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation in the making: the moments add up over micro-batches and ranks."""

    count: float
    sum_x: float
    sum_y: float
    sum_xx: float
    sum_yy: float
    sum_xy: float

    def merge(self, other: Correlation) -> Correlation:
        return Correlation(
            self.count + other.count,
            self.sum_x + other.sum_x,
            self.sum_y + other.sum_y,
            self.sum_xx + other.sum_xx,
            self.sum_yy + other.sum_yy,
            self.sum_xy + other.sum_xy,
        )

    def value(self) -> float:
        """The correlation; 1 where one of the two does not vary (nothing contradicts agreement)."""
        if self.count < 2:
            return 1.0
        covariance = self.sum_xy - self.sum_x * self.sum_y / self.count
        variance_x = self.sum_xx - self.sum_x**2 / self.count
        variance_y = self.sum_yy - self.sum_y**2 / self.count
        scale = (max(variance_x, 0.0) * max(variance_y, 0.0)) ** 0.5
        return min(max(covariance / scale, -1.0), 1.0) if scale > 1e-12 * self.count else 1.0


class MetricBuilder:
    """Takes scalar tensors as they are computed; :meth:`build` moves all of them to the host at once."""

    def __init__(self) -> None:
        self._scalars: list[Tensor | float] = []
        self._recipes: list[tuple[str, int, Callable[..., Metric]]] = []

    def _add(self, name: str, kind: Callable[..., Metric], *scalars: Tensor | float) -> None:
        self._scalars.extend(s.detach() if isinstance(s, Tensor) else s for s in scalars)
        self._recipes.append((name, len(scalars), kind))

    def mean(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """A weighted mean: ``total`` is the sum over this micro-batch, ``weight`` what it is to be divided by."""
        self._add(name, Mean, total, weight)

    def sum(self, name: str, total: Tensor | float) -> None:
        self._add(name, Sum, total)

    def max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The largest masked value; left out of the metrics when nothing is masked."""
        if values.numel():
            self._add(name, Max, values.detach().masked_fill(~mask, -torch.inf).amax())

    def min(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The smallest masked value; left out of the metrics when nothing is masked."""
        if values.numel():
            self._add(name, Min, values.detach().masked_fill(~mask, torch.inf).amin())

    def largest(self, name: str, values: Tensor, count: Tensor) -> None:
        """:meth:`max` of values that are never negative, and 0 outside a mask of ``count`` elements."""
        if values.numel():
            self._add(name, Max, torch.where(count > 0, values.detach().amax(), -torch.inf))

    def correlation(self, name: str, x: Tensor, y: Tensor, count: Tensor) -> None:
        """Pearson's correlation, accumulated in float64, of values that are 0 outside a mask of ``count`` elements."""
        x, y = (t.detach().double().flatten() for t in (x, y))
        self._add(name, Correlation, count, x.sum(), y.sum(), x @ x, y @ y, x @ y)

    def summary(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """``name/mean``, ``name/max`` and ``name/min`` of the masked values."""
        values = values.detach().float()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        self.mean(f"{name}/mean", torch.where(mask, values, 0.0).sum(), mask.sum())
        self.max(f"{name}/max", values, mask)
        self.min(f"{name}/min", values, mask)

    def _moved(self) -> list[float]:
        """All scalars on the host; those of a type travel in one stack, and all stacks together."""
        by_type: dict[torch.dtype, list[int]] = {}
        numbers = [0.0 if isinstance(scalar, Tensor) else float(scalar) for scalar in self._scalars]
        for index, scalar in enumerate(self._scalars):
            if isinstance(scalar, Tensor):
                by_type.setdefault(scalar.dtype, []).append(index)
        if by_type:
            stacks = [torch.stack([self._scalars[i] for i in group]).double() for group in by_type.values()]  # type: ignore[misc]
            order = [index for group in by_type.values() for index in group]
            for index, number in zip(order, torch.cat(stacks).tolist(), strict=True):
                numbers[index] = number
        return numbers

    def build(self) -> Metrics:
        numbers = iter(self._moved())
        metrics: Metrics = {}
        for name, arity, kind in self._recipes:
            arguments = [next(numbers) for _ in range(arity)]
            nothing_masked = (kind is Max and arguments[0] == -torch.inf) or (kind is Min and arguments[0] == torch.inf)
            if not nothing_masked:
                metrics[name] = kind(*arguments)
        return metrics
