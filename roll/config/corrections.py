"""``train_infer_correction``: what to do about an engine whose probabilities differ from the trainer's.

A correction is a list of rules; a rule is level x action x metric x bounds. The key has four spellings: the name of a
preset, the dotted path of a function, a list of rules, and ROLL's section with ``is_weight`` and ``filters``.
:mod:`roll.algorithms.losses` applies the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from roll.config.reading.errors import Problems, closest
from roll.config.reading.fields import DOTTED_PATH, setting
from roll.config.reading.schema import SchemaReader, build

Level = Literal["token", "segment", "geometric", "sequence"]
RuleLevel = Literal["token", "segment", "geometric", "sequence", "max"]
Action = Literal["truncate", "mask", "both", "reject"]
MismatchMetric = Literal["ratio", "log_diff", "prob_diff", "k1", "k2", "k3"]


@dataclass(frozen=True)
class ImportanceWeightConfig:
    """``train_infer_correction.is_weight``: weigh tokens by trainer / engine probability."""

    enabled: bool = False
    """Switch it on."""
    weight_type: Level = "token"
    """Level at which the ratio is taken."""
    upper_bound: float | None = setting(1.2, gt=0)
    """Weights are truncated at this value; null: not truncated."""
    detach: bool = True
    """No gradient through the weight."""


@dataclass(frozen=True)
class MismatchFilterConfig:
    """An entry of ``train_infer_correction.filters``: mask what the trainer and the engine disagree on."""

    enabled: bool = True
    """Switch it on."""
    agg_type: Level = "token"
    """Level at which the comparison is made."""
    ratio_enabled: bool = False
    """Compare the probability ratio with the bounds below."""
    ratio_low: float = setting(0.8, ge=0)
    """Least ratio kept."""
    ratio_high: float = setting(1.2, gt=0)
    """Greatest ratio kept."""
    diff_enabled: bool = False
    """Compare the difference of probabilities with the bounds below."""
    diff_low: float = -0.2
    """Least difference kept."""
    diff_high: float = 0.2
    """Greatest difference kept."""


@dataclass(frozen=True)
class CorrectionConfig:
    """The section form of ``train_infer_correction``."""

    is_weight: ImportanceWeightConfig = field(default_factory=ImportanceWeightConfig)
    """Importance weights."""
    filters: list[MismatchFilterConfig] = field(default_factory=list)
    """Masks, applied one after the other."""


@dataclass(frozen=True)
class CorrectionRule:
    """An entry of the list form of ``train_infer_correction``."""

    level: RuleLevel = "token"
    """Level at which trainer and engine are compared."""
    action: Action = "truncate"
    """Weigh by the ratio, mask what lies outside the bounds, or both; ``reject`` what lies outside before the update,
    out of every denominator, KL and entropy."""
    metric: MismatchMetric = "ratio"
    """The quantity that the bounds apply to."""
    low: float | None = None
    """Lower bound; null: none."""
    high: float | None = None
    """Upper bound; null: none."""
    only_negative: bool = False
    """Only where the advantage is negative."""
    policy: Literal["old", "current"] = "old"
    """Which policy of the trainer is compared with the engine: the one before the update or the current one."""
    normalize: bool = False
    """Divide the weights by their mean over the batch: over its tokens, or at the levels ``sequence`` and ``geometric``
    over its responses."""


@dataclass(frozen=True)
class CorrectionOptions:
    """Rules applied one after the other: weights multiply, masks intersect. Empty: no correction."""

    rules: tuple[CorrectionRule, ...] = ()
    # Keep the gradient out of the weights; matters only where old log-probs are the current policy's own.
    detach: bool = True
    function: str | None = None  # dotted path of the user's own correction, in place of rules

    @cached_property
    def rejections(self) -> tuple[CorrectionRule, ...]:
        """Rules that are applied to the whole batch before the update."""
        return tuple(rule for rule in self.rules if rule.action == "reject")

    @cached_property
    def normalized(self) -> tuple[CorrectionRule, ...]:
        """Rules whose weights have a mean of 1 over the whole batch."""
        return tuple(rule for rule in self.rules if rule.normalize)


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


def check_rule(rule: CorrectionRule, path: str, problems: Problems) -> None:
    """Keys of a rule against one another."""
    weighs = rule.action in ("truncate", "both")
    if weighs and rule.metric != "ratio":
        problems.add(f"{path}.metric", rule.metric, f"needs action: mask; {rule.action} weighs by the ratio", "ratio")
    if weighs and rule.level == "max":
        problems.add(f"{path}.level", rule.level, f"needs action: mask; {rule.action} has no weight there", "sequence")
    if rule.action == "reject" and rule.policy != "old":
        problems.add(f"{path}.policy", rule.policy, "needs action: mask; reject comes before the update", "old")
    if rule.action == "reject" and rule.only_negative:
        problems.add(f"{path}.only_negative", True, "needs action: mask; reject comes before the advantages", False)
    if rule.normalize and not weighs:
        problems.add(f"{path}.normalize", True, f"needs action: truncate or both; {rule.action} has no weights", False)
    elif rule.normalize and rule.policy != "old":
        text = "is not known before the update, when normalize takes the mean"
        problems.add(f"{path}.policy", rule.policy, text, "old")
    elif rule.normalize and rule.only_negative:
        text = "is not known when normalize takes the mean, which is before the advantages"
        problems.add(f"{path}.only_negative", True, text, False)
    if rule.low is not None and rule.high is not None and rule.low > rule.high:
        problems.add(f"{path}.low", rule.low, f"must not be greater than high {rule.high:g}", rule.high)


def parse_correction(value: object) -> Any:
    """The value unchanged.

    Raises:
        ValueError: as :func:`correction_options`.
    """
    correction_options(value)
    return value


def correction_options(value: object) -> CorrectionOptions:
    """The rules that a value of the key means; null: none. Raises ``ValueError``: neither a preset nor a dotted path,
    nor a list of rules, nor a section with ``is_weight`` and ``filters``; or a mistake inside one of them."""
    problems, rules = Problems(), list[CorrectionRule]()
    if value is None:
        return CorrectionOptions()
    if isinstance(value, str):
        if value in CORRECTION_PRESETS:
            return CORRECTION_PRESETS[value]
        if DOTTED_PATH.fullmatch(value):
            return CorrectionOptions(function=value)
        nearest = closest(value, CORRECTION_PRESETS)
        raise ValueError(
            f"must be one of the presets {', '.join(CORRECTION_PRESETS)}{f' (nearest: {nearest})' if nearest else ''}, "
            "the dotted path of your own function, a list of rules or a section"
        )
    if isinstance(value, list):
        for index, entry in enumerate(value):
            values = SchemaReader(problems).read(CorrectionRule, entry, f"[{index}]")
            if not problems.errors:
                rules.append(CorrectionRule(**values))
                check_rule(rules[-1], f"[{index}]", problems)
        options = CorrectionOptions(tuple(rules))
    elif isinstance(value, Mapping):
        # ROLL's spelling: importance weights that are truncated, and masks by ratio or by difference of probabilities.
        read = build(CorrectionConfig, SchemaReader(problems).read(CorrectionConfig, value, ""))
        weight = read.is_weight
        if weight.enabled:
            rules.append(CorrectionRule(weight.weight_type, "truncate", high=weight.upper_bound))
        for one in read.filters:
            if one.enabled and one.ratio_enabled:
                rules.append(CorrectionRule(one.agg_type, "mask", "ratio", one.ratio_low, one.ratio_high))
            if one.enabled and one.diff_enabled:
                rules.append(CorrectionRule(one.agg_type, "mask", "prob_diff", one.diff_low, one.diff_high))
        options = CorrectionOptions(tuple(rules), detach=weight.detach)
    else:
        raise ValueError("must be a preset's name, a list of rules or a section")
    if problems.errors:
        raise ValueError("; ".join(str(problem) for problem in problems.errors))
    return options
