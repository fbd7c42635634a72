"""Advantage estimators, chosen by ``estimator``, and their registry.

An estimator is a function ``(inputs: AdvantageInputs, options) -> (advantages, returns)``, both float (B, L) and 0
outside the mask; ``options`` is its dataclass of :mod:`roll.config.choices`.  It works on token-level rewards (the
normalised response reward on the last token, minus the divergence where it is part of the reward).  Normalisation comes
before it, by the types of mean and deviation that the estimator's paper asks for (``samples.resolve_norm_types``).
Groups are found by id, not by position; a group of one has nothing to be compared with and keeps its reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import Groups, masked_whiten
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry
from roll.algorithms.returns import Turns, discounted_returns, generalized_advantages
from roll.algorithms.samples import EPS, divisor, exceeds_rounding, token_level_rewards
from roll.config.algorithm import PPOConfig
from roll.config.choices import (
    ADV_ESTIMATORS,
    DiscountOptions,
    Estimator,
    GaeOptions,
    GdpoOptions,
    GigpoOptions,
    NoOptions,
    PassAtKOptions,
    StepOptions,
    traits,
)
from roll.protocol.metrics import Metrics


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Rows are responses, of multi-turn rollouts whole trajectories
    (:class:`~roll.algorithms.returns.TrajectoryLayout`)."""

    rewards: Tensor
    """float (B, L), token-level rewards, 0 outside the mask; or (B,), due at each response's last token."""
    mask: Tensor
    """bool (B, L), the response mask."""
    group_ids: Tensor
    """int64 (B,): rows with the same id answer the same prompt."""
    values: Tensor | None = None
    """float (B, L), the critic's (gae)."""
    baseline_rewards: Tensor | None = None
    """float (B,), reward of the greedy response to the same prompt (remax)."""
    scores: Tensor | None = None
    """float (B,), raw, before shaping, normalisation and divergence; 1 or more is right (pass@k)."""
    reward_components: Tensor | None = None
    """float (B, K), the rewards apart (gdpo)."""
    old_log_probs: Tensor | None = None
    """float (B, L), the trainer's before the update (optimal_token_baseline)."""
    old_sum_of_squares: Tensor | None = None
    """float (B, L), of all probabilities of the trainer's distribution that each token was drawn from
    (optimal_token_baseline)."""
    turn_ids: Tensor | None = None
    """int (B, L): the turn of each masked token; None: each run of masked tokens is one."""
    step_returns: Tensor | None = None
    """float (B, L): on the tokens of a turn, the discounted return from that turn on (gigpo, step_reinforce)."""
    state_ids: Tensor | None = None
    """int (B, L): turns with the same id were taken from the same state of the same task (gigpo)."""
    penalties: Tensor | None = None
    """float (B, L), subtracted from the advantages before whitening: a divergence of each token."""
    bootstrap_values: Tensor | None = None
    """float (B,): value of the state in which a truncated row was left, 0 for rows that ended (gae, turn_gae)."""
    divides: bool = True
    """Rewards were divided by their spread, so that returns of turns are, too (gigpo)."""

    @cached_property
    def token_level_rewards(self) -> Tensor:
        """float (B, L), 0 outside the mask."""
        return self.rewards if self.rewards.dim() == 2 else token_level_rewards(self.rewards, self.mask)

    @cached_property
    def response_rewards(self) -> Tensor:
        """float64 (B,): the sum of each row's token-level rewards; 0 where the row has no token."""
        if self.rewards.dim() == 2:
            return torch.where(self.mask, self.rewards, 0.0).sum(-1, dtype=torch.float64)
        return torch.where(self.mask.any(-1), self.rewards.double(), 0.0)

    @cached_property
    def groups(self) -> Groups:
        return Groups.of(self.group_ids)

    @cached_property
    def turns(self) -> Turns:
        return Turns.of(self.mask, self.turn_ids)

    def bootstrapped_rewards(self, gamma: float) -> Tensor:
        """Token-level rewards (B, L); a truncated row has what was still to come, gamma V, on its last token."""
        if self.bootstrap_values is None:
            return self.token_level_rewards
        return self.token_level_rewards + token_level_rewards(gamma * self.bootstrap_values, self.mask)

    def spread(self, per_row: Tensor) -> Tensor:
        """Give every masked token its row's number, which must be finite: (B,) -> float32 (B, L)."""
        # Half the time of torch.where, and most of what group-normalised advantages cost.
        return self.mask.view(torch.uint8).float().mul_(per_row.float().unsqueeze(-1))

    def require(self, name: str, estimator: str) -> Tensor:
        """The optional input ``name``; raises ``ValueError`` when it is missing."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"estimator {estimator!r} needs {name}, which this batch does not have")
        return value


@dataclass(frozen=True)
class AdvantageOutputs:
    """float32 (B, L) each, 0 outside the mask. Tensors may be shared between fields: do not write into them."""

    advantages: Tensor
    returns: Tensor
    raw_advantages: Tensor
    """Before whitening and clipping."""
    metrics: Metrics


EstimatorFunction = Callable[[AdvantageInputs, Any], tuple[Tensor, Tensor]]

advantage_estimators: Registry[EstimatorFunction] = Registry("estimator", ADV_ESTIMATORS, GaeOptions, Estimator)
register_advantage = advantage_estimators.register
"""Its traits are those of :class:`~roll.config.choices.Estimator`, such as ``norm`` or ``needs_values``."""


@register_advantage("gae")
def gae(inputs: AdvantageInputs, options: GaeOptions) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; arXiv 1506.02438."""
    values, rewards = inputs.require("values", "gae"), inputs.bootstrapped_rewards(options.gamma)
    return generalized_advantages(rewards, values, inputs.mask, options.gamma, options.lambd)


@register_advantage("reinforce")  # Williams 1992
@register_advantage("grpo")  # of group-normalised rewards; arXiv 2402.03300 section 4.1.2
@register_advantage("reinforce++")  # divergence inside the reward, whitened over the batch; arXiv 2501.03262 eq. 8-9
@register_advantage("reinforce++_baseline")  # of rewards minus their group's mean, whitened; the same, eq. 10-11
def returns_as_advantages(inputs: AdvantageInputs, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """The discounted return of the token-level rewards from each token on."""
    # Without a discount every token has the same return: no token-level rewards and no scan are needed.
    if inputs.rewards.dim() == 1 and options.gamma == 1.0:
        returns = inputs.spread(inputs.rewards)
        return returns, returns
    returns = discounted_returns(inputs.token_level_rewards, inputs.mask, options.gamma)
    return returns, returns


def centred_in_group(rewards: Tensor, groups: Groups) -> Tensor:
    """R minus its group's mean: (B,) -> (B,); a group of one keeps its reward."""
    return torch.where(groups.sizes > 1, rewards - groups.mean(rewards)[groups.index], rewards)


@register_advantage("rloo")
def rloo(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """R minus the mean reward of the others in the group; arXiv 2402.14740 eq. 4."""
    rewards, groups = inputs.response_rewards, inputs.groups
    # clamp: a group of one has no others, and its 0 / 1 is not subtracted below.
    others = (groups.sum(rewards)[groups.index] - rewards) / (groups.sizes - 1).clamp(min=1)
    return inputs.spread(rewards - others * (groups.sizes > 1)), inputs.spread(rewards)


@register_advantage("remax")
def remax(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """Reward from each token on, minus the reward of the greedy response to the same prompt; arXiv 2310.10505 eq. 4.

    Without a divergence in the reward this is one number for all tokens of a response.
    """
    if inputs.rewards.dim() == 1:
        returns = inputs.spread(inputs.response_rewards)
    else:
        returns = discounted_returns(inputs.rewards, inputs.mask, 1.0).float()
    return returns - inputs.spread(inputs.require("baseline_rewards", "remax")), returns


@register_advantage("opo")
def opo(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """R minus the group's length-weighted mean reward, the variance-optimal baseline; arXiv 2505.23585 eq. 7."""
    rewards, groups = inputs.response_rewards, inputs.groups
    lengths = inputs.mask.sum(-1).to(rewards.dtype)
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    advantages = torch.where(groups.sizes > 1, rewards - baseline[groups.index], rewards)
    return inputs.spread(advantages), inputs.spread(rewards)


@register_advantage("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    r"""Reward from each token on, minus a baseline of least variance for each position; arXiv 2602.07078.

    B_t = sum_i G_t W_t / sum_i W_t over the responses i of the group that have a t-th token, G_t the reward from it on
    and W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_v^2), the squared norms of the logits' gradients so far.  Where a
    response continues alone, B_t is 0.  Tokens of tools are no positions.
    """
    name, mask, groups = "optimal_token_baseline", inputs.mask, inputs.groups
    probability = inputs.require("old_log_probs", name).double().exp()
    squares = inputs.require("old_sum_of_squares", name).double()
    # The same as above, the token's own term apart: nearly certain tokens would cancel to a negative weight.
    energy = (1.0 - probability).square_().add_((squares - probability.square()).clamp_(min=0.0))
    weights = torch.where(mask, energy, 0.0).cumsum(-1)[mask]
    returns = discounted_returns(inputs.token_level_rewards.double(), mask, 1.0)
    to_go = returns[mask]
    # One cell for each group and position among the response's own tokens.
    length = mask.shape[1]
    cells = (groups.index[:, None] * length + mask.cumsum(-1) - 1)[mask]

    def per_cell(values: Tensor) -> Tensor:
        return values.new_zeros(len(groups.counts) * length).index_add_(0, cells, values)[cells]

    baseline = per_cell(to_go * weights) / (per_cell(weights) + 1e-8)
    several = per_cell(torch.ones_like(to_go)) > 1
    advantages = returns.masked_scatter(mask, torch.where(several, to_go - baseline, to_go))
    return advantages.float(), returns.float()


@register_advantage("gpg")
def gpg(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """R minus its group's mean, times B / (B - M), M rows being in groups without signal; arXiv 2504.02546 eq. 6-7."""
    rewards, groups = inputs.response_rewards, inputs.groups
    centred = centred_in_group(rewards, groups)
    has_signal = exceeds_rounding(groups.mean(centred.abs()), groups.mean(rewards))[groups.index]
    scale = len(rewards) / has_signal.sum().clamp(min=1)
    return inputs.spread(centred * scale), inputs.spread(rewards)


@register_advantage("maxrl")
def maxrl(inputs: AdvantageInputs, options: NoOptions) -> tuple[Tensor, Tensor]:
    """(R minus its group's mean) / the mean, 0 where the mean is not positive; arXiv 2602.02710.

    With rewards of 0 and 1 the mean is the share of right answers, and dividing by it turns the gradient of the success
    rate into that of its logarithm: rare successes count more.
    """
    rewards, groups = inputs.response_rewards, inputs.groups
    mean = groups.mean(rewards)[groups.index]
    advantages = torch.where(mean > EPS, (rewards - mean) / (mean + EPS), 0.0)
    return inputs.spread(advantages), inputs.spread(rewards)


@register_advantage("pass@k")
def pass_at_k(inputs: AdvantageInputs, options: PassAtKOptions) -> tuple[Tensor, Tensor]:
    """Advantage of a response for the chance that one of k is right, in closed form; arXiv 2508.10751 eq. 11-14.

    With N responses, W of them wrong (raw score below 1): R = 1 - C(W,k)/C(N,k), s = sqrt(R (1-R)); a right response
    gets (1-R)/s, a wrong one (1 - R - C(W-1,k-1)/C(N-1,k-1))/s, all get 0 where s is 0.  From k = N on that is always
    so: the only choice of k is the whole group.
    """
    groups = inputs.groups
    right = inputs.require("scores", "pass@k") >= 1.0
    size = groups.sizes.double()
    wrong = groups.sum((~right).double())[groups.index]
    # A group may have fewer than k responses: choosing more than it has is not defined.
    k = size.clamp(max=options.k)
    all_wrong = _choose_ratio(wrong, size, k)
    spread = (all_wrong * (1.0 - all_wrong)).sqrt()
    others_wrong = _choose_ratio(wrong - 1.0, size - 1.0, k - 1.0)
    advantage = torch.where(right, all_wrong, all_wrong - others_wrong)
    advantage = torch.where(spread > EPS, advantage / spread.clamp(min=EPS), 0.0)
    return inputs.spread(advantage), inputs.spread(inputs.response_rewards)


def _choose_ratio(subset: Tensor, total: Tensor, k: Tensor) -> Tensor:
    """C(subset, k) / C(total, k), 0 where subset < k: float64 (B,)."""
    # lgamma has poles at 0 and below: where subset < k it is evaluated at k, and its value replaced by 0.
    kept = torch.maximum(subset, k)
    logarithm = (
        torch.lgamma(kept + 1) - torch.lgamma(kept - k + 1) - torch.lgamma(total + 1) + torch.lgamma(total - k + 1)
    )
    return torch.where(subset >= k, logarithm.exp(), 0.0)


@register_advantage("gdpo")
def gdpo(inputs: AdvantageInputs, options: GdpoOptions) -> tuple[Tensor, Tensor]:
    """Each reward normalised in its group apart, then their weighted sum whitened over rows; arXiv 2601.05242 eq. 4-6.

    Raises ``ValueError`` when ``weights`` and the rewards differ in number.
    """
    components = inputs.require("reward_components", "gdpo").double()
    count = components.shape[1]
    weights = tuple(options.weights.values()) or (1.0,) * count
    if len(weights) != count:
        raise ValueError(f"gdpo has {count} rewards but estimator.weights has {len(weights)}; give one weight for each")
    groups = inputs.groups
    total = torch.zeros_like(components[:, 0])
    for weight, rewards in zip(weights, components.unbind(1), strict=True):
        mean, std = groups.moments(rewards)
        spread = divisor(std, mean)[groups.index]
        total += weight * centred_in_group(rewards, groups) / spread
    # The standard deviation of a single row is NaN.
    if len(total) > 1:
        total = (total - total.mean()) / divisor(total.std(), total.mean())
    return inputs.spread(total), inputs.spread(inputs.response_rewards)


@register_advantage("turn_gae")
def turn_gae(inputs: AdvantageInputs, options: GaeOptions) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with turns as actions; Turn-PPO, arXiv 2512.17008.

    delta_k = r_k + gamma V(s_{k+1}) - V(s_k), with r_k the sum of the turn's token-level rewards and V(s_k) the value
    at its first token; every token of a turn gets its advantage, and the turn's return as the target of its value.
    """
    turns, values = inputs.turns, inputs.require("values", "turn_gae")
    rewards = inputs.bootstrapped_rewards(options.gamma)
    states = turns.first(values)
    advantages, returns = generalized_advantages(turns.sum(rewards), states, turns.exists, options.gamma, options.lambd)
    return turns.spread(advantages), turns.spread(returns)


@register_advantage("gigpo")
def gigpo(inputs: AdvantageInputs, options: GigpoOptions) -> tuple[Tensor, Tensor]:
    """The trajectory's normalised reward plus the advantage of a turn among equal states; arXiv 2505.10978 eq. 3-8.

    A turn's discounted return is compared with those of all turns taken from the same state of the same task; a state
    that was seen once teaches nothing about its turn (0).  One setting normalises both parts: where ``norm_std_type``
    is null, neither is divided.
    """
    turns = inputs.turns
    returns = turns.first(inputs.require("step_returns", "gigpo"))
    states = turns.first(inputs.require("state_ids", "gigpo").double())[turns.exists].long()
    groups, of_turn = Groups.of(states), returns[turns.exists].double()
    mean, std = groups.moments(of_turn)
    step = of_turn - mean[groups.index]
    if inputs.divides:
        step = step / divisor(std, mean)[groups.index]
    per_turn = torch.zeros_like(returns, dtype=torch.float64).masked_scatter(turns.exists, step)
    advantages = options.step_weight * turns.spread(per_turn)
    advantages += options.episode_weight * torch.where(inputs.mask, inputs.response_rewards[:, None], 0.0)
    return advantages.float(), turns.spread(returns)


@register_advantage("step_reinforce")
def step_reinforce(inputs: AdvantageInputs, options: StepOptions) -> tuple[Tensor, Tensor]:
    """Every token of a turn gets the (normalised) discounted return of its trajectory from that turn on."""
    returns = torch.where(inputs.mask, inputs.require("step_returns", "step_reinforce"), 0.0)
    return returns, returns


@register_advantage("agentic_reinforce")
def agentic_reinforce(inputs: AdvantageInputs, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """Discount per turn instead of per token: every token of a turn gets the return from that turn on."""
    turns = inputs.turns
    returns = turns.spread(turns.returns(inputs.token_level_rewards, options.gamma))
    return returns, returns


class AdvantageEstimator:
    """The estimator of a configuration, looked up once, with its whitening and clipping.

    Raises ``ValueError`` for an unknown estimator, or an option that it does not have.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._function = advantage_estimators.resolve(config.estimator.name)
        self._options = advantage_estimators.options_of(config.estimator)
        self._whitens = config.whiten_advantages or traits(config.estimator).whitens

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages and returns. Raises ``ValueError`` for a missing input."""
        if self._config.whiten_rewards:
            inputs = replace(inputs, rewards=masked_whiten(inputs.token_level_rewards, inputs.mask))
        raw, returns = self._function(inputs, self._options)
        if inputs.penalties is not None:
            # Per token and after the group baseline, which must not average another response's divergence away.
            raw = raw - torch.where(inputs.mask, inputs.penalties, 0.0)
        advantages = masked_whiten(raw, inputs.mask) if self._whitens else raw
        metrics, bound = MetricBuilder(), self._config.advantage_clip
        if bound is not None:
            clipped = advantages.clamp(-bound, bound)
            metrics.mean("critic/advantage_clip_frac", (clipped != advantages).sum(), inputs.mask.sum())
            advantages = clipped
        return AdvantageOutputs(advantages, returns, raw, metrics.build())


def estimate_advantages(inputs: AdvantageInputs, config: PPOConfig) -> AdvantageOutputs:
    """Advantages and returns of one batch, by :class:`AdvantageEstimator`."""
    return AdvantageEstimator(config)(inputs)
