"""Corrections for a rollout engine whose probabilities differ from the trainer's, and the metrics of that mismatch.

A correction is a list of rules; a rule is level x action x metric x bounds.  The weights are ratios old / rollout: the
trainer's policy before the update (unless said otherwise) over the distribution that sampled.  With the surrogate's own
ratio pi / old they make decoupled PPO (arXiv 2505.24298 eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.loss_types import LOG_RATIO_BOUND, LossInputs
from roll.algorithms.masked import clear_, level_log_ratio, row_blocks
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry
from roll.config.corrections import CorrectionOptions, CorrectionRule


@dataclass(frozen=True)
class Correction:
    """What to multiply a per-token loss with."""

    weights: Tensor
    """float (B, L): product of the rules' weights; 1 where none applies."""
    keep: Tensor
    """bool (B, L): tokens of the mask that no rule drops. Denominators do not change: a dropped token counts as 0."""


CorrectionFunction = Callable[[LossInputs, MetricBuilder], Correction]
"""A correction of one's own: ``rollout_log_probs`` of its inputs are there, its weights should carry no gradient."""

correction_functions: Registry[CorrectionFunction] = Registry("train_infer_correction")


def correct_mismatch(inputs: LossInputs, options: CorrectionOptions, metrics: MetricBuilder) -> Correction:
    """Apply the rules in ``options`` and log what they did.

    Raises ``ValueError`` when there are rules but no ``rollout_log_probs``.
    """
    keep = inputs.mask
    weights = torch.ones_like(inputs.log_probs)
    if not options.is_active:
        return Correction(weights, keep)
    if inputs.rollout_log_probs is None:
        raise ValueError("train_infer_correction needs rollout_log_probs: let the engine return log-probs")
    if options.function is not None:
        own = correction_functions.resolve(options.function)(inputs, metrics)
        return Correction(own.weights, own.keep & inputs.mask)
    follow_gradient = not options.detach and inputs.old_log_probs is None
    old = inputs.log_probs if follow_gradient else inputs.proximal_log_probs
    clipped = torch.zeros_like(inputs.mask)
    for rule in options.rules:
        policy = inputs.log_probs.detach() if rule.policy == "current" else old
        log_ratio = torch.where(inputs.mask, policy - inputs.rollout_log_probs, 0.0)
        applies = inputs.mask & (inputs.advantages < 0) if rule.only_negative else inputs.mask
        leveled = level_log_ratio(log_ratio, inputs.mask, rule.level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = leveled.exp()
        if rule.action == "truncate":
            bounded = ratio.clamp(rule.low, rule.high) if (rule.low, rule.high) != (None, None) else ratio
            clipped |= applies & (bounded != ratio)
            weights = weights * torch.where(applies, bounded, 1.0)
        else:
            keep = keep & ~(applies & _outside(_rule_metric(inputs, rule, log_ratio, ratio, policy), rule))
            if rule.action == "both":
                weights = weights * torch.where(applies, ratio, 1.0)
    metrics.mean("actor/is_weight_clipfrac", clipped.sum(), inputs.num_tokens)
    metrics.mean("actor/is_weight_mean", torch.where(inputs.mask, weights.detach(), 0.0).sum(), inputs.num_tokens)
    metrics.mean("actor/train_infer_final_mask_mean", keep.sum(), inputs.num_tokens)
    return Correction(weights, keep)


def _outside(values: Tensor, rule: CorrectionRule) -> Tensor:
    outside = torch.zeros_like(values, dtype=torch.bool)
    if rule.low is not None:
        outside |= values < rule.low
    if rule.high is not None:
        outside |= values > rule.high
    return outside


def _rule_metric(inputs: LossInputs, rule: CorrectionRule, log_ratio: Tensor, ratio: Tensor, policy: Tensor) -> Tensor:
    """The quantity that a masking rule bounds, at the rule's level, without gradient: float (B, L)."""
    assert inputs.rollout_log_probs is not None
    log_ratio = log_ratio.detach()
    if rule.metric == "ratio":
        return ratio.detach()
    if rule.metric == "prob_diff":
        per_token = policy.detach().exp() - inputs.rollout_log_probs.exp()
    elif rule.metric == "k1":
        per_token = -log_ratio
    elif rule.metric == "k2":
        per_token = 0.5 * log_ratio.square()
    elif rule.metric == "k3":
        per_token = torch.expm1(log_ratio.clamp(max=LOG_RATIO_BOUND)) - log_ratio
    else:
        per_token = log_ratio
    return level_log_ratio(torch.where(inputs.mask, per_token, 0.0), inputs.mask, rule.level)


@torch.no_grad()
def mismatch_metrics(inputs: LossInputs, metrics: MetricBuilder, with_segments: bool = False) -> None:
    """Log how far trainer and engine stand apart; nothing without ``rollout_log_probs``.

    ``actor/train_infer_*``: mean and largest absolute log-prob difference, KL(rollout || old) as k1 and k3, Pearson's
    correlation of the probabilities, mean probability difference, and the mean ratio per token, geometric mean and
    sequence, and per segment where asked for.
    """
    if inputs.rollout_log_probs is None:
        return
    mask, tokens = inputs.mask, inputs.num_tokens
    trainer, rollout = inputs.trainer_log_probs, inputs.rollout_log_probs
    # Everything below is 0 outside the mask, so plain sums are masked sums.
    log_ratio, size, k3, ratio, difference = (torch.empty_like(trainer) for _ in range(5))
    old, sampled = torch.empty_like(trainer, dtype=torch.float64), torch.empty_like(trainer, dtype=torch.float64)
    largest = []
    columns = (log_ratio, size, k3, ratio, difference, old, sampled)
    for a, b, bits, d, d_size, d_k3, d_ratio, d_p, p, q in row_blocks(trainer, rollout, inputs.keep.bits, *columns):
        torch.abs(clear_(torch.sub(a, b, out=d), bits), out=d_size)
        if d.numel():
            largest.append(d_size.amax())
        bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        torch.expm1(bounded, out=d_k3).sub_(bounded)
        clear_(torch.exp(bounded, out=d_ratio), bits)
        p.copy_(clear_(torch.exp(a, out=d_p), bits))
        q.copy_(clear_(torch.exp(b, out=bounded), bits))
        d_p.sub_(bounded)
    totals = log_ratio.sum(-1)
    metrics.mean("actor/train_infer_log_diff_abs_mean", size.sum(), tokens)
    if largest:
        metrics.largest("actor/train_infer_log_diff_abs_max", torch.stack(largest), tokens)
    metrics.mean("actor/train_infer_kl_k1", -log_ratio.sum(), tokens)
    metrics.mean("actor/train_infer_kl_k3", k3.sum(), tokens)
    metrics.correlation("actor/train_infer_pearson", old, sampled, tokens)
    metrics.mean("actor/train_infer_diff_token_mean", difference.sum(), tokens)
    metrics.mean("actor/train_infer_ratio_token_mean", ratio.sum(), tokens)
    rows, lengths = inputs.lengths > 0, inputs.lengths.clamp(min=1)
    for name, row_log_ratio in (("geometric", totals / lengths), ("sequence", totals)):
        row_ratio = row_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        metrics.mean(f"actor/train_infer_ratio_{name}_mean", torch.where(rows, row_ratio, 0.0).sum(), rows.sum())
    if with_segments:
        bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        segment = torch.where(mask, level_log_ratio(bounded, mask, "segment").exp(), 0.0)
        metrics.mean("actor/train_infer_ratio_segment_mean", segment.sum(), tokens)
