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
    """float (B, L)."""
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


def compute_data_metrics(columns: BatchColumns) -> Metrics:
    """All ``critic/*``, ``token/*`` and ``group/*`` metrics of one batch, with one transfer from the device."""
    metrics = MetricBuilder()
    if columns.scores.numel():
        right = columns.scores >= 1.0
        _value_metrics(columns, right, metrics)
        _length_metrics(columns, right, metrics)
        _group_metrics(columns, right, metrics)
    return metrics.build()


def _value_metrics(columns: BatchColumns, right: Tensor, metrics: MetricBuilder) -> None:
    mask = columns.response_mask
    metrics.mean("critic/correct/mean", right.sum(), float(right.numel()))
    metrics.summary("critic/score", columns.scores)
    metrics.summary("critic/rewards", columns.response_level_rewards)
    token_rewards = torch.where(mask, columns.token_level_rewards, 0.0)
    metrics.mean("critic/token_level_rewards_mean", token_rewards.sum(), mask.sum())
    raw = columns.advantages if columns.raw_advantages is None else columns.raw_advantages
    metrics.summary("critic/advantages", columns.advantages, mask)
    metrics.summary("critic/raw_advantages", raw, mask)
    metrics.summary("critic/returns", columns.returns, mask)
    if columns.values is not None:
        metrics.summary("critic/values", columns.values, mask)
    for name, rows in (("right", right), ("error", ~right)):
        part = mask & rows.unsqueeze(-1)
        for column, values in (("advantages", columns.advantages), ("raw_advantages", raw)):
            _summary_with_std(metrics, f"critic/{name}_response/{column}", values, part)


def _summary_with_std(metrics: MetricBuilder, name: str, values: Tensor, mask: Tensor) -> None:
    metrics.summary(name, values, mask)
    count = mask.sum()
    kept = torch.where(mask, values, 0.0).double()
    mean = kept.sum() / count.clamp(min=1)
    squares = torch.where(mask, kept - mean, 0.0).square().sum()
    metrics.mean(f"{name}/std", (squares / (count - 1).clamp(min=1)).sqrt() * count, count)


def _length_metrics(columns: BatchColumns, right: Tensor, metrics: MetricBuilder) -> None:
    response = columns.response_mask.sum(-1)
    total = columns.attention_mask.sum(-1)
    first = torch.where(columns.response_mask.any(-1), columns.response_mask.int().argmax(-1), total)
    for name, lengths in (("response", response), ("prompt", first), ("total", total)):
        metrics.summary(f"token/{name}_length", lengths)
        metrics.mean(f"token/{name}_length/diff", (lengths.max() - lengths.min()).float(), 1.0)
    metrics.mean("token/total_response_length/clip", columns.truncated.sum(), float(right.numel()))
    for name, rows in (("right", right), ("error", ~right)):
        metrics.mean(f"token/{name}_response_length/clip", (columns.truncated & rows).sum(), rows.sum())
        metrics.summary(f"token/{name}_response_length", response, rows)


def _group_metrics(columns: BatchColumns, right: Tensor, metrics: MetricBuilder) -> None:
    groups = Groups.of(columns.group_ids)
    lengths = columns.response_mask.sum(-1)
    row_advantage = torch.where(columns.response_mask, columns.advantages, 0.0).sum(-1) / lengths.clamp(min=1)
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
