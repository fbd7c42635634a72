"""Advantages from token-level rewards, chosen by ``adv_estimator``; those that compare groups are next door."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from roll.algorithms import group_advantages as _group_advantages  # noqa: F401  registers its estimators
from roll.algorithms.advantage_types import (
    AdvantageInputs,
    AdvantageOptions,
    AdvantageOutputs,
    advantage_estimators,
    needs_values,
    register_advantage,
    resolve_norm_types,
    traits_of,
)
from roll.algorithms.masked import masked_whiten
from roll.algorithms.metric_builder import MetricBuilder
from roll.algorithms.returns import discounted_returns, generalized_advantages

__all__ = [
    "ADVANTAGE_NAMES",
    "AdvantageInputs",
    "AdvantageOptions",
    "AdvantageOutputs",
    "estimate_advantages",
    "needs_values",
    "register_advantage",
    "resolve_norm_types",
]


@register_advantage("gae", needs_values=True)
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; arXiv 1506.02438."""
    values = inputs.require("values", "gae")
    return generalized_advantages(inputs.token_level_rewards, values, inputs.mask, options.gamma, options.lambd)


def returns_as_advantages(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The discounted return from each token on serves as its advantage."""
    if inputs.rewards.dim() == 1 and options.gamma == 1.0:
        returns = inputs.spread(inputs.rewards)
        return returns, returns
    returns = discounted_returns(inputs.token_level_rewards, inputs.mask, options.gamma)
    return returns, returns


@register_advantage("reinforce")
def reinforce(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discounted return of the token-level rewards (Williams 1992)."""
    return returns_as_advantages(inputs, options)


@register_advantage("grpo", norm=("group", "group"))
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The group-normalised reward for every token; arXiv 2402.03300 section 4.1.2."""
    return returns_as_advantages(inputs, options)


@register_advantage("reinforce++", aliases=("reinforce_plus_plus",), whitens=True)
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discounted return (divergence inside the reward), whitened over the batch; arXiv 2501.03262 eq. 8-9."""
    return returns_as_advantages(inputs, options)


@register_advantage(
    "reinforce++_baseline", aliases=("reinforce_plus_plus_baseline",), norm=("group", None), whitens=True
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """The reward minus its group's mean, then whitened over the batch; arXiv 2501.03262 eq. 10-11."""
    return returns_as_advantages(inputs, options)


ADVANTAGE_NAMES = advantage_estimators.names


def estimate_advantages(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """Advantages and returns by the estimator in ``options``, whitened and clipped as asked.

    Raises ``ValueError`` for an unknown estimator or a missing input.
    """
    estimator = advantage_estimators.resolve(options.adv_estimator)
    if options.whiten_rewards:
        inputs = replace(inputs, rewards=masked_whiten(inputs.token_level_rewards, inputs.mask))
    raw, returns = estimator(inputs, options)
    advantages = raw
    if options.whiten_advantages or traits_of(options.adv_estimator).whitens:
        advantages = masked_whiten(advantages, inputs.mask)
    metrics = MetricBuilder()
    if options.advantage_clip is not None:
        clipped = advantages.clamp(-options.advantage_clip, options.advantage_clip)
        metrics.mean("critic/advantage_clip_frac", (clipped != advantages).sum(), inputs.mask.sum())
        advantages = clipped
    return AdvantageOutputs(advantages, returns, raw, metrics.build())
