"""The actor's and the critic's losses, and corrections for an engine whose probabilities differ from the trainer's.

The actor's loss is a policy gradient by variant, corrected, plus the divergence from the reference, minus the entropy
bonus.  The weights of a correction (:class:`~roll.config.algorithm.CorrectionOptions`) are ratios old / rollout: the
trainer's policy before the update (unless said otherwise) over the distribution that sampled.  With the surrogate's own
ratio pi / old they make decoupled PPO (arXiv 2505.24298 eq. 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll.algorithms.aggregation import LossDenominators, level_log_ratio, row_weights, weighted_sum
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import (
    LOG_RATIO_BOUND,
    LossInputs,
    policy_losses,
    register_policy_loss,
)
from roll.algorithms.registry import Registry
from roll.config.algorithm import CorrectionOptions, CorrectionRule, PPOConfig, correction_options
from roll.config.choices import PpoOptions
from roll.protocol.metrics import Mean, Metrics

__all__ = ["actor_loss", "actor_loss_options", "register_policy_loss"]

Options = TypeVar("Options")


@dataclass(frozen=True)
class Correction:
    """Factors of a per-token loss."""

    weights: Tensor
    """float (B, L): product of the rules' weights; 1 where none applies."""
    keep: Tensor
    """bool (B, L): tokens of the mask that no rule drops. Denominators do not change: a dropped token counts as 0."""


CorrectionFunction = Callable[[LossInputs, MetricBuilder], Correction]
"""A user's own correction: its inputs have ``rollout_log_probs``, and its weights should carry no gradient."""

correction_functions: Registry[CorrectionFunction] = Registry("train_infer_correction")


def correct_mismatch(inputs: LossInputs, options: CorrectionOptions, metrics: MetricBuilder) -> Correction:
    """Apply the rules in ``options`` and log what they did.

    Raises ``ValueError`` where there are no ``rollout_log_probs``.
    """
    # Rules apply in any order: weights multiply, masks intersect.
    keep, weights = inputs.mask, torch.ones_like(inputs.log_probs)
    if inputs.rollout_log_probs is None:
        raise ValueError("train_infer_correction needs rollout_log_probs: let the engine return log-probs")
    if options.function is not None:
        own = correction_functions.resolve(options.function)(inputs, metrics)
        return Correction(own.weights, own.keep & inputs.mask)
    # Only the current policy carries a gradient: with stored old log-probs there is none to follow.
    follow_gradient = not options.detach and inputs.old_log_probs is None
    old = inputs.log_probs if follow_gradient else inputs.proximal_log_probs
    clipped = torch.zeros_like(inputs.mask)
    for rule in options.rules:
        if rule.action == "reject":
            continue
        # The current policy never carries a gradient into a weight: it would be pushed to look like the engine.
        policy = inputs.log_probs.detach() if rule.policy == "current" else old
        columns = policy, inputs.rollout_log_probs, inputs.mask, inputs.turn_ids
        applies = inputs.mask & (inputs.advantages < 0) if rule.only_negative else inputs.mask
        if rule.action == "truncate":
            ratio = _ratio(rule, *columns)
            bounded = ratio.clamp(*_bounds(rule))
            clipped |= applies & (bounded != ratio)
            weights = weights * torch.where(applies, bounded, 1.0)
        else:
            keep = keep & ~(applies & _is_outside(rule, *columns))
            if rule.action == "both":
                weights = weights * torch.where(applies, _ratio(rule, *columns), 1.0)
    metrics.mean("actor/is_weight_clipfrac", clipped.sum(), inputs.num_tokens)
    metrics.mean("actor/is_weight_mean", torch.where(inputs.mask, weights.detach(), 0.0).sum(), inputs.num_tokens)
    metrics.mean("actor/train_infer_final_mask_mean", keep.sum(), inputs.num_tokens)
    return Correction(weights, keep)


@torch.no_grad()
def rejection_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: CorrectionOptions, turn_ids: Tensor | None
) -> tuple[Tensor, Metrics]:
    """bool (B, L): tokens of ``mask`` that no rule with ``action: reject`` drops, and the share that is dropped.

    It replaces the mask for the whole update, so denominators count only the remaining tokens (verl's ``rollout_rs``).

    Args:
        old_log_probs, rollout_log_probs: float (B, L), of the trainer before the update and of the engine.
        mask: bool (B, L).
        turn_ids: int64 (B, L) for ``level: segment``; None: runs of masked tokens.
    """
    keep, metrics = mask, MetricBuilder()
    for rule in options.rejections:
        keep = keep & ~_is_outside(rule, old_log_probs, rollout_log_probs, mask, turn_ids)
    metrics.mean("actor/rejected_token_ratio", (mask & ~keep).sum(), mask.sum())
    return keep, metrics.build()


@torch.no_grad()
def weight_scale(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: CorrectionOptions, turn_ids: Tensor | None
) -> tuple[Tensor, Metrics]:
    """The factor that gives the weights of rules with ``normalize`` a mean of 1 over the batch, and that mean.

    It multiplies the samples' weights (verl's ``rollout_is_batch_normalize``). Arguments as :func:`rejection_mask`.

    Returns:
        A scalar in the type of the log-probs; 1 where the mean is 0.
    """
    scale = old_log_probs.new_ones(())
    for rule in options.normalized:
        ratio = _ratio(rule, old_log_probs, rollout_log_probs, mask, turn_ids)
        bounded = ratio.clamp(*_bounds(rule))
        ratio = torch.where(bounded == ratio, ratio, 0.0) if rule.action == "both" else bounded
        if rule.level in ("sequence", "geometric"):  # the same for all tokens of a response
            # Read at each response's first token, so that every response counts once and not by its length.
            mean = ratio.gather(-1, mask.long().argmax(-1, keepdim=True))[mask.any(-1)].mean()
        else:
            mean = ratio[mask].mean()
        scale = scale / mean if mean > 1e-8 else scale  # nothing is left where every weight is 0
    return scale, {"actor/is_weight_batch_mean": Mean(float(1 / scale))}


def _bounds(rule: CorrectionRule) -> tuple[float, float]:
    return -math.inf if rule.low is None else rule.low, math.inf if rule.high is None else rule.high


def _ratio(rule: CorrectionRule, policy: Tensor, rollout: Tensor, mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """policy / rollout at the rule's level, from log-probs: float (B, L)."""
    log_ratio = level_log_ratio(torch.where(mask, policy - rollout, 0.0), mask, rule.level, turn_ids)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@torch.no_grad()
def _is_outside(rule: CorrectionRule, policy: Tensor, rollout: Tensor, mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """bool (B, L): the rule's metric, at its level, lies outside its bounds."""
    log_ratio = torch.where(mask, policy - rollout, 0.0)
    if rule.metric == "ratio":
        value = _ratio(rule, policy, rollout, mask, turn_ids)
    else:
        per_token = {
            "log_diff": log_ratio,
            "prob_diff": torch.where(mask, policy.exp() - rollout.exp(), 0.0),
            "k1": -log_ratio,
            "k2": 0.5 * log_ratio.square(),
            "k3": torch.expm1(log_ratio.clamp(max=LOG_RATIO_BOUND)) - log_ratio,
        }[rule.metric]
        value = level_log_ratio(per_token, mask, rule.level, turn_ids)
    low, high = _bounds(rule)
    return (value < low) | (value > high)


@torch.no_grad()
def mismatch_metrics(inputs: LossInputs, metrics: MetricBuilder, with_segments: bool = False) -> None:
    """Log how far trainer and engine are apart; nothing without ``rollout_log_probs``.

    ``actor/train_infer_*``: mean and largest absolute log-prob difference, KL(rollout || old) as k1 and k3, Pearson's
    correlation of the probabilities, mean probability difference, and the mean ratio per token, geometric mean and
    sequence, and per segment with ``with_segments``.
    """
    if inputs.rollout_log_probs is None:
        return
    mask, tokens, lengths = inputs.mask, inputs.num_tokens, inputs.lengths
    # The trainer's own policy: before the update where that is known, else the current one.
    own = inputs.log_probs.detach() if inputs.old_is_rollout else inputs.proximal_log_probs
    log_ratio = torch.where(mask, own - inputs.rollout_log_probs, 0.0)
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    metrics.mean("actor/train_infer_log_diff_abs_mean", log_ratio.abs().sum(), tokens)
    metrics.max("actor/train_infer_log_diff_abs_max", log_ratio.abs(), mask)
    metrics.mean("actor/train_infer_kl_k1", -log_ratio.sum(), tokens)
    # r - 1, which is 0 outside the mask, and exact for small log-ratios.
    change = torch.expm1(bounded)
    metrics.mean("actor/train_infer_kl_k3", (change - bounded).sum(), tokens)
    metrics.mean("actor/train_infer_ratio_token_mean", change.sum() + tokens, tokens)
    probability = torch.where(mask, own.exp(), 0.0)
    sampled_probability = torch.where(mask, inputs.rollout_log_probs.exp(), 0.0)
    metrics.mean("actor/train_infer_diff_token_mean", (probability - sampled_probability).sum(), tokens)
    metrics.correlation("actor/train_infer_pearson", probability, sampled_probability, tokens)
    row_total = log_ratio.sum(-1)
    for name, row_log_ratio in (("geometric", row_total / lengths.clamp(min=1)), ("sequence", row_total)):
        row_ratio = row_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        total = torch.where(lengths > 0, row_ratio, 0.0).sum()
        metrics.mean(f"actor/train_infer_ratio_{name}_mean", total, (lengths > 0).sum())
    if with_segments:
        segment_change = torch.expm1(level_log_ratio(bounded, mask, "segment", inputs.turn_ids))
        metrics.mean("actor/train_infer_ratio_segment_mean", segment_change.sum() + tokens, tokens)


@dataclass(frozen=True)
class LossOutputs:
    """A micro-batch's share of the global loss (scalar, with gradient) and its metrics."""

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class ActorLossOptions(PPOConfig):
    """Everything the actor's loss depends on: the algorithm's keys, and what follows from them."""

    pg: Any = field(default_factory=PpoOptions)
    """Options of the policy loss, as its function takes them."""
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    """The meaning of ``train_infer_correction``."""


def options_from(options_class: type[Options], settings: Mapping[str, Any]) -> Options:
    """Build ``options_class`` from those entries of ``settings`` that are its fields; the rest keeps its default."""
    names = {f.name for f in fields(options_class)}  # type: ignore[arg-type]
    return options_class(**{name: value for name, value in settings.items() if name in names})


def actor_loss_options(config: PPOConfig) -> ActorLossOptions:
    """The options of a run's policy.

    Raises:
        ValueError: an unknown loss, an option that it does not have, or a bad correction.
    """
    pg, correction = policy_losses.options_of(config.loss), correction_options(config.train_infer_correction)
    return options_from(ActorLossOptions, {**vars(config), "pg": pg, "correction": correction})


def actor_loss(inputs: LossInputs, options: ActorLossOptions, denominators: LossDenominators) -> LossOutputs:
    """This micro-batch's share of the actor's loss over the whole optimizer step.

    loss = rl_loss_coef * pg + kl_loss_coef * KL(pi || ref) - entropy_loss_coef * entropy, each aggregated by
    ``loss_agg_mode`` (or a mode of its own) with the same global denominators; plus ``divergence_term`` where there
    is one.  Sample weights and corrections act on the first term.

    Raises ``ValueError`` where a term needs ``ref_log_probs``, ``entropy`` or ``rollout_log_probs`` and has none.
    """
    mask, mode, of_rows = inputs.mask, options.loss_agg_mode, (denominators, inputs.group_ids, inputs.sequence_tokens)
    weights = row_weights(mask, mode, *of_rows)
    # Losses of other packages weigh advantages themselves (skyrl_losses).
    inputs = replace(inputs, row_weights=weights)
    metrics = MetricBuilder()
    # The weight of a metric that is a share of the global loss: the mean over micro-batches is then the global loss.
    share = inputs.num_tokens.double() / max(denominators.tokens, 1.0)

    per_token = policy_losses.resolve(options.loss.name)(inputs, options.pg, metrics)
    if inputs.policy_mask is not None:
        per_token = torch.where(inputs.policy_mask, per_token, 0.0)
    if options.correction.rules or options.correction.function is not None:
        correction = correct_mismatch(inputs, options.correction, metrics)
        # A dropped token counts as 0, not as absent: it stays in inputs.mask and in the denominators.
        per_token = torch.where(correction.keep, per_token * correction.weights, 0.0)
    total = options.rl_loss_coef * weighted_sum(per_token, mask, weights, inputs.sample_weights)
    metrics.mean("actor/weighted_pg_loss", total, share)
    metrics.mean("actor/pg_loss", weighted_sum(per_token.detach(), mask, weights), share)
    # With a coefficient of 0 the reference may not have been computed at all.
    if options.use_kl_loss and options.kl_loss_coef != 0.0:
        if inputs.ref_log_probs is None:
            raise ValueError("use_kl_loss needs ref_log_probs: the log-probs of the reference policy")
        estimator = KLOptions(
            options.kl_loss_type,
            value_clamp=options.kl_loss_clamp,
            importance_weighted=options.kl_loss_importance_weighted,
        )
        kl_per_token = kl_estimate(inputs.log_probs, inputs.ref_log_probs, estimator, inputs.log_ratio)
        kl = weighted_sum(kl_per_token, mask, row_weights(mask, options.kl_loss_agg_mode or mode, *of_rows))
        metrics.mean("actor/kl_loss", kl, share)
        total = total + options.kl_loss_coef * kl
    if inputs.divergence_term is not None:
        distillation = weighted_sum(inputs.divergence_term, mask, weights)
        metrics.mean("actor/opd_loss", distillation, share)
        total = total + distillation
    if options.entropy_loss_coef != 0.0:
        if inputs.entropy is None:
            raise ValueError(f"entropy_loss_coef {options.entropy_loss_coef} needs the entropy of the current policy")
        entropy_weights = row_weights(mask, options.entropy_loss_agg_mode or mode, *of_rows)
        total = total - options.entropy_loss_coef * weighted_sum(inputs.entropy, mask, entropy_weights)
    if inputs.entropy is not None:
        # Detached: a bonus without weight must not enter the backward pass.
        entropy = torch.where(mask, inputs.entropy.detach(), 0.0)
        metrics.mean("actor/entropy", entropy.sum(), inputs.num_tokens)
    metrics.mean("actor/total_loss", total, share)
    _policy_metrics(inputs, metrics)
    mismatch_metrics(inputs, metrics, any(rule.level == "segment" for rule in options.correction.rules))
    return LossOutputs(total, metrics.build())


@torch.no_grad()
def _policy_metrics(inputs: LossInputs, metrics: MetricBuilder) -> None:
    """Log the distance of the policy from the one before the update, and the share of rows that the loss uses."""
    mask, tokens, valid = inputs.mask, inputs.num_tokens, torch.count_nonzero(inputs.lengths)
    log_ratio, ratio = inputs.log_ratio.detach(), inputs.ratio
    metrics.mean("actor/approxkl", 0.5 * log_ratio.square().sum(), tokens)
    metrics.mean("actor/policykl", log_ratio.sum(), tokens)
    metrics.mean("actor/ratio_mean", torch.where(mask, ratio, 0.0).sum(), tokens)
    metrics.max("actor/ratio_max", ratio, mask)
    metrics.min("actor/ratio_min", ratio, mask)
    metrics.sum("actor/valid_samples", valid)
    metrics.sum("actor/total_samples", float(len(mask)))
    metrics.mean("actor/valid_sample_ratio", valid, float(len(mask)))
    if inputs.sample_weights is not None:
        everything = torch.ones_like(inputs.sample_weights, dtype=torch.bool)
        metrics.mean("actor/sample_weights_mean", inputs.sample_weights.sum(), float(len(mask)))
        metrics.min("actor/sample_weights_min", inputs.sample_weights, everything)
        metrics.max("actor/sample_weights_max", inputs.sample_weights, everything)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None,
    denominators: LossDenominators,
    loss_agg_mode: str = "token-mean",
    group_ids: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
) -> LossOutputs:
    """The error, clipped around the old values: max(e(v, R), e(clip(v, old +- c), R)), with e half the squared error.

    Source: PPO's reference implementation (arXiv 1707.06347; "What matters in on-policy RL", 2006.05990, app. B.1).

    Args:
        values: float (B, L), the critic's prediction, with gradient.
        old_values: float (B, L), its prediction before the update.
        returns: float (B, L).
        mask: bool (B, L).
        value_clip: c; None: no clipping.
        denominators: of the whole optimizer step; the result is this micro-batch's share of the global loss.
        loss_agg_mode: one of :data:`~roll.config.algorithm.LOSS_AGG_MODES`.
        group_ids: int64 (B,), for modes that need groups.
        sequence_tokens: int64 (B,), tokens of the loss in all rows of a row's trajectory.
    """
    metrics = MetricBuilder()
    loss = error = 0.5 * (values - returns).square()
    clipped_count: Tensor | float = 0.0
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = 0.5 * (near - returns).square()
        # The larger error: clipping may only take away the gain of a step beyond the range, never hide an error that
        # has grown.
        loss = torch.maximum(error, clipped_error)
        clipped_count = ((clipped_error > error) & mask).sum()
    total = weighted_sum(loss, mask, row_weights(mask, loss_agg_mode, denominators, group_ids, sequence_tokens))
    tokens = mask.sum()
    metrics.mean("critic/loss", total, tokens.double() / max(denominators.tokens, 1.0))
    metrics.mean("critic/clipfrac", clipped_count, tokens)
    for name, per_token in (("value", old_values), ("vpred", values), ("error", (values - returns).square())):
        metrics.mean(f"critic/{name}", torch.where(mask, per_token.detach(), 0.0).sum(), tokens)
    return LossOutputs(total, metrics.build())
