"""Advantage estimators that compare the responses to one prompt, and those of multi-turn work.

A group of one has nobody to be compared with: it keeps its reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.advantage_types import AdvantageInputs, AdvantageOptions, register_advantage
from roll.algorithms.masked import Groups
from roll.algorithms.ratios import segment_starts
from roll.algorithms.returns import discounted_returns, reverse_discounted_sum
from roll.algorithms.reward_processing import EPS


def centred_in_group(rewards: Tensor, groups: Groups) -> Tensor:
    """R minus its group's mean: (B,) -> (B,); a group of one keeps its reward."""
    return torch.where(groups.sizes > 1, rewards - groups.mean(rewards)[groups.index], rewards)


def divided_by_spread(centred: Tensor, std: Tensor) -> Tensor:
    """centred / (std + 1e-6), and no division where there is no spread."""
    return centred / torch.where(std > EPS, std + EPS, 1.0)


@register_advantage("rloo")
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """R minus the mean reward of the others in the group; arXiv 2402.14740 eq. 4."""
    rewards, groups = inputs.response_rewards, inputs.groups
    others = (groups.sum(rewards)[groups.index] - rewards) / (groups.sizes - 1).clamp(min=1)
    return inputs.spread(rewards - others * (groups.sizes > 1)), inputs.spread(rewards)


@register_advantage("remax")
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Reward from each token on, minus the reward of the greedy response to the same prompt; arXiv 2310.10505 eq. 4.

    Without a divergence in the reward this is one number for all tokens of a response.
    """
    if inputs.rewards.dim() == 1:
        returns = inputs.spread(inputs.response_rewards)
    else:
        returns = discounted_returns(inputs.rewards, inputs.mask, 1.0).float()
    return returns - inputs.spread(inputs.require("baseline_rewards", "remax")), returns


@register_advantage("opo")
def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """R minus the group's length-weighted mean reward, the variance-optimal baseline; arXiv 2505.23585 eq. 7."""
    rewards, groups = inputs.response_rewards, inputs.groups
    lengths = inputs.mask.sum(-1).to(rewards.dtype)
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    advantages = torch.where(groups.sizes > 1, rewards - baseline[groups.index], rewards)
    return inputs.spread(advantages), inputs.spread(rewards)


@register_advantage("optimal_token_baseline", aliases=("tir_optimal_token_baseline",))
def optimal_token_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    r"""Reward from each token on, minus a baseline of least variance for each position; arXiv 2602.07078.

    B_t = sum_i G_t W_t / sum_i W_t over the responses i of the group that have a t-th token, G_t the reward from it on
    and W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_v^2), the squared norms of the logits' gradients so far.  Where a
    response goes on alone, B_t is 0.  Tokens of tools are no positions.
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
def gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """R minus its group's mean, times B / (B - M), M rows being in groups without signal; arXiv 2504.02546 eq. 6-7."""
    rewards, groups = inputs.response_rewards, inputs.groups
    centred = centred_in_group(rewards, groups)
    has_signal = groups.sum(centred.abs())[groups.index] > EPS
    scale = len(rewards) / has_signal.sum().clamp(min=1)
    return inputs.spread(centred * scale), inputs.spread(rewards)


@register_advantage("maxrl")
def maxrl(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """(R minus its group's mean) / the mean, 0 where the mean is not positive; arXiv 2602.02710.

    With rewards of 0 and 1 the mean is the share of right answers, and dividing by it turns the gradient of the success
    rate into that of its logarithm: rare successes count more.
    """
    rewards, groups = inputs.response_rewards, inputs.groups
    mean = groups.mean(rewards)[groups.index]
    advantages = torch.where(mean > EPS, (rewards - mean) / (mean + EPS), 0.0)
    return inputs.spread(advantages), inputs.spread(rewards)


@register_advantage("pass@k", aliases=("pass_at_k",))
def pass_at_k(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Advantage of a response for the chance that one of k is right, in closed form; arXiv 2508.10751 eq. 11-14.

    With N responses, W of them wrong (raw score below 1): R = 1 - C(W,k)/C(N,k), s = sqrt(R (1-R)); a right response
    gets (1-R)/s, a wrong one (1 - R - C(W-1,k-1)/C(N-1,k-1))/s, all get 0 where s is 0.  From k = N on that is always
    so: the only choice of k is the whole group.
    """
    groups = inputs.groups
    right = inputs.require("scores", "pass@k") >= 1.0
    size = groups.sizes.double()
    wrong = groups.sum((~right).double())[groups.index]
    k = size.clamp(max=options.pass_k)
    all_wrong = _choose_ratio(wrong, size, k)
    spread = (all_wrong * (1.0 - all_wrong)).sqrt()
    others_wrong = _choose_ratio(wrong - 1.0, size - 1.0, k - 1.0)
    advantage = torch.where(right, all_wrong, all_wrong - others_wrong)
    advantage = torch.where(spread > EPS, advantage / spread.clamp(min=EPS), 0.0)
    return inputs.spread(advantage), inputs.spread(inputs.response_rewards)


def _choose_ratio(subset: Tensor, total: Tensor, k: Tensor) -> Tensor:
    """C(subset, k) / C(total, k), 0 where subset < k: float64 (B,)."""
    kept = torch.maximum(subset, k)
    logarithm = (
        torch.lgamma(kept + 1) - torch.lgamma(kept - k + 1) - torch.lgamma(total + 1) + torch.lgamma(total - k + 1)
    )
    return torch.where(subset >= k, logarithm.exp(), 0.0)


@register_advantage("gdpo")
def gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Each reward normalised in its group apart, then their weighted sum whitened over rows; arXiv 2601.05242 eq. 4-6.

    Raises ``ValueError`` when ``reward_weights`` and the rewards differ in number.
    """
    components = inputs.require("reward_components", "gdpo").double()
    count = components.shape[1]
    weights = options.reward_weights or (1.0,) * count
    if len(weights) != count:
        raise ValueError(f"gdpo has {count} rewards but reward_weights has {len(weights)}; give one weight for each")
    groups = inputs.groups
    total = torch.zeros_like(components[:, 0])
    for weight, rewards in zip(weights, components.unbind(1), strict=True):
        total += weight * divided_by_spread(centred_in_group(rewards, groups), groups.std(rewards)[groups.index])
    if len(total) > 1:
        total = divided_by_spread(total - total.mean(), total.std())
    return inputs.spread(total), inputs.spread(inputs.response_rewards)


@register_advantage("gigpo")
def gigpo(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Episode advantage in its group plus step advantage among equal states; arXiv 2505.10978 eq. 3-8.

    Rows are steps.  Every episode counts once in its group, however many steps it has.  A state that was seen once
    teaches nothing about its step (0).
    """
    rewards, groups = inputs.response_rewards, inputs.groups
    episodes = Groups.of(inputs.require("trajectory_ids", "gigpo"))
    share = 1.0 / episodes.sizes.double()
    episode_count = groups.sum(share)
    centred = rewards - (groups.sum(share * rewards) / episode_count)[groups.index]
    variance = groups.sum(share * centred.square()) / (episode_count - 1).clamp(min=1)
    alone = (episode_count < 1.5)[groups.index]
    episode = torch.where(alone, rewards, divided_by_spread(centred, variance.sqrt()[groups.index]))

    states = Groups.of(inputs.require("state_ids", "gigpo"))
    step_returns = inputs.require("step_returns", "gigpo").double()
    centred_step = step_returns - states.mean(step_returns)[states.index]
    step = divided_by_spread(centred_step, states.std(step_returns)[states.index])
    advantages = options.episode_reward_weight * episode + options.step_reward_weight * step
    return inputs.spread(advantages), inputs.spread(step_returns)


@register_advantage("step_reinforce")
def step_reinforce(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Every token of a step gets the discounted return of its episode from that step on. Rows are steps."""
    returns = inputs.spread(inputs.require("step_returns", "step_reinforce"))
    return returns, returns


@register_advantage("agentic_reinforce")
def agentic_reinforce(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """Discount per turn instead of per token: every token of a turn gets the return from that turn on."""
    mask = inputs.mask
    turn = (segment_starts(mask).cumsum(-1) - 1).clamp(min=0)
    turns = int(turn.max()) + 1 if turn.numel() else 1
    rewards = torch.where(mask, inputs.token_level_rewards, 0.0)
    per_turn = rewards.new_zeros(mask.shape[0], turns).scatter_add_(1, turn, rewards)
    returns = torch.where(mask, reverse_discounted_sum(per_turn, options.gamma).gather(1, turn), 0.0)
    return returns, returns


def discounted_step_returns(step_rewards: Tensor, trajectory_ids: Tensor, step_index: Tensor, gamma: float) -> Tensor:
    """Return of each episode from each of its steps on: float (B,) -> (B,).

    Args:
        step_rewards: float (B,), reward of each step.
        trajectory_ids: int64 (B,).
        step_index: int64 (B,), the order of the steps within an episode; gaps are allowed.
        gamma: discount per step.
    """
    episodes = Groups.of(trajectory_ids)
    order = torch.argsort(step_index, stable=True)
    order = order[torch.argsort(episodes.index[order], stable=True)]
    rows = episodes.index[order]
    first = episodes.counts.cumsum(0) - episodes.counts
    columns = torch.arange(len(rows), device=rows.device) - first[rows]
    table = step_rewards.new_zeros(len(episodes.counts), int(episodes.counts.max()) if len(rows) else 0)
    table[rows, columns] = step_rewards[order]
    returns = torch.empty_like(step_rewards)
    returns[order] = reverse_discounted_sum(table, gamma)[rows, columns]
    return returns
