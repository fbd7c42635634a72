"""Policy losses per token, chosen by ``loss``, with their inputs and their registry.

A policy loss is a function ``(inputs: LossInputs, options, metrics: MetricBuilder) -> Tensor (B, L)``: the loss of each
token, before aggregation, correction and sample weights, which :func:`roll.algorithms.losses.actor_loss` adds.  In the
formulas r is exp(log pi - log pi_old), A the advantage, and sg stops the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import level_log_ratio, masked_mean, row_mean
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry
from roll.config.choices import (
    POLICY_LOSSES,
    CispoOptions,
    ClipCovOptions,
    ClipOptions,
    DppoOptions,
    DroOptions,
    DualClipOptions,
    GmpoOptions,
    Kimi15Options,
    KlCovOptions,
    M2poOptions,
    NoOptions,
    PolicyLoss,
    PpoOptions,
    SapoOptions,
    TisOptions,
    ToprOptions,
    VespoOptions,
)

# exp(20) is 5e8: a ratio beyond it carries no information and, multiplied on, would overflow float32.
LOG_RATIO_BOUND = 20.0


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
    """int64 (B,): tokens of the loss in all rows of a row's trajectory; None: every row is a trajectory."""
    divergence_term: Tensor | None = None
    """float (B, L), with gradient: the weighted divergence from given distributions; None: no such term."""
    row_weights: Tensor | None = None
    """float64 (B,): weight of each row's sum in the step's loss (``loss_agg_mode``); set by ``actor_loss``."""
    old_is_rollout: bool = False
    """``old_log_probs`` are the engine's: the ratio is taken against the policy that sampled."""

    @cached_property
    def proximal_log_probs(self) -> Tensor:
        """The policy before the update, without gradient: (B, L)."""
        old = self.log_probs if self.old_log_probs is None else self.old_log_probs
        return old.detach()

    @cached_property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_old with gradient, float (B, L), within +-20; exactly 0 outside the mask."""
        # torch.where, not a product with the mask: NaN outside the mask reaches neither the value nor the gradient.
        difference = torch.where(self.mask, self.log_probs - self.proximal_log_probs, 0.0)
        return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """pi / pi_old without gradient, float (B, L); exactly 1 outside the mask. Shared: do not write into it."""
        return self.log_ratio.detach().exp()

    @cached_property
    def lengths(self) -> Tensor:
        """int64 (B,): masked tokens of each row."""
        return self.mask.sum(-1)

    @cached_property
    def num_tokens(self) -> Tensor:
        """int64 scalar: masked tokens."""
        return self.lengths.sum()


PolicyLossFunction = Callable[[LossInputs, Any, MetricBuilder], Tensor]

policy_losses: Registry[PolicyLossFunction] = Registry("loss", POLICY_LOSSES, PpoOptions, PolicyLoss)
register_policy_loss = policy_losses.register


def clip_range(options: ClipOptions) -> tuple[float, float]:
    """Largest distances of the ratio below and above 1."""
    low, high = options.clip_low, options.clip_high
    return options.clip if low is None else low, options.clip if high is None else high


def _count_clipped(metrics: MetricBuilder, clipped: Tensor, inputs: LossInputs) -> None:
    metrics.mean("actor/clipfrac", (clipped & inputs.mask).sum(), inputs.num_tokens)


def _clipped_surrogate(ratio: Tensor, inputs: LossInputs, options: DualClipOptions, metrics: MetricBuilder) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), for negative A at most -c A (dual clip): float (B, L)."""
    advantages, (down, up) = inputs.advantages, clip_range(options)
    low, high = 1.0 - down, 1.0 + up
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    # Outside the mask the ratio is 1, which is neither.
    above, below = ratio > high, ratio < low
    clipped = (above & (advantages > 0)) | (below & (advantages < 0))
    if options.dual_clip:
        bound = 1.0 + 2.0 * options.clip if options.dual_clip is True else options.dual_clip
        # By the ratio: where r A and c A round to the same number, torch.min would halve the gradient.
        beyond = (advantages < 0) & (ratio > bound)
        loss = torch.where(beyond, -bound * advantages, loss)
        clipped = clipped | beyond
    _count_clipped(metrics, clipped, inputs)
    for name, outside in (("high_", above), ("low_", below), ("", above | below)):
        metrics.mean(f"actor/ppo_ratio_{name}clipfrac", outside.sum(), inputs.num_tokens)
    return loss


@register_policy_loss("ppo", options=PpoOptions)
def ppo(inputs: LossInputs, options: PpoOptions, metrics: MetricBuilder) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A); arXiv 1707.06347 eq. 7, dual clip 1912.09729 eq. 5."""
    log_ratio = level_log_ratio(inputs.log_ratio, inputs.mask, options.importance_sampling, inputs.turn_ids)
    return _clipped_surrogate(log_ratio.exp(), inputs, options, metrics)


@register_policy_loss("vanilla", options=NoOptions)
def vanilla(inputs: LossInputs, options: NoOptions, metrics: MetricBuilder) -> Tensor:
    """-A log pi: REINFORCE."""
    return -inputs.advantages * inputs.log_probs


@register_policy_loss("gspo", options=DualClipOptions)
def gspo(inputs: LossInputs, options: DualClipOptions, metrics: MetricBuilder) -> Tensor:
    """PPO's clip on s = exp(mean log r) of the response; arXiv 2507.18071 eq. 5. Made for seq-mean-token-mean.

    With seq-mean-token-sum each response counts by its length: LUSPO, arXiv 2602.05261 (TRL's ``luspo`` is the same).
    """
    ratio = level_log_ratio(inputs.log_ratio, inputs.mask, "seq").exp()
    return _clipped_surrogate(ratio, inputs, options, metrics)


@register_policy_loss("gspo_token", options=DualClipOptions)
def gspo_token(inputs: LossInputs, options: DualClipOptions, metrics: MetricBuilder) -> Tensor:
    """sg(s) pi / sg(pi): the value of GSPO's ratio with each token's own gradient; arXiv 2507.18071 eq. 13-14."""
    sequence = level_log_ratio(inputs.log_ratio.detach(), inputs.mask, "seq")
    # 0 in value, the token's own gradient: sequence + own is the straight-through form of sg(s) pi / sg(pi).
    own = torch.where(inputs.mask, inputs.log_probs - inputs.log_probs.detach(), 0.0)
    return _clipped_surrogate((sequence + own).exp(), inputs, options, metrics)


@register_policy_loss("tis", options=TisOptions)
def tis(inputs: LossInputs, options: TisOptions, metrics: MetricBuilder) -> Tensor:
    """-sg(clip(r, low, high)) A log pi: REINFORCE with truncated importance weights."""
    weight = inputs.ratio.clamp(options.lower_bound, options.upper_bound)
    _count_clipped(metrics, weight != inputs.ratio, inputs)
    return -weight * inputs.advantages * inputs.log_probs


@register_policy_loss("cispo", options=CispoOptions)
def cispo(inputs: LossInputs, options: CispoOptions, metrics: MetricBuilder) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi; arXiv 2506.13585 eq. 4-5.

    With ``unified_mask``, eq. 6-7: the same times M, which drops what PPO's clip takes the gradient of; ROLL's
    ``cispo_use_unified_mask``.
    """
    ratio = inputs.ratio
    low, high = 1.0 - options.epsilon_low, 1.0 + options.epsilon_high
    weight = ratio.clamp(low, high)
    if options.unified_mask:
        dropped = torch.where(inputs.advantages > 0, ratio > high, (ratio < low) & (inputs.advantages < 0))
        weight = weight.masked_fill(dropped, 0.0)
    _count_clipped(metrics, weight != ratio, inputs)
    return -weight * inputs.advantages * inputs.log_probs


@register_policy_loss("m2po", options=M2poOptions)
def m2po(inputs: LossInputs, options: M2poOptions, metrics: MetricBuilder) -> Tensor:
    """-M r A: M drops the largest squared log-ratios until the mean of the others is in bounds; arXiv 2510.01161.

    Only tokens whose update leads further away (A > 0 and r > 1, or A < 0 and r < 1) are bounded and dropped.  Which
    tokens are dropped depends on the rest of their micro-batch.
    """
    log_ratio = inputs.log_ratio.detach()
    bounded = inputs.mask & (inputs.advantages * log_ratio > 0)
    # -1, below every square, sorts the tokens that are not bounded to the front: they have the ranks up to `outside`.
    moments, order = torch.where(bounded, log_ratio.double().square(), -1.0).flatten().sort()
    rank = torch.arange(1, len(moments) + 1, device=moments.device)
    outside = len(moments) - bounded.sum()
    # Means over the smallest 1, 2, 3 ... of the bounded tokens: they grow, so the first that is too large ends it.
    means = moments.clamp(min=0.0).cumsum(0) / (rank - outside).clamp(min=1)
    dropped = torch.zeros_like(bounded).flatten()
    dropped[order] = (rank > outside) & (means > options.threshold)
    dropped = dropped.view_as(bounded)
    _count_clipped(metrics, dropped, inputs)
    second_moment = torch.where(bounded, log_ratio, 0.0).square().sum()
    metrics.mean("actor/m2po_second_moment", second_moment, bounded.sum())
    return -(inputs.log_ratio.exp() * inputs.advantages).masked_fill(dropped, 0.0)


@register_policy_loss("vespo", options=VespoOptions)
def vespo(inputs: LossInputs, options: VespoOptions, metrics: MetricBuilder) -> Tensor:
    """-sg(phi(w)) A log pi, w the response's ratio, phi(w) = w^k exp(lambda (1 - w)) by the sign of A; 2602.10693.

    A smooth weight with its largest value at w = k / lambda, where others clip, and 1 at w = 1.  Formula, defaults and
    bounds of w are those of the authors' code (github.com/FloyedShen/VESPO, ``recipe/vespo/code/core_algos.py``), where
    a correction of the engine's mismatch is a factor of w; here it is one of the loss.
    """
    of_response = level_log_ratio(inputs.log_ratio.detach(), inputs.mask, "sequence")
    log_weight = of_response.clamp(math.log(1e-8), LOG_RATIO_BOUND)
    positive = inputs.advantages >= 0
    k = torch.where(positive, options.k_pos, options.k_neg)
    decay = torch.where(positive, options.lambda_pos, options.lambda_neg)
    phi = (k * log_weight + decay * (1.0 - log_weight.exp())).exp()
    metrics.mean("actor/vespo_weight_mean", torch.where(inputs.mask, phi, 0.0).sum(), inputs.num_tokens)
    return -phi * inputs.advantages * inputs.log_probs


@register_policy_loss("topr", options=ToprOptions)
def topr(inputs: LossInputs, options: ToprOptions, metrics: MetricBuilder) -> Tensor:
    """Positives: -A log pi; negatives: the response's ratio truncated to [a, b] as weight; arXiv 2503.14286 eq. 8."""
    ratio = level_log_ratio(inputs.log_ratio.detach(), inputs.mask, "sequence").exp()
    truncated = ratio.clamp(options.lower_bound, options.upper_bound)
    negative = inputs.advantages < 0
    _count_clipped(metrics, negative & (truncated != ratio), inputs)
    weight = torch.where(negative, truncated * options.negative_weight, options.positive_weight)
    return -weight * inputs.advantages * inputs.log_probs


@register_policy_loss("raft++", options=ClipOptions)
def raft_plus_plus(inputs: LossInputs, options: ClipOptions, metrics: MetricBuilder) -> Tensor:
    """PPO's clip on responses of positive advantage only; arXiv 2504.11343 section 3.

    With raw rewards (no normalisation) these are the right answers, as in the paper.
    """
    positive = torch.where(inputs.advantages > 0, inputs.advantages, 0.0)
    ratio, (down, up) = inputs.log_ratio.exp(), clip_range(options)
    clipped = ratio.clamp(1.0 - down, 1.0 + up)
    _count_clipped(metrics, (clipped < ratio) & (positive > 0), inputs)
    return -torch.minimum(ratio, clipped) * positive


@register_policy_loss("kimi15", options=Kimi15Options)
def kimi15(inputs: LossInputs, options: Kimi15Options, metrics: MetricBuilder) -> Tensor:
    """-A log pi + tau/2 (sum_t log r)^2, the square shared equally by the response's tokens; arXiv 2501.12599 eq. 3.

    With seq-mean-token-sum this is the paper's loss; with another mode both terms are scaled alike.
    """
    total = level_log_ratio(inputs.log_ratio, inputs.mask, "sequence")
    lengths = inputs.lengths.clamp(min=1)[:, None]
    return -inputs.advantages * inputs.log_probs + 0.5 * options.tau * total.square() / lengths


@register_policy_loss("sapo", options=SapoOptions)
def sapo(inputs: LossInputs, options: SapoOptions, metrics: MetricBuilder) -> Tensor:
    """-(4/tau) sigmoid(tau (r - 1)) A with tau by the sign of A: a soft gate instead of a clip; arXiv 2511.20347."""
    tau = torch.full_like(inputs.advantages, options.tau_neg)
    tau = tau.masked_fill(inputs.advantages > 0, options.tau_pos)
    # 4 / tau gives the gate slope 1 at r = 1, so that an on-policy step has the gradient of REINFORCE.
    gate = (4.0 / tau) * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1.0))
    return -gate * inputs.advantages


@register_policy_loss("gmpo", options=GmpoOptions)
def gmpo(inputs: LossInputs, options: GmpoOptions, metrics: MetricBuilder) -> Tensor:
    """-A exp(mean of the clipped log r): geometric instead of arithmetic mean of token ratios; arXiv 2507.20673 eq. 4.

    Made for seq-mean-token-mean.
    """
    upper = inputs.log_ratio.clamp(max=options.clip_high)
    lower = inputs.log_ratio.clamp(min=-options.clip_low)
    clipped = torch.where(inputs.advantages > 0, upper, lower)
    _count_clipped(metrics, clipped != inputs.log_ratio, inputs)
    return -level_log_ratio(clipped, inputs.mask, "geometric").exp() * inputs.advantages


@register_policy_loss("dro", options=DroOptions)
def dro(inputs: LossInputs, options: DroOptions, metrics: MetricBuilder) -> Tensor:
    """(A - tau log(pi/pi_ref))^2 / 2 of the response, shared equally by its tokens; arXiv 2405.19107 eq. 5.

    The reference is ``ref_log_probs`` where given, else the old policy; A is the response's mean advantage.
    """
    if inputs.ref_log_probs is None:
        log_ratio = inputs.log_ratio
    else:
        log_ratio = torch.where(inputs.mask, inputs.log_probs - inputs.ref_log_probs, 0.0)
    advantage = row_mean(inputs.advantages, inputs.mask).unsqueeze(-1)
    residual = advantage - options.tau * level_log_ratio(log_ratio, inputs.mask, "sequence")
    return 0.5 * residual.square() / inputs.lengths.clamp(min=1)[:, None]


@register_policy_loss("dppo", options=DppoOptions)
def dppo(inputs: LossInputs, options: DppoOptions, metrics: MetricBuilder) -> Tensor:
    """-M sg(min(r, c)) A log pi; M drops tokens beyond the divergence whose update leads further away; 2602.04879.

    The divergence is that of the two-outcome distribution (this token, any other).
    """
    ratio = inputs.ratio
    # Float64: near certainty 1 - p, which the divergence is made of, has hardly a digit in float32.
    old = inputs.proximal_log_probs.double().exp()
    new = inputs.log_probs.detach().double().exp()
    divergence = (new - old).abs()
    if options.divergence == "kl":
        tiny = torch.finfo(torch.float64).tiny
        rest_old, rest_new = (1.0 - old).clamp(min=tiny), (1.0 - new).clamp(min=1e-12)
        divergence = -old * inputs.log_ratio.detach() + rest_old * (rest_old / rest_new).log()
    leads_away = torch.where(inputs.advantages > 0, ratio > 1.0, ratio < 1.0)
    dropped = leads_away & (divergence > options.threshold)
    _count_clipped(metrics, dropped, inputs)
    weight = torch.where(dropped, 0.0, ratio.clamp(max=options.ratio_bound))
    return -weight * inputs.advantages * inputs.log_probs


@torch.no_grad()
def token_covariance(inputs: LossInputs) -> Tensor:
    """(log pi - mean log pi) (A - mean A) over the masked tokens: float (B, L), 0 outside the mask."""
    log_probs = inputs.log_probs - masked_mean(inputs.log_probs, inputs.mask)
    advantages = inputs.advantages - masked_mean(inputs.advantages, inputs.mask)
    return torch.where(inputs.mask, log_probs * advantages, 0.0)


@register_policy_loss("clip_cov", options=ClipCovOptions)
def clip_cov(inputs: LossInputs, options: ClipCovOptions, metrics: MetricBuilder) -> Tensor:
    """PPO's clip, and no gradient for a random share of the tokens whose covariance lies in (low, high); arXiv
    2505.22617 eq. 10-13.

    Tokens that PPO's clip leaves without gradient are not drawn.  Which are depends on the micro-batch.
    """
    covariance = token_covariance(inputs)
    in_range = (covariance > options.low) & (covariance < options.high)
    down, up = clip_range(options)
    clipped_ratio = inputs.ratio.clamp(1.0 - down, 1.0 + up)
    clipped_by_ppo = clipped_ratio * inputs.advantages < inputs.ratio * inputs.advantages
    candidates = (inputs.mask & in_range & ~clipped_by_ppo).flatten().nonzero().squeeze(-1)
    count = max(int(options.ratio * int(inputs.num_tokens)), 1)
    chosen = candidates[torch.randperm(len(candidates), device=candidates.device)[:count]]
    keep = torch.ones(inputs.mask.numel(), device=inputs.mask.device).index_fill(0, chosen, 0.0)
    metrics.mean("actor/cov_clipfrac", float(len(chosen)), inputs.num_tokens)
    return ppo(inputs, options, metrics) * keep.view_as(inputs.mask)


@register_policy_loss("kl_cov", options=KlCovOptions)
def kl_cov(inputs: LossInputs, options: KlCovOptions, metrics: MetricBuilder) -> Tensor:
    """-r A, plus coef |log r| on the tokens of highest covariance in the micro-batch; arXiv 2505.22617 eq. 10-13."""
    # -inf keeps tokens outside the mask from being among the largest; their covariance is 0, more than many tokens
    # have.
    covariance = token_covariance(inputs).masked_fill(~inputs.mask, -torch.inf).flatten()
    tokens = int(inputs.num_tokens)
    # At least one token, but none of an empty micro-batch, on which topk would pick a masked one.
    count = min(max(int(options.ratio * tokens), 1), tokens)
    chosen = covariance.topk(count).indices
    penalised = torch.zeros_like(covariance).index_fill(0, chosen, options.coef).view_as(inputs.mask)
    metrics.mean("actor/kl_cov_frac", float(count), inputs.num_tokens)
    return -inputs.log_ratio.exp() * inputs.advantages + penalised * inputs.log_ratio.abs()
