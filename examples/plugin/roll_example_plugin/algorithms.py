"""``loss: {name: reinforce_clipped, bound: 5}`` and ``estimator: centred``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs
from roll.algorithms.losses import register_policy_loss
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs
from roll.algorithms.registry import with_options
from roll.config.choices import NoOptions


@dataclass(frozen=True)
class ClippedOptions:
    bound: float = 2.0
    """Greatest weight of a token."""


@register_policy_loss("reinforce_clipped", options=ClippedOptions)
def reinforce_clipped(inputs: LossInputs, options: ClippedOptions, metrics: MetricBuilder) -> Tensor:
    """-min(ratio, bound) A log pi, the weight without gradient; (B, L)."""
    weight = inputs.log_ratio.detach().exp().clamp(max=options.bound)
    metrics.mean("actor/weight", (weight * inputs.mask).sum(), inputs.num_tokens)
    return -weight * inputs.advantages * inputs.log_probs


@with_options(NoOptions)
def centred(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of the batch, the same for every token of a response; and the returns."""
    rewards = inputs.response_rewards
    return inputs.spread(rewards - rewards.mean()), inputs.spread(rewards)
