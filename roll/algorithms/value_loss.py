"""The critic's loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roll.algorithms.aggregation import LossDenominators, aggregate
from roll.algorithms.loss_types import LossOutputs
from roll.algorithms.metric_builder import MetricBuilder
from roll.algorithms.registry import Registry

ErrorFunction = Callable[[Tensor, Tensor], Tensor]
"""``(values, returns) -> loss`` of each token, all float (B, L)."""

value_losses: Registry[ErrorFunction] = Registry("value_loss_type")


def register_value_loss(name: str) -> Callable[[ErrorFunction], ErrorFunction]:
    """Decorator: make an error function selectable as ``value_loss_type: name``."""
    return value_losses.decorator(name)


@register_value_loss("mse")
def mse(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error."""
    return 0.5 * (values - returns).square()


@register_value_loss("huber")
def huber(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error up to an error of 1, linear beyond: outliers pull no harder than that (Huber 1964)."""
    return torch.nn.functional.huber_loss(values, returns, reduction="none")


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None,
    denominators: LossDenominators,
    loss_agg_mode: str = "token-mean",
    value_loss_type: str = "mse",
    group_ids: Tensor | None = None,
) -> LossOutputs:
    """The error, clipped around the old values: max(e(v, R), e(clip(v, old +- c), R)), with e half the squared error.

    Source: PPO's reference implementation (arXiv 1707.06347; "What matters in on-policy RL", 2006.05990, app. B.1).

    Args:
        values: float (B, L), the critic's prediction, with gradient.
        old_values: float (B, L), its prediction before the update.
        returns: float (B, L).
        mask: bool (B, L).
        value_clip: c; None: no clipping.
        denominators: of the whole optimizer step; the result is this micro-batch's share of the global loss.
        loss_agg_mode: one of :data:`roll.algorithms.aggregation.AGGREGATION_MODES`.
        value_loss_type: name of another e (:data:`value_losses`), or the dotted path of one.
        group_ids: int64 (B,), for modes that ask for groups.
    """
    metrics = MetricBuilder()
    error_of = value_losses.resolve(value_loss_type)
    loss = error = error_of(values, returns)
    clipped_count: Tensor | float = 0.0
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = error_of(near, returns)
        loss = torch.maximum(error, clipped_error)
        clipped_count = ((clipped_error > error) & mask).sum()
    total = aggregate(loss, mask, loss_agg_mode, denominators, group_ids=group_ids)
    tokens = mask.sum()
    metrics.mean("critic/loss", total, tokens.double() / max(denominators.tokens, 1.0))
    metrics.mean("critic/clipfrac", clipped_count, tokens)
    for name, per_token in (("value", old_values), ("vpred", values), ("error", (values - returns).square())):
        metrics.mean(f"critic/{name}", torch.where(mask, per_token.detach(), 0.0).sum(), tokens)
    return LossOutputs(total, metrics.build())
