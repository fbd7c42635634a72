"""Advantage estimators as verl computes them where that differs from the paper of the same name.

Chosen by their path, ``estimator: roll.algorithms.verl_estimators.gpg``, which is what ``roll translate`` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs, centred_in_group
from roll.algorithms.aggregation import Groups, masked_whiten
from roll.algorithms.registry import with_options
from roll.algorithms.samples import EPS
from roll.config.choices import GdpoOptions, NoOptions


@with_options(NoOptions)
def gpg(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """R minus its group's mean, times B / (rows whose reward is not 0).

    The paper (2504.02546) counts the rows of groups with a signal instead.
    """
    rewards = inputs.response_rewards
    scale = len(rewards) / rewards.count_nonzero().clamp(min=1)
    return inputs.spread(centred_in_group(rewards, inputs.groups) * scale), inputs.spread(rewards)


@dataclass(frozen=True, kw_only=True)
class PasskOptions:
    """Options of :func:`grpo_passk`."""

    by_std: bool = True
    """Divide by the group's standard deviation."""


@with_options(PasskOptions)
def grpo_passk(inputs: AdvantageInputs, options: PasskOptions) -> tuple[Tensor, Tensor]:
    """Best reward of a group minus the second best, for the best response alone; arXiv 2503.19595.

    Raises:
        ValueError: a group of one.
    """
    rewards, groups = inputs.response_rewards, inputs.groups
    if bool((groups.counts < 2).any()):
        raise ValueError("grpo_passk compares the two best responses to a prompt: num_return_sequences_in_group >= 2")
    rows = torch.arange(len(rewards), device=rewards.device)
    first = _best(rewards, groups)
    # Of several best responses the first one wins, as argmax has it.
    winners = torch.where(rewards == first[groups.index], rows, len(rewards))
    winner = winners.new_full(first.shape, len(rewards)).scatter_reduce(0, groups.index, winners, "amin")
    best = rows == winner[groups.index]
    lead = first - _best(torch.where(best, -torch.inf, rewards), groups)
    if options.by_std:
        lead = lead / (groups.moments(rewards)[1] + EPS)
    advantages = torch.where(best, lead[groups.index], 0.0)
    return inputs.spread(advantages), inputs.spread(rewards)


@with_options(GdpoOptions)
def gdpo(inputs: AdvantageInputs, options: GdpoOptions) -> tuple[Tensor, Tensor]:
    """Each reward normalised in its group apart, then their weighted sum whitened over tokens.

    The paper (2601.05242) whitens over responses.

    Raises:
        ValueError: ``weights`` and the rewards differ in number.
    """
    components, groups = inputs.require("reward_components", "gdpo").double(), inputs.groups
    weights = tuple(options.weights.values()) or (1.0,) * components.shape[1]
    total = torch.zeros_like(components[:, 0])
    for weight, rewards in zip(weights, components.unbind(1), strict=True):
        # verl takes 1 for the deviation of a single response.
        std = torch.where(groups.sizes > 1, groups.moments(rewards)[1][groups.index], 1.0)
        total += weight * centred_in_group(rewards, groups) / (std + EPS)
    advantages = masked_whiten(inputs.spread(total), inputs.mask)
    return advantages, inputs.spread(inputs.response_rewards)


def _best(rewards: Tensor, groups: Groups) -> Tensor:
    """The largest reward of each group: (B,) -> (G,)."""
    lowest = rewards.new_full((len(groups.counts),), -torch.inf)
    return lowest.scatter_reduce(0, groups.index, rewards, "amax")
