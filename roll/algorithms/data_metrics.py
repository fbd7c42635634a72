"""Metrics of a step's batch: scores, rewards, lengths, advantages, and how groups differ inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.masked import Groups
from roll.algorithms.metric_builder import MetricBuilder
from roll.protocol.metrics import Metrics


@dataclass(frozen=True)
class BatchColumns:
    """What the metrics are computed from; columns as in the batch."""

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
