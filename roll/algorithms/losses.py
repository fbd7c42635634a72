"""The actor's and the critic's losses, and corrections for an engine whose probabilities differ from the trainer's.

The actor's loss is a policy gradient by variant, corrected, plus the divergence from the reference, minus the entropy
bonus.  The weights of a correction (:class:`~roll.config.corrections.CorrectionOptions`) are ratios old / rollout: the
trainer's policy before the update (unless said otherwise) over the distribution that sampled.  With the surrogate's own
ratio pi / old they make decoupled PPO (arXiv 2505.24298 eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll.algorithms import aggregation
from roll.algorithms.aggregation import LossDenominators, clear_, level_log_ratio, row_blocks, row_weights, weighted_sum
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.metrics import MetricBuilder, correlation_moments
from roll.algorithms.policy_losses import (
    LOG_RATIO_BOUND,
    LossInputs,
    PolicyLossFunction,
    options_class_of,
    policy_losses,
    register_policy_loss,
)
from roll.algorithms.registry import Registry
from roll.config.algorithm import POLICY_LOSSES, PPOConfig
from roll.config.corrections import CorrectionOptions, CorrectionRule, correction_options
from roll.config.reading.schema import rules_of
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
MEAN_OF_NOTHING = 1e-8
"""Means of weights up to this one are not divided by."""


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
        if rule.action == "reject":
            continue
        policy = inputs.log_probs.detach() if rule.policy == "current" else old
        log_ratio = torch.where(inputs.mask, policy - inputs.rollout_log_probs, 0.0)
        applies = inputs.mask & (inputs.advantages < 0) if rule.only_negative else inputs.mask
        ratio = _ratio(log_ratio, inputs.mask, rule, inputs.turn_ids)
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


@torch.no_grad()
def rejection_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: CorrectionOptions, turn_ids: Tensor | None
) -> tuple[Tensor, Metrics]:
    """bool (B, L): tokens of ``mask`` that no rule with ``action: reject`` drops, and the share that is dropped.

    It takes the place of the mask for the whole update, so denominators count what is left (verl's ``rollout_rs``).

    Args:
        old_log_probs, rollout_log_probs: float (B, L), of the trainer before the update and of the engine.
        mask: bool (B, L).
        turn_ids: int64 (B, L) for ``level: segment``; None: runs of masked tokens.
    """
    inputs = LossInputs(
        log_probs=old_log_probs,
        advantages=torch.zeros_like(old_log_probs),
        mask=mask,
        rollout_log_probs=rollout_log_probs,
        turn_ids=turn_ids,
    )
    log_ratio, keep = torch.where(mask, old_log_probs - rollout_log_probs, 0.0), mask
    for rule in options.rejections:
        ratio = _ratio(log_ratio, mask, rule, turn_ids)
        keep = keep & ~_outside(_rule_metric(inputs, rule, log_ratio, ratio, old_log_probs), rule)
    metrics = MetricBuilder()
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
    log_ratio, scale = torch.where(mask, old_log_probs - rollout_log_probs, 0.0), old_log_probs.new_ones(())
    for rule in options.normalized:
        ratio = _ratio(log_ratio, mask, rule, turn_ids)
        if rule.action == "both":
            ratio = torch.where(_outside(ratio, rule), 0.0, ratio)
        elif (rule.low, rule.high) != (None, None):
            ratio = ratio.clamp(rule.low, rule.high)
        if rule.level in ("sequence", "geometric"):  # the same for all tokens of a response
            mean = ratio.gather(-1, mask.long().argmax(-1, keepdim=True))[mask.any(-1)].mean()
        else:
            mean = ratio[mask].mean()
        scale = scale / mean if mean > MEAN_OF_NOTHING else scale
    return scale, {"actor/is_weight_batch_mean": Mean(float(1 / scale))}


def _ratio(log_ratio: Tensor, mask: Tensor, rule: CorrectionRule, turn_ids: Tensor | None) -> Tensor:
    """The ratio at the rule's level: float (B, L)."""
    return level_log_ratio(log_ratio, mask, rule.level, turn_ids).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


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
    return level_log_ratio(torch.where(inputs.mask, per_token, 0.0), inputs.mask, rule.level, inputs.turn_ids)


@torch.no_grad()
def mismatch_metrics(inputs: LossInputs, metrics: MetricBuilder, with_segments: bool = False) -> None:
    """Log how far trainer and engine stand apart; nothing without ``rollout_log_probs``.

    ``actor/train_infer_*``: mean and largest absolute log-prob difference, KL(rollout || old) as k1 and k3, Pearson's
    correlation of the probabilities, mean probability difference, and the mean ratio per token, geometric mean and
    sequence, and per segment where asked for.
    """
    if inputs.rollout_log_probs is None:
        return
    tokens, trainer, rollout = inputs.num_tokens, inputs.trainer_log_probs, inputs.rollout_log_probs
    # Sums are taken of blocks that are still in the cache. Everything is 0 outside the mask, so they are masked sums.
    of_rows, largest, sums = [], [], []
    for a, b, bits in row_blocks(trainer, rollout, inputs.keep.bits, size=aggregation.SUMMED_BLOCK):
        log_ratio = clear_(torch.sub(a, b), bits)
        size = log_ratio.abs()
        largest.append(size.amax() if size.numel() else size.new_zeros(()))
        is_bounded = size.device.type == "cpu" and largest[-1].item() <= LOG_RATIO_BOUND
        bounded = log_ratio if is_bounded else log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        of_rows.append(log_ratio.sum(-1))
        of_block = [size.sum(), log_ratio.sum(), torch.expm1(bounded, out=size).sub_(bounded).sum()]
        of_block.append(clear_(torch.exp(bounded, out=size), bits).sum())
        old, sampled = (clear_(torch.exp(of, out=out), bits) for of, out in ((a, log_ratio), (b, size)))
        of_pairs = correlation_moments(old, sampled)
        sums.append([*of_block, old.sub_(sampled).sum(), *of_pairs])
    size_sum, k1, k3, ratio, difference, *moments = (reduce(torch.add, parts) for parts in zip(*sums, strict=True))
    totals = torch.cat(of_rows)
    metrics.mean("actor/train_infer_log_diff_abs_mean", size_sum, tokens)
    metrics.largest("actor/train_infer_log_diff_abs_max", torch.stack(largest), tokens)
    metrics.mean("actor/train_infer_kl_k1", -k1, tokens)
    metrics.mean("actor/train_infer_kl_k3", k3, tokens)
    metrics.correlation("actor/train_infer_pearson", moments, tokens)
    metrics.mean("actor/train_infer_diff_token_mean", difference, tokens)
    metrics.mean("actor/train_infer_ratio_token_mean", ratio, tokens)
    rows, lengths = inputs.lengths > 0, inputs.lengths.clamp(min=1)
    for name, row_log_ratio in (("geometric", totals / lengths), ("sequence", totals)):
        row_ratio = row_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        metrics.mean(f"actor/train_infer_ratio_{name}_mean", torch.where(rows, row_ratio, 0.0).sum(), rows.sum())
    if with_segments:
        mask = inputs.mask
        bounded = inputs.keep(trainer - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        segment = torch.where(mask, level_log_ratio(bounded, mask, "segment", inputs.turn_ids).exp(), 0.0)
        metrics.mean("actor/train_infer_ratio_segment_mean", segment.sum(), tokens)


@dataclass(frozen=True)
class LossOutputs:
    """A micro-batch's share of the global loss (scalar, with gradient) and its metrics."""

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class ActorLossOptions(PPOConfig):
    """Everything the actor's loss depends on: the algorithm's keys, and what follows from them."""

    pg: Any = field(default_factory=PPOConfig)
    """Options of the variant: the algorithm's keys, or its own dataclass."""
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    """The meaning of ``train_infer_correction``."""

    @cached_property
    def policy_loss(self) -> PolicyLossFunction:
        """The function of ``pg_variant``; raises ``ValueError`` for an unknown one."""
        return policy_losses.resolve(self.pg_variant)

    @cached_property
    def kl(self) -> KLOptions:
        """Options of the divergence in the loss."""
        return KLOptions(
            self.kl_loss_type, value_clamp=self.kl_loss_clamp, importance_weighted=self.kl_loss_importance_weighted
        )

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss and self.kl_loss_coef != 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_loss_coef != 0.0


def options_from(options_class: type[Options], settings: Mapping[str, Any]) -> Options:
    """Build ``options_class`` from those entries of ``settings`` that are its fields; the rest keeps its default."""
    names = {f.name for f in fields(options_class)}  # type: ignore[arg-type]
    return options_class(**{name: value for name, value in settings.items() if name in names})


def option_names(pg_variant: str) -> tuple[str, ...]:
    """The options of a variant: the keys whose ``read_if`` names it, or the fields of its own dataclass.

    Raises ``ValueError`` for an unknown variant.
    """
    options_class = options_class_of(pg_variant)
    if options_class is not PPOConfig or pg_variant not in POLICY_LOSSES or POLICY_LOSSES.is_own(pg_variant):
        return tuple(option.name for option in fields(options_class))
    return tuple(
        item.name for item in fields(PPOConfig) if pg_variant in dict(rules_of(item).read_if).get("pg_variant", ())
    )


def actor_loss_options(settings: Mapping[str, Any]) -> ActorLossOptions:
    """Options from a flat mapping of YAML keys (``pg_variant``, ``pg_clip``, ``train_infer_correction`` ...).

    Keys that belong to no option are ignored, except in ``pg_variant_args``, which hold options of the variant that are
    no keys of the configuration; ``pg_variant: null`` is ``ppo``.

    Raises ``ValueError`` for an unknown variant, an argument that it does not have, or a bad correction.
    """
    variant = settings.get("pg_variant") or "ppo"
    arguments = settings.get("pg_variant_args") or {}
    known = option_names(variant)
    for name in arguments:
        if name not in known:
            raise ValueError(f"pg_variant_args.{name} is no option of {variant}; known: {', '.join(known) or 'none'}")
    settings = {**settings, **arguments, "pg_variant": variant}
    pg: Any = options_from(options_class_of(variant), settings)
    correction = correction_options(settings.get("train_infer_correction"))
    return options_from(ActorLossOptions, {**settings, "pg": pg, "correction": correction})


def actor_loss(inputs: LossInputs, options: ActorLossOptions, denominators: LossDenominators) -> LossOutputs:
    """This micro-batch's share of the actor's loss over the whole optimizer step.

    loss = rl_loss_coef * pg + kl_loss_coef * KL(pi || ref) - entropy_loss_coef * entropy, each aggregated by
    ``loss_agg_mode`` (or a mode of its own) with the same global denominators; plus ``teacher_divergence`` where there
    is one.  Sample weights and corrections act on the first term.

    Raises ``ValueError`` where a term needs ``ref_log_probs``, ``entropy`` or ``rollout_log_probs`` and has none.
    """
    of_rows = inputs.group_ids, inputs.sequence_tokens
    weights = row_weights(inputs.mask, options.loss_agg_mode, denominators, *of_rows)
    inputs = replace(inputs, row_weights=weights)
    metrics = MetricBuilder()
    share = inputs.num_tokens.double() / max(denominators.tokens, 1.0)

    def reduced(loss: Tensor, sample_weights: Tensor | None = None, mode: str | None = None) -> Tensor:
        keep = inputs.keep if loss.dtype == inputs.log_probs.dtype else None
        by_mode = weights if mode is None else row_weights(inputs.mask, mode, denominators, *of_rows)
        return weighted_sum(loss, inputs.mask, by_mode, sample_weights, keep)

    per_token = options.policy_loss(inputs, options.pg, metrics)
    if inputs.policy_mask is not None:
        per_token = torch.where(inputs.policy_mask, per_token, 0.0)
    if options.correction.is_active:
        correction = correct_mismatch(inputs, options.correction, metrics)
        # A dropped token counts as 0, not as absent: it stays in inputs.mask and in the denominators.
        per_token = torch.where(correction.keep, per_token * correction.weights, 0.0)
    total = options.rl_loss_coef * reduced(per_token, inputs.sample_weights)
    metrics.mean("actor/weighted_pg_loss", total, share)
    is_plain = inputs.sample_weights is None and options.rl_loss_coef == 1.0
    metrics.mean("actor/pg_loss", total if is_plain else reduced(per_token.detach()), share)
    if options.needs_reference:
        if inputs.ref_log_probs is None:
            raise ValueError("use_kl_loss needs ref_log_probs: the log-probs of the reference policy")
        kl_per_token = kl_estimate(inputs.log_probs, inputs.ref_log_probs, options.kl, inputs.log_ratio)
        kl = reduced(kl_per_token, mode=options.kl_loss_agg_mode)
        metrics.mean("actor/kl_loss", kl, share)
        total = total + options.kl_loss_coef * kl
    if inputs.teacher_divergence is not None:
        taught = reduced(inputs.teacher_divergence)
        metrics.mean("actor/opd_loss", taught, share)
        total = total + taught
    if options.needs_entropy:
        if inputs.entropy is None:
            raise ValueError(f"entropy_loss_coef {options.entropy_loss_coef} needs the entropy of the current policy")
        total = total - options.entropy_loss_coef * reduced(inputs.entropy, mode=options.entropy_loss_agg_mode)
    if inputs.entropy is not None:
        # Detached: where the bonus has no weight the backward pass must not hear of it.
        metrics.mean("actor/entropy", inputs.keep(inputs.entropy.detach()).sum(), inputs.num_tokens)
    metrics.mean("actor/total_loss", total, share)
    _policy_metrics(inputs, metrics)
    mismatch_metrics(inputs, metrics, any(rule.level == "segment" for rule in options.correction.rules))
    return LossOutputs(total, metrics.build())


@torch.no_grad()
def _policy_metrics(inputs: LossInputs, metrics: MetricBuilder) -> None:
    """Log the distance of the policy from the one before the update, and the share of the batch that takes part."""
    tokens, valid = inputs.num_tokens, torch.count_nonzero(inputs.lengths)
    log_ratio, ratio = inputs.log_ratio.detach(), inputs.ratio
    # Outside the mask the log-ratio is 0, so plain sums are masked sums; the ratio there is 1.
    metrics.mean("actor/approxkl", 0.5 * log_ratio.flatten().dot(log_ratio.flatten()), tokens)
    metrics.mean("actor/policykl", log_ratio.sum(), tokens)
    metrics.mean("actor/ratio_mean", ratio.sum() - (ratio.numel() - tokens), tokens)
    metrics.range("actor/ratio", ratio, 1.0, inputs.keep)
    metrics.sum("actor/valid_samples", valid)
    metrics.sum("actor/total_samples", float(inputs.mask.shape[0]))
    metrics.mean("actor/valid_sample_ratio", valid, float(inputs.mask.shape[0]))
    if inputs.sample_weights is not None:
        everything = torch.ones_like(inputs.sample_weights, dtype=torch.bool)
        metrics.mean("actor/sample_weights_mean", inputs.sample_weights.sum(), float(everything.numel()))
        metrics.min("actor/sample_weights_min", inputs.sample_weights, everything)
        metrics.max("actor/sample_weights_max", inputs.sample_weights, everything)


ErrorFunction = Callable[[Tensor, Tensor], Tensor]
"""``(values, returns) -> loss`` of each token, all float (B, L)."""

value_losses: Registry[ErrorFunction] = Registry("value_loss_type")
register_value_loss = value_losses.decorator
"""Decorator ``(name)``: make an error function selectable as ``value_loss_type: name``."""


@register_value_loss("mse")
def mse(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error."""
    return 0.5 * (values - returns).square()


@register_value_loss("huber")
def huber(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error up to an error of 1, linear beyond: outliers pull no harder than that (Huber 1964)."""
    return torch.nn.functional.huber_loss(values, returns, reduction="none")


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None,
    denominators: LossDenominators,
    loss_agg_mode: str = "token-mean",
    value_loss_type: str = "mse",
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
        loss_agg_mode: one of :data:`roll.algorithms.aggregation.AGGREGATION_MODES`.
        value_loss_type: name of another e (:data:`value_losses`), or the dotted path of one.
        group_ids: int64 (B,), for modes that ask for groups.
        sequence_tokens: int64 (B,), tokens of the loss in all rows of a row's trajectory.
    """
    metrics = MetricBuilder()
    error_of = value_losses.resolve(value_loss_type)
    loss = error = error_of(values, returns)
    clipped_count: Tensor | float = 0.0
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = error_of(near, returns)
        loss = torch.maximum(error, clipped_error)
        clipped_count = ((clipped_error > error) & mask).sum()
    total = weighted_sum(loss, mask, row_weights(mask, loss_agg_mode, denominators, group_ids, sequence_tokens))
    tokens = mask.sum()
    metrics.mean("critic/loss", total, tokens.double() / max(denominators.tokens, 1.0))
    metrics.mean("critic/clipfrac", clipped_count, tokens)
    for name, per_token in (("value", old_values), ("vpred", values), ("error", (values - returns).square())):
        metrics.mean(f"critic/{name}", torch.where(mask, per_token.detach(), 0.0).sum(), tokens)
    return LossOutputs(total, metrics.build())
