"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.aggregation import LossDenominators, aggregate
from roll.algorithms.loss_types import LossOutputs
from roll.algorithms.metric_builder import MetricBuilder


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None,
    denominators: LossDenominators,
    loss_agg_mode: str = "token-mean",
) -> LossOutputs:
    """Half the squared error, clipped around the old values: max((v - R)^2, (clip(v, old +- c) - R)^2) / 2.

    Source: PPO's reference implementation (arXiv 1707.06347; "What matters in on-policy RL", 2006.05990, app. B.1).

    Args:
        values: float (B, L), the critic's prediction, with gradient.
        old_values: float (B, L), its prediction before the update.
        returns: float (B, L).
        mask: bool (B, L).
        value_clip: c; None: no clipping.
        denominators: of the whole optimizer step; the result is this micro-batch's share of the global loss.
        loss_agg_mode: one of :data:`roll.algorithms.aggregation.AGGREGATION_MODES`.
    """
    metrics = MetricBuilder()
    error = (values - returns).square()
    loss = error
    clipped_count: Tensor | float = 0.0
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = (near - returns).square()
        loss = torch.maximum(error, clipped_error)
        clipped_count = ((clipped_error > error) & mask).sum()
    total = 0.5 * aggregate(loss, mask, loss_agg_mode, denominators)
    tokens = mask.sum()
    metrics.mean("critic/loss", total, tokens.double() / max(denominators.tokens, 1.0))
    metrics.mean("critic/clipfrac", clipped_count, tokens)
    for name, per_token in (("value", old_values), ("vpred", values), ("error", error)):
        metrics.mean(f"critic/{name}", torch.where(mask, per_token.detach(), 0.0).sum(), tokens)
    return LossOutputs(total, metrics.build())
