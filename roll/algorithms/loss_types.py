"""Inputs and outputs of a loss, and the registry of policy losses.

A policy loss is a function ``(inputs: LossInputs, options, metrics: MetricBuilder) -> Tensor (B, L)``: the loss of each
token, before aggregation, correction and sample weights, which :func:`roll.algorithms.losses.actor_loss` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import Keep, clear_, row_blocks, within
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry
from roll.config.algorithm import POLICY_LOSSES, PolicyLoss, PPOConfig
from roll.protocol.metrics import Metrics

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: a ratio beyond it carries no information and, multiplied on, would overflow float32."""


class _MaskedDifference(torch.autograd.Function):
    """clamp(a - b, +-20) where the mask holds, else 0; in place, since these passes are what a loss costs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, keep: Keep) -> Tensor:
        difference = torch.empty_like(a)
        beyond = False
        for out, a_rows, b_rows, bits in row_blocks(difference, a, b, keep.bits):
            clear_(torch.sub(a_rows, b_rows, out=out), bits)
            if not within(out, LOG_RATIO_BOUND):
                out.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
                beyond = True
        ctx.keep, ctx.beyond = keep, beyond
        ctx.save_for_backward(*((difference,) if beyond else ()))
        return difference

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.beyond:
            return ctx.keep(gradients[0]), None, None
        # 1.0 and 0.0: comparisons that give booleans take four times as long.
        alive = ctx.saved_tensors[0].abs().lt_(LOG_RATIO_BOUND)
        return ctx.keep.in_place(alive.mul_(gradients[0])), None, None


class _Linearised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradients[0] * slope, None, None


def linearised(variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """``value`` with the derivative ``slope`` with respect to ``variable``, element by element.

    For losses whose derivative is at hand: the backward pass is then a single product.  All three have one shape;
    ``value`` and ``slope`` carry no gradient of their own.
    """
    result: Tensor = _Linearised.apply(variable, value, slope)
    return result


@dataclass(frozen=True)
class LossInputs:
    """Named tensors of one micro-batch, right-padded and aligned to the token they describe; 0 outside ``mask``."""

    log_probs: Tensor
    """float (B, L), current policy, with gradient."""
    advantages: Tensor
    """float (B, L)."""
    mask: Tensor
    """bool (B, L): tokens that the loss uses; may have holes and empty rows."""
    old_log_probs: Tensor | None = None
    """float (B, L), the policy before the update; None: the update is on-policy and the ratio is exactly 1."""
    rollout_log_probs: Tensor | None = None
    """float (B, L), of the engine that sampled."""
    ref_log_probs: Tensor | None = None
    """float (B, L), reference policy."""
    entropy: Tensor | None = None
    """float (B, L), current policy, with gradient."""
    sample_weights: Tensor | None = None
    """float (B,), multiplied onto the policy-gradient loss of each row."""
    policy_mask: Tensor | None = None
    """bool (B, L): tokens of ``mask`` that the policy-gradient term uses; the others count as 0 in it, not as absent,
    and stay in the other terms."""
    group_ids: Tensor | None = None
    """int64 (B,), indices into :attr:`~roll.algorithms.aggregation.LossDenominators.group_tokens`."""
    turn_ids: Tensor | None = None
    """int (B, L): which turn a token was sampled in, for ratios of segments; None: each run of masked tokens is one."""
    sequence_tokens: Tensor | None = None
    """int64 (B,): tokens of the loss in all rows of a row's trajectory; None: every row is one of its own."""
    teacher_divergence: Tensor | None = None
    """float (B, L), with gradient: the weighted divergence from a teacher's distributions; None: there is no
    teacher."""
    row_weights: Tensor | None = None
    """float64 (B,): weight of each row's sum in the loss of the whole optimizer step (``loss_agg_mode``); there when a
    policy loss is called by :func:`~roll.algorithms.losses.actor_loss`."""
    old_is_rollout: bool = False
    """``old_log_probs`` are the engine's: the ratio is taken against the policy that sampled."""

    @cached_property
    def proximal_log_probs(self) -> Tensor:
        """The policy before the update, without gradient: (B, L)."""
        old = self.log_probs if self.old_log_probs is None else self.old_log_probs
        return old.detach()

    @property
    def trainer_log_probs(self) -> Tensor:
        """The trainer's own policy to compare the engine with, without gradient: before the update where that is known,
        else the current one."""
        return self.log_probs.detach() if self.old_is_rollout else self.proximal_log_probs

    @cached_property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_old with gradient, float (B, L), within +-20; exactly 0 outside the mask."""
        return _MaskedDifference.apply(self.log_probs, self.proximal_log_probs, self.keep)

    @cached_property
    def ratio(self) -> Tensor:
        """pi / pi_old without gradient, float (B, L); exactly 1 outside the mask. Shared: do not write into it."""
        return self.log_ratio.detach().exp()

    @cached_property
    def keep(self) -> Keep:
        """Clears what stands outside the mask."""
        return Keep(self.mask, self.log_probs.dtype)

    @cached_property
    def num_tokens(self) -> Tensor:
        """int64 scalar: masked tokens."""
        return self.lengths.sum()

    @property
    def lengths(self) -> Tensor:
        """int64 (B,): masked tokens of each row."""
        return self.keep.counts


@dataclass(frozen=True)
class LossOutputs:
    """A micro-batch's share of the global loss (scalar, with gradient) and its metrics."""

    loss: Tensor
    metrics: Metrics


PolicyLossFunction = Callable[[LossInputs, Any, MetricBuilder], Tensor]

policy_losses: Registry[PolicyLossFunction] = Registry("pg_variant", POLICY_LOSSES)
_options_classes: dict[PolicyLossFunction, type] = {}


def register_policy_loss(
    name: str, *, options: type = PPOConfig, aliases: tuple[str, ...] = ()
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator: make a policy loss selectable as ``pg_variant: name``; ``options`` is its dataclass of YAML keys.

    A name of :data:`roll.config.algorithm.POLICY_LOSSES` has its aliases there; another one is added to it.
    """

    def decorate(function: PolicyLossFunction) -> PolicyLossFunction:
        policy_losses.add(function, name, aliases, PolicyLoss(name, aliases))
        _options_classes[function] = options
        return function

    return decorate


def options_class_of(pg_variant: str) -> type:
    """The options dataclass of a variant: the algorithm's keys, or that of a loss of the user's own."""
    return _options_classes.get(policy_losses.resolve(pg_variant), PPOConfig)
