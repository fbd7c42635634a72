"""Losses of SkyRL and verl, written down from their definitions: plain loops in float64, with their own defaults.

Columns are (B, R): responses side by side, right-padded, ``mask`` 1.0 on their tokens. verl: ``core_algos.py``,
``rollout_corr_helper.py``, ``actor.yaml``, ``algorithm.yaml``. SkyRL: ``ppo_utils.py`` and
``off_policy_correction_utils.py``, with the configurations of both packages. Settings are their keys without the common
beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]


@dataclass
class Responses:
    """Values of a batch that both projects know."""

    mask: Tensor
    group: Tensor
    scores: Tensor
    components: Tensor
    """(rows, 2): two rewards apart."""
    log_probs: Tensor
    """With gradient."""
    entropy: Tensor
    """With gradient."""
    new_values: Tensor
    """With gradient."""
    old: Tensor
    old_squares: Tensor
    """Sums of squared probabilities of the distributions that ``old`` is from."""
    rollout: Tensor
    reference: Tensor
    values: Tensor
    greedy_scores: Tensor
    prompt_length: int
    response_length: int

    @property
    def truncated(self) -> Tensor:
        """Responses as long as may be."""
        return self.mask.sum(-1) == self.response_length

    def without_truncated(self) -> Responses:
        """The batch with no token of theirs."""
        return replace(self, mask=self.mask * ~self.truncated[:, None])


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    centred = values - mean(values, mask)
    variance = (centred**2 * mask).sum() / (mask.sum() - 1)
    return centred / (variance + 1e-8).sqrt() * mask


def divergence(policy: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Both projects hold the third estimator and its exponent within bounds."""
    distance = policy - reference
    if kind.endswith("+"):
        return divergence(policy, reference, kind[:-1]).detach() + distance**2 / 2 - (distance**2 / 2).detach()
    if kind in ("k1", "kl"):
        return distance
    if kind in ("k2", "mse"):
        return distance**2 / 2
    if kind == "abs":
        return distance.abs()
    assert kind in ("k3", "low_var_kl")
    return (torch.exp((-distance).clamp(-20, 20)) - (-distance).clamp(-20, 20) - 1).clamp(-10, 10)


# Advantages


def rewards_of(batch: Responses, kl: Tensor, weight: float, scores: Tensor) -> Tensor:
    """The score on the last token, minus the weighted divergence of every token."""
    rewards = -weight * kl * batch.mask
    for i, length in enumerate(batch.mask.sum(-1).int().tolist()):
        rewards[i, length - 1] += scores[i]
    return rewards


GDPO_WEIGHTS = (1.0, 0.25)


def advantages_of(batch: Responses, estimator: str, rewards: Tensor, gamma: float, lam: float, by_std: bool) -> Tensor:
    mask, total = batch.mask, rewards.sum(-1)
    if estimator == "gae":
        return whitened(gae(batch, rewards, gamma, lam)[0], mask)
    if estimator in ("reinforce_plus_plus", "reinforce++"):
        return whitened(to_go(rewards, gamma), mask)
    if estimator.endswith("optimal_token_baseline"):
        return token_baseline(batch, to_go(rewards, 1.0))
    if estimator == "remax":
        return (to_go(rewards, 1.0) - batch.greedy_scores[:, None]) * mask
    result = torch.zeros_like(total)
    for i in range(len(total)):
        group = [j for j in range(len(total)) if batch.group[j] == batch.group[i]]
        own = total[group]
        if estimator == "gpg":
            result[i] = (total[i] - own.mean()) * len(total) / torch.count_nonzero(total)
        elif estimator == "grpo_passk":
            best, second = own.topk(2)[0]
            result[i] = (best - second) / (own.std() + 1e-6 if by_std else 1.0) if total[i] == best else 0.0
        elif estimator == "gdpo":
            for weight, column in zip(GDPO_WEIGHTS, batch.components.T, strict=True):
                result[i] += weight * (column[i] - column[group].mean()) / (column[group].std() + 1e-6)
        elif estimator == "maxrl":
            result[i] = (total[i] - own.mean()) / (own.mean() + 1e-6)
        elif estimator == "grpo":
            result[i] = (total[i] - own.mean()) / (own.std() + 1e-6 if by_std else 1.0)
        elif estimator == "reinforce_plus_plus_baseline":
            result[i] = total[i] - own.mean()
        elif estimator == "rloo":
            result[i] = (total[i] - own.mean()) * len(group) / (len(group) - 1)
        else:
            assert estimator == "opo"
            lengths = mask[group].sum(-1)
            result[i] = total[i] - (lengths * own).sum() / lengths.sum()
    spread = result[:, None] * mask
    return whitened(spread, mask) if estimator in ("reinforce_plus_plus_baseline", "gdpo") else spread


def token_baseline(batch: Responses, returns: Tensor) -> Tensor:
    """The rest of a group's longest response, where no other goes on, has no baseline."""
    result, mask = torch.zeros_like(returns), batch.mask
    weights = ((1 - 2 * batch.old.exp() + batch.old_squares) * mask).cumsum(-1)
    for i in range(len(returns)):
        group = [j for j in range(len(returns)) if batch.group[j] == batch.group[i]]
        lengths = sorted(int(mask[j].sum()) for j in group)
        for t in range(int(mask[i].sum())):
            there = weights[group, t] * mask[group, t]
            baseline = (returns[group, t] * there).sum() / (there.sum() + 1e-8) if t < lengths[-2] else 0.0
            result[i, t] = returns[i, t] - baseline
    return result


def to_go(rewards: Tensor, gamma: float) -> Tensor:
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=rewards.dtype)
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    return returns


def gae(batch: Responses, rewards: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    advantages, running, following = torch.zeros_like(rewards), 0.0, 0.0
    values = batch.values * batch.mask
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        advantages[:, t], following = running, values[:, t]
    return advantages, advantages + values


def value_loss(batch: Responses, returns: Tensor, clip: float) -> Tensor:
    near = torch.maximum(torch.minimum(batch.new_values, batch.values + clip), batch.values - clip)
    return torch.maximum((batch.new_values - returns) ** 2, (near - returns) ** 2) / 2


# Policy losses per token, of the advantage A (B, R)


def ratio_of(batch: Responses) -> Tensor:
    return (batch.log_probs - batch.old).exp()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def dual_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, bound: float) -> Tensor:
    loss = clipped(ratio, advantages, low, high)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * bound), loss)


def gspo(batch: Responses, advantages: Tensor, low: float, high: float) -> Tensor:
    """GSPO-token: the value of the response's ratio, the gradient of each token's own."""
    sequence = row_means(batch.log_probs - batch.old, batch.mask).detach()[:, None]
    return clipped((batch.log_probs - batch.log_probs.detach() + sequence).exp(), advantages, low, high)


def cispo(batch: Responses, advantages: Tensor, low: float, high: float) -> Tensor:
    return -ratio_of(batch).clamp(1 - low, 1 + high).detach() * advantages * batch.log_probs


def sapo(batch: Responses, advantages: Tensor, positive: float, negative: float) -> Tensor:
    tau = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(tau * (ratio_of(batch) - 1)) * 4 / tau * advantages


def geo_mean(batch: Responses, advantages: Tensor, low: float, high: float) -> Tensor:
    """One number a response, (B,)."""
    log_ratio, sign = batch.log_probs - batch.old, advantages.sign()
    kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    return -row_means(advantages, batch.mask) * row_means(kept, batch.mask).exp()


def covariance(batch: Responses, advantages: Tensor) -> Tensor:
    log_probs = batch.log_probs.detach()
    return (advantages - mean(advantages, batch.mask)) * (log_probs - mean(log_probs, batch.mask))


def clip_cov(batch: Responses, advantages: Tensor, low: float, high: float, share: float, least: float, most: float):
    ratio, valid = ratio_of(batch), batch.mask.bool()
    cut = -advantages * ratio.clamp(1 - low, 1 + high) > -advantages * ratio
    cov = covariance(batch, advantages)
    candidates = (valid & ~cut & (cov > least) & (cov < most)).nonzero()
    drawn = candidates[torch.randperm(len(candidates))[: max(int(share * int(batch.mask.sum())), 1)]]
    keep = torch.ones_like(advantages)
    keep[drawn[:, 0], drawn[:, 1]] = 0.0
    return clipped(ratio, advantages, low, high) * keep


def kl_cov(batch: Responses, advantages: Tensor, share: float, weight: float) -> Tensor:
    ratio = ratio_of(batch)
    cov = covariance(batch, advantages).masked_fill(~batch.mask.bool(), -torch.inf).flatten()
    penalised = torch.zeros_like(cov)
    penalised[cov.argsort(descending=True)[: max(1, int(share * int(batch.mask.sum())))]] = weight
    return -advantages * ratio + penalised.view_as(ratio) * (batch.log_probs - batch.old).abs()


def dppo(batch: Responses, advantages: Tensor, kind: str, low: float, high: float, bound: float) -> Tensor:
    new, old = batch.log_probs.detach().exp(), batch.old.exp()
    if kind == "dppo_tv":
        kept = torch.where(advantages > 0, new - old <= high, new - old >= -low)
    else:
        other = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        distance = old * (batch.old - batch.log_probs.detach()) + other
        kept = torch.where(advantages > 0, (distance <= high) | (new <= old), (distance <= low) | (new >= old))
    return -advantages * ratio_of(batch).clamp(max=bound).detach() * batch.log_probs * kept


# verl


def verl_aggregate(
    batch: Responses, loss: Tensor, mode: str, length: float | None = None, tokens: Tensor | None = None
) -> Tensor:
    """``tokens``: the number that ``token-mean`` divides by, where it is another than that of the mask. Responses count
    whether they have a token in the mask or not."""
    rows = (loss * batch.mask).sum(-1)
    if mode in ("token-mean", "token-sum"):
        number = batch.mask.sum() if tokens is None else tokens
        return rows.sum() / (number if mode == "token-mean" else 1.0)
    if mode == "seq-mean-token-mean":
        return (rows / (batch.mask.sum(-1) + 1e-8)).mean()
    return rows.mean() / ((length or batch.response_length) if mode == "seq-mean-token-sum-norm" else 1.0)


def verl_actor(batch: Responses, settings: Settings) -> Tensor:
    """The actor's loss of one optimizer step."""
    get = settings.get
    advantages, _ = verl_advantages(batch, settings)
    low, high = get("actor.clip_ratio_low", 0.2), get("actor.clip_ratio_high", 0.2)
    bound = get("actor.clip_ratio_c", 3.0)
    name = get("actor.policy_loss.loss_mode", "vanilla")
    bypass = get("algorithm.rollout_correction.bypass_mode", False)
    if bypass:
        batch = replace(batch, old=batch.rollout)
        name = {"ppo_clip": "vanilla", "reinforce": "gpg"}[get("algorithm.rollout_correction.loss_type", "ppo_clip")]
    losses: dict[str, Callable[[], Tensor]] = {
        "vanilla": lambda: dual_clipped(ratio_of(batch), advantages, low, high, bound),
        "gspo": lambda: gspo(batch, advantages, low, high),
        "sapo": lambda: sapo(batch, advantages, get("actor.tau_pos", 1.0), get("actor.tau_neg", 1.05)),
        "cispo": lambda: cispo(batch, advantages, low, high),
        "gpg": lambda: -advantages * batch.log_probs,
        "clip_cov": lambda: clip_cov(
            batch,
            advantages,
            low,
            high,
            get("actor.policy_loss.clip_cov_ratio", 0.0002),
            get("actor.policy_loss.clip_cov_lb", 1.0),
            get("actor.policy_loss.clip_cov_ub", 5.0),
        ),
        "kl_cov": lambda: kl_cov(
            batch, advantages, get("actor.policy_loss.kl_cov_ratio", 0.0002), get("actor.policy_loss.ppo_kl_coef", 0.1)
        ),
        "dppo_tv": lambda: dppo(batch, advantages, name, low, high, bound),
        "dppo_kl": lambda: dppo(batch, advantages, name, low, high, bound),
    }
    mode, length = get("actor.loss_agg_mode", "token-mean"), get("actor.loss_scale_factor")
    weights, tokens, whole = verl_weights(batch, settings), None, batch
    batch = replace(batch, mask=verl_kept(batch, settings))
    if bypass:
        tokens = whole.mask.sum()
    else:
        whole = batch
    if name == "geo_mean":
        total = geo_mean(batch, advantages, low, high).mean()
    else:
        of_policy = "seq-mean-token-mean" if name in ("gspo", "sapo") else mode
        total = verl_aggregate(batch, weights * losses[name](), of_policy, length, tokens)
    if get("actor.use_kl_loss", False):
        kl = divergence(batch.log_probs, batch.reference, get("actor.kl_loss_type", "low_var_kl"))
        total = total + get("actor.kl_loss_coef", 0.001) * verl_aggregate(whole, kl, mode, length)
    return total - get("actor.entropy_coeff", 0.0) * verl_aggregate(whole, batch.entropy, mode, length)


def verl_distilled(batch: Responses, settings: Settings, of_tokens: Tensor | None = None) -> Tensor:
    """The actor's loss with distillation; ``reference`` is the teacher.

    Args:
        of_tokens: the divergence of top-k distributions, where it is that.
    """
    loss = {key.partition("distillation_loss.")[2]: value for key, value in settings.items()}
    mode, kind = settings.get("actor.loss_agg_mode", "token-mean"), loss.get("loss_mode", "k3")
    each = divergence(batch.log_probs, batch.reference, kind) if of_tokens is None else of_tokens
    if (bound := loss.get("loss_max_clamp")) is not None:
        each = each.clamp(-bound, bound)
    if loss.get("use_policy_gradient", False):
        low, high = loss.get("clip_ratio_low", 0.2), loss.get("clip_ratio_high", 0.2)
        each = dual_clipped(ratio_of(batch), -each.detach(), low, high, 3.0)
    total = verl_aggregate(batch, each, mode, settings.get("actor.loss_scale_factor"))
    if not loss.get("use_task_rewards", True):
        return total
    return verl_actor(batch, settings) + loss.get("distillation_loss_coef", 1.0) * total


def verl_topk(student: Tensor, teacher: Tensor, count: int, floor: float | None) -> Tensor:
    """sum p log(p/q) over the teacher's ``count`` most probable tokens, of log-probs (B, R, V): (B, R), not below 0."""
    result = torch.zeros(student.shape[:2], dtype=student.dtype)
    for i in range(student.shape[0]):
        for t in range(student.shape[1]):
            for token in teacher[i, t].argsort(descending=True)[:count]:
                p, q = teacher[i, t, token], student[i, t, token]
                if floor is not None:
                    p, q = p.clamp(min=floor), q.clamp(min=floor)
                result[i, t] = result[i, t] + p.exp() * (p - q)
    return result.clamp(min=0.0)


def verl_kept(batch: Responses, settings: Settings) -> Tensor:
    """The mask without what ``rollout_rs`` rejects by k1, k2, k3 of tokens, or their sum, mean, largest."""
    criteria = settings.get("algorithm.rollout_correction.rollout_rs")
    if criteria is None:
        return batch.mask
    bypass = settings.get("algorithm.rollout_correction.bypass_mode", False)
    distance = (batch.log_probs.detach() if bypass else batch.old) - batch.rollout
    kinds = {"k1": -distance, "k2": distance**2 / 2, "k3": distance.exp() - 1 - distance}
    bounds, kept = (
        str(settings["algorithm.rollout_correction.rollout_rs_threshold"]).strip("\"'").split(","),
        batch.mask,
    )
    names = criteria.strip("\"'").split(",")
    for name, bound in zip(names, bounds * (len(names) // len(bounds)), strict=True):
        low, _, high = bound.rpartition("_")
        if name == "geometric":
            statistic = row_means(distance, batch.mask).exp()[:, None]
            least, most = 1 / float(high), float(high)
        else:
            values, level = kinds[name[-2:]] * batch.mask, name[:-3]
            at_level = {
                "seq_sum": values.sum(-1),
                "seq_mean": row_means(values, batch.mask),
                "seq_max": values.amax(-1),
            }
            statistic = values if level == "token" else at_level[level][:, None]
            least, most = (
                (math.log(float(low or 1 / float(high))), math.log(float(high))) if "k1" in name else (-1, float(high))
            )
        kept = kept * ((statistic >= least) & (statistic <= most))
    return kept


def verl_advantages(batch: Responses, settings: Settings) -> tuple[Tensor, Tensor]:
    """Advantages, and the critic's targets."""
    get = settings.get
    weight = get("algorithm.kl_ctrl.kl_coef", 0.001) if get("algorithm.use_kl_in_reward", False) else 0.0
    kl = divergence(batch.old, batch.reference, get("algorithm.kl_penalty", "kl"))
    scores = batch.scores
    if get("overlong.enable", False):
        excess = batch.mask.sum(-1) - (batch.response_length - get("overlong.len"))
        scores = scores - (excess / get("overlong.len") * get("overlong.penalty_factor", 1.0)).clamp(min=0)
    rewards = rewards_of(batch, kl, weight, scores)
    gamma, lam = get("algorithm.gamma", 1.0), get("algorithm.lam", 1.0)
    estimator = get("algorithm.adv_estimator", "gae")
    advantages = advantages_of(batch, estimator, rewards, gamma, lam, get("algorithm.norm_adv_by_std_in_grpo", True))
    return advantages, gae(batch, rewards, gamma, lam)[1]


def verl_weights(batch: Responses, settings: Settings) -> Tensor:
    """Importance weights of the engine's mismatch."""
    get = settings.get
    level, threshold = get("algorithm.rollout_correction.rollout_is"), get("actor.tis_imp_ratio_cap", -1)
    if threshold > 0:
        level = "token"
    else:
        threshold = get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    trainer = batch.old
    if get("algorithm.rollout_correction.bypass_mode", False):
        trainer = batch.log_probs.detach()
        level = level if get("algorithm.rollout_correction.loss_type") == "reinforce" else None
    if level is None:
        return torch.ones_like(batch.mask)
    log_ratio = trainer - batch.rollout
    if level == "sequence":
        log_ratio = (log_ratio * batch.mask).sum(-1, keepdim=True).expand_as(batch.mask)
    weights = log_ratio.clamp(-20, 20).exp()
    if "_" in str(threshold):
        low, high = map(float, str(threshold).split("_"))
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    else:
        weights = weights.clamp(max=float(threshold))
    if get("algorithm.rollout_correction.rollout_is_batch_normalize", False):
        counted = batch.mask if level == "token" else batch.mask * (batch.mask.cumsum(-1) == 1)  # one for each response
        weights = weights / ((weights * counted).sum() / counted.sum())
    return weights


def verl_critic(batch: Responses, settings: Settings) -> Tensor:
    returns = verl_advantages(batch, settings)[1]
    mode = settings.get("critic.loss_agg_mode", settings.get("actor.loss_agg_mode", "token-mean"))
    return verl_aggregate(batch, value_loss(batch, returns, settings.get("critic.cliprange_value", 0.5)), mode)


# SkyRL


def skyrl_advantages(batch: Responses, settings: Settings) -> tuple[Tensor, Tensor]:
    get = settings.get
    weight = get("kl_loss_coef", 0.001) if get("use_kl_in_reward", False) else 0.0
    kl = divergence(batch.old, batch.reference, get("kl_estimator_type", "k3"))
    rewards = rewards_of(batch, kl, weight, batch.scores)
    gamma, lam = get("gamma", 1.0), get("lambd", 1.0)
    estimator, by_std = get("advantage_estimator", "grpo"), get("grpo_norm_by_std", True)
    return advantages_of(batch, estimator, rewards, gamma, lam, by_std), gae(batch, rewards, gamma, lam)[1]


def skyrl_actor(batch: Responses, settings: Settings) -> Tensor:
    """The policy's loss of one optimizer step: divergence over responses, entropy over tokens."""
    get = settings.get
    advantages, _ = skyrl_advantages(batch, settings)
    if get("generator.apply_overlong_filtering", False):
        batch = batch.without_truncated()
    low, high, name = get("eps_clip_low", 0.2), get("eps_clip_high", 0.2), get("policy_loss_type", "regular")
    losses: dict[str, Callable[[], Tensor]] = {
        "regular": lambda: clipped(ratio_of(batch), advantages, low, high),
        "dual_clip": lambda: dual_clipped(ratio_of(batch), advantages, low, high, get("clip_ratio_c", 3.0)),
        "gspo": lambda: gspo(batch, advantages, low, high),
        "cispo": lambda: cispo(
            batch, advantages, get("cispo.cispo_eps_clip_low", 0.0), get("cispo.cispo_eps_clip_high", 5.0)
        ),
        "sapo": lambda: sapo(batch, advantages, get("sapo.tau_pos", 1.0), get("sapo.tau_neg", 1.05)),
        "clip_cov": lambda: clip_cov(
            batch,
            advantages,
            low,
            high,
            get("clip_cov.clip_ratio", 0.0002),
            get("clip_cov.clip_cov_lb", 1.0),
            get("clip_cov.clip_cov_ub", 5.0),
        ),
        "kl_cov": lambda: kl_cov(batch, advantages, get("kl_cov.kl_cov_frac", 0.2), get("kl_cov.ppo_kl_coef", 1.0)),
    }
    losses["rollout_is"] = lambda: engine_is(batch, advantages, low, high)
    bounds = get("dppo.delta_low", 0.2), get("dppo.delta_high", 0.2)
    losses["dppo"] = lambda: engine_dppo(batch, advantages, get("dppo.dppo_type", "binary_tv"), *bounds)
    weighs = name not in ("clip_cov", "kl_cov")
    loss = losses[name]() * (skyrl_weights(batch, settings) if weighs else 1.0)
    mode = get("loss_reduction", "token_mean")
    if mode in ("token_mean", "token_mean_legacy"):  # the batch is one micro-batch
        total = mean(loss, batch.mask)
    elif mode == "prompt_mean":
        prompts = [batch.group == number for number in batch.group.unique()]
        total = torch.stack([mean(loss[rows], batch.mask[rows]) for rows in prompts]).mean()
    elif mode == "sequence_mean":
        total = row_means(loss, batch.mask).mean()
    else:
        assert mode == "seq_mean_token_sum_norm"
        length = get("max_seq_len") or batch.prompt_length + batch.response_length
        total = (loss * batch.mask).sum(-1).mean() / length
    return total + skyrl_regularisers(batch, settings)


def engine_is(batch: Responses, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = (batch.log_probs - batch.rollout).exp().detach()
    inside = (ratio > 1 - low) & (ratio < 1 + high)
    return -(ratio * inside) * advantages * batch.log_probs


def engine_dppo(batch: Responses, advantages: Tensor, kind: str, low: float, high: float) -> Tensor:
    """Token by token, with the bound of the side that the advantage pushes to."""
    kept = torch.ones_like(advantages)
    for i, t in batch.mask.nonzero().tolist():
        new, old = batch.log_probs[i, t].detach().exp(), batch.rollout[i, t].exp()
        distance = (new - old).abs()
        if kind == "binary_kl":
            distance = old * (old.log() - new.log()) + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        positive = bool(advantages[i, t] > 0)
        leads_away = new > old if positive else new < old
        if advantages[i, t] != 0 and leads_away and distance > (high if positive else low):
            kept[i, t] = 0.0
    return -kept * advantages * (batch.log_probs - batch.rollout).exp()


def skyrl_actor_by_weights(batch: Responses, settings: Settings) -> Tensor:
    """The losses by covariance in the newer package: of weighted advantages, summed over tokens."""
    get = settings.get
    advantages, _ = skyrl_advantages(batch, settings)
    mode, (rows, _) = get("loss_reduction", "token_mean"), batch.mask.shape
    of_row = batch.mask.sum(-1)
    if mode == "token_mean":
        weights = torch.full_like(of_row, 1 / float(batch.mask.sum()))
    elif mode == "prompt_mean":
        of_prompt = torch.stack([batch.mask[batch.group == number].sum() for number in batch.group])
        weights = 1 / (of_prompt * len(batch.group.unique()))
    elif mode == "sequence_mean":
        weights = 1 / (rows * of_row)
    else:
        weights = torch.full_like(of_row, 1 / (rows * (batch.prompt_length + batch.response_length)))
    advantages = advantages * weights[:, None]
    if settings["policy_loss_type"] == "clip_cov":
        bounds = (get(f"clip_cov.{name}", default) for name, default in COVARIANCE_BOUNDS.items())
        clip = (get("eps_clip_low", 0.2), get("eps_clip_high", 0.2))
        loss = clip_cov(batch, advantages, *clip, *bounds)
    else:
        loss = kl_cov(batch, advantages, get("kl_cov.kl_cov_frac", 0.2), get("kl_cov.ppo_kl_coef", 1.0))
    return (loss * batch.mask).sum() + skyrl_regularisers(batch, settings)


COVARIANCE_BOUNDS = {"clip_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}


def skyrl_regularisers(batch: Responses, settings: Settings) -> Tensor:
    """Divergence and entropy with their weights."""
    get, total = settings.get, torch.zeros((), dtype=torch.float64)
    if get("use_kl_loss", True):
        kl = divergence(batch.log_probs, batch.reference, get("kl_estimator_type", "k3"))
        total = total + get("kl_loss_coef", 0.001) * row_means(kl, batch.mask).mean()
    if get("use_entropy_loss", False):
        total = total - get("entropy_loss_coef", 0.01) * mean(batch.entropy, batch.mask)
    return total


def skyrl_weights(batch: Responses, settings: Settings) -> Tensor:
    """Truncated weights times the masks of sequences and tokens."""
    get, log_ratio = settings.get, (batch.old - batch.rollout) * batch.mask
    product = log_ratio.sum(-1, keepdim=True).exp().expand_as(log_ratio)
    weights = torch.ones_like(log_ratio)
    if get("use_tis", False):
        return log_ratio.exp().clamp(max=get("tis_imp_ratio_cap"))
    level = get("off_policy_correction.tis_ratio_type")
    metric = get("off_policy_correction.sequence_mask_metric")
    if level == "token":
        weights = log_ratio.exp().clamp(max=get("off_policy_correction.token_tis_ratio_clip_high", 2.0))
    elif level == "sequence":
        weights = product.clamp(max=get("off_policy_correction.sequence_tis_ratio_clip_high", 5.0))
    if metric == "product":
        low, high = (
            get(f"off_policy_correction.product_mask_{side}", at) for side, at in (("low", 0.5), ("high", 2.0))
        )
        weights = weights * ((product >= low) & (product <= high))
    elif metric == "geometric":
        low, high = (get(f"off_policy_correction.geo_mask_{side}", at) for side, at in (("low", 0.99), ("high", 1.01)))
        ratio = row_means(log_ratio, batch.mask).exp()[:, None]
        weights = weights * ((ratio >= low) & (ratio <= high))
    if level or metric:
        least, most = (get(f"off_policy_correction.outlier_token_is_threshold_{side}") for side in ("low", "high"))
        for i, row in enumerate(log_ratio.exp()):
            tokens = row[batch.mask[i].bool()]
            if (least is not None and tokens.min() < least) or (most is not None and tokens.max() > most):
                weights = weights.clone()
                weights[i] = 0.0
    if (level or metric) and (least := get("off_policy_correction.token_mask_is_threshold_low")) is not None:
        weights = weights * (log_ratio.exp() >= least)
    return weights


def skyrl_critic(batch: Responses, settings: Settings) -> Tensor:
    returns = skyrl_advantages(batch, settings)[1]
    return row_means(value_loss(batch, returns, settings.get("value_clip", 0.2)), batch.mask).mean()
