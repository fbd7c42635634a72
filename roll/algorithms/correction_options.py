"""Vocabulary of the train/inference mismatch corrections. Torch-free.

A correction is a list of rules; a rule is level x action x metric x bounds.  The metric compares the trainer's
probabilities, before the update unless said otherwise (old), with those of the engine that sampled (rollout).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Level = Literal["token", "segment", "geometric", "sequence"]
Action = Literal["truncate", "mask", "both"]
MismatchMetric = Literal["ratio", "log_diff", "prob_diff", "k1", "k3"]

LEVELS = ("token", "segment", "geometric", "sequence")


@dataclass(frozen=True)
class CorrectionRule:
    """One rule. A token is weighted with, or masked by, the metric of its level."""

    level: Level = "token"
    """token; segment: geometric mean over a run of masked tokens (a turn); geometric: geometric mean over the response;
    sequence: product over the response."""
    action: Action = "truncate"
    """truncate: weight = old/rollout ratio clipped to the bounds (importance sampling); mask: drop what lies outside
    the bounds; both: weight by the ratio inside the bounds, drop outside (IcePop)."""
    metric: MismatchMetric = "ratio"
    """What the bounds of ``mask`` speak of: ratio old/rollout; log_diff: its logarithm; prob_diff: old - rollout
    probability; k1, k3: estimates of KL(rollout || old).  ``truncate`` and ``both`` always weigh by the ratio."""
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
        if self.metric not in ("ratio", "log_diff", "prob_diff", "k1", "k3"):
            raise ValueError(f"correction metric {self.metric!r} is unknown; known: ratio, log_diff, prob_diff, k1, k3")
        if self.policy not in ("old", "current"):
            raise ValueError(f"correction policy {self.policy!r} is unknown; known: old, current")
        if self.action != "mask" and self.metric != "ratio":
            raise ValueError(
                f"correction action {self.action!r} weighs by the ratio; metric {self.metric!r} needs mask"
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
