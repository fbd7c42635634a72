"""Policy losses of SkyRL's package ``skyrl`` that differ from those of the same name here, and its older mean.

For the losses by covariance it multiplies the advantages with the weight that ``loss_agg_mode`` gives to their row
before the loss sees them, and sums what that returns.  For losses that are proportional to the advantage this is the
same; here it moves the covariances, and leaves a penalty a sum over tokens.  Chosen by their path, ``loss:
roll.algorithms.skyrl_losses.kl_cov``, which is what ``roll translate`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from roll.algorithms import policy_losses
from roll.algorithms.aggregation import LossDenominators
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LOG_RATIO_BOUND, LossInputs, clip_range
from roll.algorithms.registry import with_options
from roll.config.choices import ClipCovOptions, ClipOptions, KlCovOptions

Options = TypeVar("Options")


def sequence_mean(mask: Tensor, denominators: LossDenominators, *, sequence_tokens: Tensor | None = None) -> Tensor:
    """Row weights of ``loss_agg_mode``, 1 / (n_i R): bool (B, L) -> float64 (B,).

    ``seq-mean-token-mean`` whose R counts rows without a masked token as well, such as those that ``max_len_mask``
    leaves out of the loss.
    """
    tokens = mask.sum(-1) if sequence_tokens is None else sequence_tokens
    return 1.0 / (tokens.double().clamp(min=1) * max(denominators.rows, 1.0))


def token_mean_legacy(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Row weights of ``loss_agg_mode``: bool (B, L) -> float64 (B,).

    The mean over the tokens of each micro-batch, averaged over micro-batches by their rows; a token of a micro-batch
    with short responses weighs more than one of another.
    """
    share = len(mask) / max(denominators.rows, 1.0)
    return mask.new_full((len(mask),), share, dtype=torch.float64) / mask.sum().clamp(min=1)


@with_options(ClipCovOptions)
def clip_cov(inputs: LossInputs, options: ClipCovOptions, metrics: MetricBuilder) -> Tensor:
    """``clip_cov`` (arXiv 2505.22617) with bounds on the covariance with A times its row's weight: float (B, L).

    Row weights of a mean over N tokens or samples make these covariances N times smaller.
    """
    return _with_weighted_advantages(policy_losses.clip_cov, inputs, options, metrics)


@with_options(KlCovOptions)
def kl_cov(inputs: LossInputs, options: KlCovOptions, metrics: MetricBuilder) -> Tensor:
    """``kl_cov`` (arXiv 2505.22617) whose penalty ``coef |log r|`` is summed over the chosen tokens: float (B, L)."""
    return _with_weighted_advantages(policy_losses.kl_cov, inputs, options, metrics)


def _with_weighted_advantages(
    loss: Callable[[LossInputs, Options, MetricBuilder], Tensor],
    inputs: LossInputs,
    options: Options,
    metrics: MetricBuilder,
) -> Tensor:
    """The loss of advantages times row weights, divided by the weights that aggregation will multiply it with."""
    assert inputs.row_weights is not None, "actor_loss gives them"
    weights = inputs.row_weights[:, None]
    return loss(replace(inputs, advantages=inputs.advantages * weights), options, metrics) / weights


@with_options(ClipOptions)
def engine_is(inputs: LossInputs, options: ClipOptions, metrics: MetricBuilder) -> Tensor:
    """-sg(r) A log pi with r = pi / rollout, 0 where r is outside (1 - low, 1 + high): float (B, L); ``rollout_is``."""
    ratio, (down, up) = _engine_log_ratio(inputs).detach().exp(), clip_range(options)
    kept = (ratio > 1.0 - down) & (ratio < 1.0 + up)
    metrics.mean("actor/clipfrac", (~kept & inputs.mask).sum(), inputs.num_tokens)
    return -torch.where(kept, ratio, 0.0) * inputs.advantages * inputs.log_probs


@dataclass(frozen=True, kw_only=True)
class EngineDppo(ClipOptions):
    """Options of :func:`engine_dppo`, with PPO's clip range."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL of the sampled token's probability."""


@with_options(EngineDppo)
def engine_dppo(inputs: LossInputs, options: EngineDppo, metrics: MetricBuilder) -> Tensor:
    """-M r A with r = pi / rollout: float (B, L); DPPO (arXiv 2602.04879 eq. 12-14) against the policy that sampled.

    M drops tokens whose probability has moved where the advantage pushes it by more than a bound: ``clip_low`` for
    negative and ``clip_high`` for positive advantages, in total variation or KL (``divergence``).
    """
    log_ratio = _engine_log_ratio(inputs)
    assert inputs.rollout_log_probs is not None
    sampled, current = inputs.rollout_log_probs.double(), inputs.log_probs.detach().double()
    moved = current.exp() - sampled.exp()
    distance = moved.abs()
    if options.divergence == "kl":
        others = (1.0 - sampled.exp() + _TINY) / (1.0 - current.exp() + _TINY)
        distance = sampled.exp() * (sampled - current) + (1.0 - sampled.exp()) * others.log()
    down, up = clip_range(options)
    upwards = (inputs.advantages > 0) & (moved > 0) & (distance > up)
    downwards = (inputs.advantages < 0) & (moved < 0) & (distance > down)
    dropped = (upwards | downwards) & inputs.mask
    metrics.mean("actor/clipfrac", dropped.sum(), inputs.num_tokens)
    return -torch.where(dropped, 0.0, log_ratio.exp()) * inputs.advantages


_TINY = 1e-8


def _engine_log_ratio(inputs: LossInputs) -> Tensor:
    """log pi - log rollout with gradient, within +-20 and 0 outside the mask: float (B, L).

    Raises ``ValueError`` where the engine has given no log-probs.
    """
    if inputs.rollout_log_probs is None:
        raise ValueError("a ratio to the policy that sampled needs rollout_log_probs: let the engine return log-probs")
    difference = torch.where(inputs.mask, inputs.log_probs - inputs.rollout_log_probs, 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
