"""One function of a user's own of each kind that the YAML can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs
from roll.algorithms.aggregation import LossDenominators
from roll.algorithms.kl import KLOptions
from roll.algorithms.losses import Correction, register_policy_loss
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs
from roll.algorithms.registry import with_options


@dataclass(frozen=True)
class GatedOptions:
    gate: float = 1.5


@register_policy_loss("gated", options=GatedOptions)
def gated(inputs: LossInputs, options: GatedOptions, metrics: MetricBuilder) -> Tensor:
    kept = (inputs.ratio < options.gate) & inputs.mask
    metrics.mean("actor/gated", kept.sum(), inputs.num_tokens)
    return -inputs.advantages * inputs.log_probs * kept


@dataclass(frozen=True)
class BarOptions:
    bar: float = 0.0


@with_options(BarOptions)
def above_a_bar(inputs: AdvantageInputs, options: BarOptions) -> tuple[Tensor, Tensor]:
    rewards = inputs.spread(inputs.response_rewards)
    return inputs.spread(inputs.response_rewards - options.bar), rewards


def squared(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
    return (log_probs - ref_log_probs).square()


def row_sum(mask: Tensor, denominators: LossDenominators) -> Tensor:
    return torch.full((mask.shape[0],), 1.0 / max(denominators.samples, 1.0), dtype=torch.float64)


def share_of_the_prompt(mask: Tensor, denominators: LossDenominators, group_ids: Tensor) -> Tensor:
    assert denominators.group_tokens is not None
    return mask.sum(-1) / denominators.group_tokens[group_ids].clamp(min=1)


def halved_where_unlikely(inputs: LossInputs, metrics: MetricBuilder) -> Correction:
    unlikely = inputs.rollout_log_probs < -2.0
    metrics.mean("actor/unlikely", (unlikely & inputs.mask).sum(), inputs.num_tokens)
    return Correction(torch.where(unlikely, 0.5, 1.0).to(inputs.log_probs), torch.ones_like(inputs.mask))


def best_at_least(score: float) -> Callable[[np.ndarray], bool]:
    return lambda scores: bool(np.nanmax(scores) >= score)
