"""Corrections for a rollout engine whose probabilities differ from the trainer's, and the metrics of that mismatch.

A correction is a list of rules; a rule is level x action x metric x bounds.  The weights are ratios old / rollout: the
trainer's policy before the update (unless said otherwise) over the distribution that sampled.  With the surrogate's own
ratio pi / old they make decoupled PPO (arXiv 2505.24298 eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.loss_types import LOG_RATIO_BOUND, LossInputs
from roll.algorithms.masked import clear_, level_log_ratio, row_blocks
from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.registry import Registry

Level = Literal["token", "segment", "geometric", "sequence", "max"]
Action = Literal["truncate", "mask", "both"]
MismatchMetric = Literal["ratio", "log_diff", "prob_diff", "k1", "k2", "k3"]

LEVELS = ("token", "segment", "geometric", "sequence", "max")
METRICS = ("ratio", "log_diff", "prob_diff", "k1", "k2", "k3")


@dataclass(frozen=True)
class CorrectionRule:
    """One rule. A token is weighted with, or masked by, the metric of its level."""

    level: Level = "token"
    """token; segment: geometric mean over a run of masked tokens (a turn); geometric: geometric mean over the response;
    sequence: product over the response; max: the response's largest (``mask`` only)."""
    action: Action = "truncate"
    """truncate: weight = old/rollout ratio clipped to the bounds (importance sampling); mask: drop what lies outside
    the bounds; both: weight by the ratio inside the bounds, drop outside (IcePop)."""
    metric: MismatchMetric = "ratio"
    """What the bounds of ``mask`` speak of: ratio old/rollout; log_diff: its logarithm; prob_diff: old - rollout
    probability; k1, k2, k3: estimates of KL(rollout || old).  ``truncate`` and ``both`` always weigh by the ratio."""
    low: float | None = None
    """Lower bound; null: none."""
    high: float | None = None
    """Upper bound; null: none."""
    only_negative: bool = False
    """Apply to tokens of negative advantage only (off-policy sequence masking)."""
    policy: Literal["old", "current"] = "old"
    """Which policy of the trainer is compared: the one before the update, or the current one, which also moves from
    one optimizer step to the next."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"correction level {self.level!r} is unknown; known: {', '.join(LEVELS)}")
        if self.action not in ("truncate", "mask", "both"):
            raise ValueError(f"correction action {self.action!r} is unknown; known: truncate, mask, both")
        if self.metric not in METRICS:
            raise ValueError(f"correction metric {self.metric!r} is unknown; known: {', '.join(METRICS)}")
        if self.policy not in ("old", "current"):
            raise ValueError(f"correction policy {self.policy!r} is unknown; known: old, current")
        if self.action != "mask" and self.metric != "ratio":
            raise ValueError(
                f"correction action {self.action!r} weighs by the ratio; metric {self.metric!r} needs mask"
            )
        if self.action != "mask" and self.level == "max":
            raise ValueError(
                f"correction action {self.action!r} has no weight at level max: use mask, or another level"
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"correction bounds are the wrong way round: low {self.low} > high {self.high}")


@dataclass(frozen=True)
class CorrectionOptions:
    """Rules applied one after the other: weights multiply, masks intersect. Empty: no correction."""

    rules: tuple[CorrectionRule, ...] = ()
    detach: bool = True
    """Keep the gradient out of the weights; matters only where old log-probs are the current policy's own."""
    function: str | None = None
    """Dotted path of a correction of one's own, in place of rules."""

    @property
    def is_active(self) -> bool:
        return bool(self.rules) or self.function is not None


CORRECTION_PRESETS: dict[str, CorrectionOptions] = {
    # Truncated importance sampling per token; Yao et al. 2025, "Your efficient RL framework secretly brings you
    # off-policy RL training".
    "tis": CorrectionOptions((CorrectionRule("token", "truncate", high=2.0),)),
    "seq_tis": CorrectionOptions((CorrectionRule("sequence", "truncate", high=2.0),)),
    # arXiv 2510.18855: keep and weigh tokens inside the band, drop the others.
    "icepop": CorrectionOptions((CorrectionRule("token", "both", low=0.5, high=5.0),)),
    # Weigh a response by its ratio, and drop it where the ratio is above the bound.
    "sequence_mask": CorrectionOptions((CorrectionRule("sequence", "both", high=2.0),)),
    # The geometric mean only filters responses; those that stay keep truncated weights per token (OpenRLHF, NeMo-RL).
    "seq_mask_tis": CorrectionOptions(
        (CorrectionRule("geometric", "mask", low=0.5, high=5.0), CorrectionRule("token", "truncate", high=5.0))
    ),
    "geo_mask": CorrectionOptions((CorrectionRule("geometric", "mask", low=0.99, high=1.01),)),
    # Off-policy sequence masking (DeepSeek-V3.2 report, section 3.1): drop responses of negative advantage that the
    # policy has moved away from: mean log(rollout / current) above the bound.
    "opsm": CorrectionOptions(
        (CorrectionRule("geometric", "mask", "k1", high=1e-4, only_negative=True, policy="current"),)
    ),
    # Decoupled PPO (arXiv 2505.24298): the proximal policy's surrogate, weighted by proximal / behaviour.
    "decoupled": CorrectionOptions((CorrectionRule("token", "truncate", high=5.0),)),
}

_FILTER_METRICS = {"ratio": ("ratio", 0.8, 1.2), "diff": ("prob_diff", -0.2, 0.2)}


def correction_options(setting: str | Mapping[str, Any] | Sequence[Any] | None) -> CorrectionOptions:
    """From the YAML value of ``train_infer_correction``.

    Accepts null, the name of a preset, the dotted path of a function, a
    list of rules (mappings of :class:`CorrectionRule`'s fields), or ROLL's own spelling: ``is_weight`` {enabled,
    weight_type, upper_bound, detach} and ``filters`` [{enabled, agg_type, ratio_enabled, ratio_low, ratio_high,
    diff_enabled, diff_low, diff_high}].

    Raises ``ValueError`` naming the unknown preset, key or value.
    """
    if not setting:
        return CorrectionOptions()
    if isinstance(setting, str):
        if "." in setting or ":" in setting:
            return CorrectionOptions(function=setting)
        if setting not in CORRECTION_PRESETS:
            raise ValueError(
                f"unknown train_infer_correction preset {setting!r}; known: {', '.join(CORRECTION_PRESETS)}"
            )
        return CORRECTION_PRESETS[setting]
    if isinstance(setting, Mapping):
        return _from_roll_spelling(setting)
    return CorrectionOptions(tuple(_rule(entry) for entry in setting))


def _rule(entry: Any) -> CorrectionRule:
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"a rule of train_infer_correction is a mapping such as {{level: token, high: 2.0}}, not {entry!r}"
        )
    _refuse_unknown(entry, {f.name for f in fields(CorrectionRule)}, "train_infer_correction[]")
    return CorrectionRule(**entry)


def _refuse_unknown(section: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(section) - known)
    if unknown:
        raise ValueError(f"unknown key {where}.{unknown[0]}; known: {', '.join(sorted(known))}")


_WEIGHT_KEYS = {"enabled", "weight_type", "upper_bound", "detach"}
_FILTER_KEYS = {"enabled", "agg_type"} | {f"{m}_{k}" for m in ("ratio", "diff") for k in ("enabled", "low", "high")}


def _from_roll_spelling(setting: Mapping[str, Any]) -> CorrectionOptions:
    _refuse_unknown(setting, {"is_weight", "filters"}, "train_infer_correction")
    rules: list[CorrectionRule] = []
    weight = setting.get("is_weight") or {}
    _refuse_unknown(weight, _WEIGHT_KEYS, "train_infer_correction.is_weight")
    if weight.get("enabled", False):
        rules.append(
            CorrectionRule(weight.get("weight_type", "token"), "truncate", high=weight.get("upper_bound", 1.2))
        )
    for entry in setting.get("filters") or ():
        _refuse_unknown(entry, _FILTER_KEYS, "train_infer_correction.filters[]")
        if not entry.get("enabled", True):
            continue
        for prefix, (metric, low, high) in _FILTER_METRICS.items():
            if entry.get(f"{prefix}_enabled", False):
                rules.append(
                    CorrectionRule(
                        entry.get("agg_type", "token"),
                        "mask",
                        metric,  # type: ignore[arg-type]
                        entry.get(f"{prefix}_low", low),
                        entry.get(f"{prefix}_high", high),
                    )
                )
    return CorrectionOptions(tuple(rules), detach=bool(weight.get("detach", True)))


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
