"""Metrics collected with one transfer from the device, those of a step's batch, and warnings about useless batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.aggregation import Groups, Keep
from roll.protocol.metrics import Max, Mean, Metric, Metrics, Min, Sum


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation as moments, which add up over micro-batches and ranks."""

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


def correlation_moments(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Sums of x, y, x^2, y^2 and x y in float64; the sums of several parts add up."""
    x, y = (values.detach().double().flatten() for values in (x, y))
    return x.sum(), y.sum(), x @ x, y @ y, x @ y


class MetricBuilder:
    """Takes scalar tensors as they are computed; :meth:`build` moves all of them to the host at once."""

    def __init__(self) -> None:
        self._scalars: list[Tensor | float] = []
        self._recipes: list[tuple[str, int, Callable[..., Metric]]] = []

    def _add(self, name: str, kind: Callable[..., Metric], *scalars: Tensor | float) -> None:
        self._scalars.extend(scalars)
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

    def range(self, name: str, values: Tensor, outside: float, keep: Keep) -> None:
        """``name_max`` and ``name_min`` of masked values that are never negative and, outside the mask, ``outside``."""
        if not values.numel():
            return
        if values.device.type == "cpu":
            low, high = torch.aminmax(values)
            if low < outside < high:
                self._add(f"{name}_max", Max, high)
                self._add(f"{name}_min", Min, low)
                return
        self.largest(f"{name}_max", keep(values), keep.counts.sum())
        infinity = torch.full((), torch.inf, dtype=values.dtype, device=values.device).view(keep.bits.dtype)
        beyond = torch.bitwise_not(keep.bits).bitwise_and_(infinity)
        # A tenth of the time of masked_fill, bit by bit.
        self._add(f"{name}_min", Min, beyond.bitwise_or_(keep(values).view(keep.bits.dtype)).view(values.dtype).amin())

    def largest(self, name: str, values: Tensor, count: Tensor) -> None:
        """:meth:`max` of values that are never negative, and 0 outside a mask of ``count`` elements."""
        if values.numel():
            self._add(name, Max, torch.where(count > 0, values.detach().amax(), -torch.inf))

    def correlation(self, name: str, moments: Sequence[Tensor], count: Tensor) -> None:
        """Pearson's correlation from :func:`correlation_moments` of ``count`` pairs."""
        self._add(name, Correlation, count, *moments)

    def summary(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """``name/mean``, ``name/max`` and ``name/min`` of the masked values."""
        values = values.detach().float()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        self.mean(f"{name}/mean", torch.where(mask, values, 0.0).sum(), mask.sum())
        self.max(f"{name}/max", values, mask)
        self.min(f"{name}/min", values, mask)

    @torch.no_grad()
    def _moved(self) -> list[float]:
        """All scalars on the host: one stack a dtype, and one transfer of all stacks."""
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


@dataclass(frozen=True)
class BatchColumns:
    """Columns of the batch that the metrics are computed from."""

    scores: Tensor
    """float (B,), raw; 1 or more is right."""
    response_level_rewards: Tensor
    """float (B,), normalised."""
    token_level_rewards: Tensor
    """float (B, L), 0 outside the mask."""
    advantages: Tensor
    """float (B, L)."""
    returns: Tensor
    """float (B, L)."""
    response_mask: Tensor
    """bool (B, L)."""
    attention_mask: Tensor
    """bool (B, L)."""
    group_ids: Tensor
    """int64 (B,)."""
    truncated: Tensor
    """bool (B,): cut off at the length limit."""
    raw_advantages: Tensor | None = None
    """float (B, L), before whitening and clipping."""
    values: Tensor | None = None
    """float (B, L), the critic's."""


class _TokenColumn:
    """Statistics of a column (B, L) over the response mask, by rows; what several metrics ask for is computed once."""

    def __init__(self, values: Tensor, mask: Tensor, lengths: Tensor) -> None:
        self._mask, self._lengths = mask, lengths
        self.kept = torch.where(mask, values, 0.0)
        extremes = values.new_tensor([-torch.inf, torch.inf]).expand(len(mask), 2).unbind(-1)
        if mask.shape[1]:
            outside = ~mask
            masked = values.masked_fill(outside, -torch.inf)
            extremes = masked.amax(-1), masked.masked_fill_(outside, torch.inf).amin(-1)
        self._high, self._low = extremes
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def summary(self, metrics: MetricBuilder, name: str, rows: Tensor | None = None) -> None:
        """``name/mean``, ``max`` and ``min`` of all rows, or of ``rows`` bool (B,) with ``std``."""
        if rows is None:
            total, count, everything = self.kept.float().sum(), self._lengths.sum(), torch.ones_like(self._high).bool()
            self._summary(metrics, name, total, count, everything)
            return
        if id(rows) not in self._parts:
            self._parts[id(rows)] = self._moments(rows)
        total, count, std = self._parts[id(rows)]
        self._summary(metrics, name, total, count, rows)
        metrics.mean(f"{name}/std", std * count, count)

    def _summary(self, metrics: MetricBuilder, name: str, total: Tensor, count: Tensor, rows: Tensor) -> None:
        metrics.mean(f"{name}/mean", total, count)
        metrics.max(f"{name}/max", self._high.float(), rows)
        metrics.min(f"{name}/min", self._low.float(), rows)

    def _moments(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum, number and Bessel-corrected standard deviation of the tokens of ``rows``."""
        kept = torch.where(rows.unsqueeze(-1), self.kept, 0.0)
        count, total = self._lengths[rows].sum(), kept.float().sum()
        deviations = kept.double()
        mean = deviations.sum() / count.clamp(min=1)
        deviations.sub_(mean).masked_fill_(~(self._mask & rows.unsqueeze(-1)), 0.0)
        std = (deviations.square_().sum() / (count - 1).clamp(min=1)).sqrt()
        return total, count, std


def compute_data_metrics(columns: BatchColumns) -> Metrics:
    """All ``critic/*``, ``token/*`` and ``group/*`` metrics of one batch, with one transfer from the device."""
    metrics = MetricBuilder()
    if columns.scores.numel():
        right = columns.scores >= 1.0
        lengths = columns.response_mask.sum(-1)
        advantages = _TokenColumn(columns.advantages, columns.response_mask, lengths)
        _value_metrics(columns, advantages, right, lengths, metrics)
        _length_metrics(columns, lengths, right, metrics)
        _group_metrics(columns, advantages, lengths, right, metrics)
    return metrics.build()


def _value_metrics(
    columns: BatchColumns, advantages: _TokenColumn, right: Tensor, lengths: Tensor, metrics: MetricBuilder
) -> None:
    metrics.mean("critic/correct/mean", right.sum(), float(right.numel()))
    metrics.summary("critic/score", columns.scores)
    metrics.summary("critic/rewards", columns.response_level_rewards)
    metrics.mean("critic/token_level_rewards_mean", columns.token_level_rewards.sum(), lengths.sum())

    def column(values: Tensor | None) -> _TokenColumn:
        same = values is None or values is columns.advantages
        return advantages if same else _TokenColumn(values, columns.response_mask, lengths)  # type: ignore[arg-type]

    raw = column(columns.raw_advantages)
    advantages.summary(metrics, "critic/advantages")
    raw.summary(metrics, "critic/raw_advantages")
    column(columns.returns).summary(metrics, "critic/returns")
    if columns.values is not None:
        column(columns.values).summary(metrics, "critic/values")
    wrong = ~right
    for name, rows in (("right", right), ("error", wrong)):
        for label, values in (("advantages", advantages), ("raw_advantages", raw)):
            values.summary(metrics, f"critic/{name}_response/{label}", rows)


def _length_metrics(columns: BatchColumns, response: Tensor, right: Tensor, metrics: MetricBuilder) -> None:
    mask = columns.response_mask
    total = columns.attention_mask.sum(-1)
    first = torch.where(response > 0, mask.view(torch.uint8).argmax(-1), total) if mask.shape[1] else total
    for name, lengths in (("response", response), ("prompt", first), ("total", total)):
        metrics.summary(f"token/{name}_length", lengths)
        metrics.mean(f"token/{name}_length/diff", (lengths.max() - lengths.min()).float(), 1.0)
    metrics.mean("token/total_response_length/clip", columns.truncated.sum(), float(right.numel()))
    for name, rows in (("right", right), ("error", ~right)):
        metrics.mean(f"token/{name}_response_length/clip", (columns.truncated & rows).sum(), rows.sum())
        metrics.summary(f"token/{name}_response_length", response, rows)


def _group_metrics(
    columns: BatchColumns, advantages: _TokenColumn, lengths: Tensor, right: Tensor, metrics: MetricBuilder
) -> None:
    groups = Groups.of(columns.group_ids)
    row_advantage = advantages.kept.sum(-1) / lengths.clamp(min=1)
    right_ratio = groups.mean(right.float())
    metrics.summary("group/response_length_diff", group_range(lengths.float(), groups))
    metrics.summary("group/advantage_diff", group_range(row_advantage, groups))
    metrics.summary("group/correct_ratio", right_ratio)
    count = float(len(groups.counts))
    all_right, all_wrong = right_ratio == 1.0, right_ratio == 0.0
    mixed = ~(all_right | all_wrong)
    metrics.mean("group/all_correct_groups_ratio", all_right.sum(), count)
    metrics.mean("group/all_incorrect_groups_ratio", all_wrong.sum(), count)
    metrics.mean("group/mixed_groups_ratio", mixed.sum(), count)
    num_right = groups.sum(right.float())
    mean_right = groups.sum(row_advantage * right) / num_right.clamp(min=1)
    mean_wrong = groups.sum(row_advantage * ~right) / (groups.counts - num_right).clamp(min=1)
    metrics.summary("group/correct_vs_incorrect_advantage_diff", mean_right - mean_wrong, mixed)


def group_range(values: Tensor, groups: Groups) -> Tensor:
    """Largest minus smallest value of each group: float (B,) -> (G,)."""
    extremes = values.new_zeros(2, len(groups.counts))
    for row, reduce in zip(extremes, ("amax", "amin"), strict=True):
        row.scatter_reduce_(0, groups.index, values, reduce, include_self=False)
    return extremes[0] - extremes[1]


ZERO = 1e-6
"""Advantages up to this are 0 but for rounding."""


class BatchWatch:
    """Looks at every step's samples; speaks once when something has been wrong for ``patience`` steps in a row;
    never with a patience of 0."""

    def __init__(
        self,
        patience: int = 3,
        truncation_limit: float = 0.5,
        truncated: str = "were cut off at the length limit",
        remedy: str = "raise response_length, or check the stop tokens",
        learns_from_scores: bool = True,
    ) -> None:
        self.patience = patience
        self._learns_from_scores = learns_from_scores
        self._truncated, self._remedy = truncated, remedy
        self.truncation_limit = truncation_limit
        self._steps = Counter[str]()
        """Steps in a row with each problem."""

    def _persists(self, problem: str, is_there: bool) -> bool:
        """Count a step; true where ``problem`` has been there for exactly ``patience`` steps in a row."""
        self._steps[problem] = self._steps[problem] + 1 if is_there else 0
        return self._steps[problem] == self.patience > 0

    def observe(self, scores: Tensor, truncated: Tensor) -> list[str]:
        """Messages to log as warnings, usually none.

        Args:
            scores: float (B,), raw.
            truncated: bool (B,), cut off at the length limit.
        """
        if scores.numel() == 0:
            return []
        messages = []
        same = self._learns_from_scores and scores.numel() > 1 and bool((scores == scores[0]).all())
        if self._persists("equal scores", same):
            messages.append(
                f"every response of the last {self.patience} steps got the score {float(scores[0]):g}: nothing can be "
                "learned from that; check the reward rule, the ground truth and the answer format"
            )
        share = float(truncated.float().mean())
        if self._persists("truncation", share > self.truncation_limit):
            messages.append(
                f"more than {self.truncation_limit:.0%} of the responses of the last {self.patience} steps "
                f"{self._truncated} ({share:.0%} in this one); {self._remedy}"
            )
        return messages

    def observe_advantages(self, advantages: Tensor, used: Tensor, adv_estimator: str) -> list[str]:
        """Messages about advantages that are all 0; none where equal scores, which :meth:`observe` reports, are why.

        Args:
            advantages: float (B, L), 0 outside the responses.
            used: bool (B,), responses that the loss uses.
            adv_estimator: its name, for the message.
        """
        if advantages.numel() == 0:
            return []
        nothing = _all_zero(advantages) or (not bool(used.all()) and _all_zero(advantages[used]))
        if not self._persists("zero advantages", nothing) or self._steps["equal scores"] >= self.patience:
            return []
        return [
            f"every advantage of the last {self.patience} steps was 0, so the policy has learned nothing: "
            f"adv_estimator {adv_estimator} found no difference between responses that the loss uses; look at "
            "group/mixed_groups_ratio (prompts all too easy or too hard? groups too small?) and at the masks"
        ]


def _all_zero(values: Tensor) -> bool:
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return max(-float(low), float(high)) <= ZERO
