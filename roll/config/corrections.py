"""``train_infer_correction``: its three spellings, checked; the value itself stays as written.

:func:`roll.algorithms.corrections.correction_options` gives it its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.errors import Problems
from roll.config.fields import DOTTED_PATH, setting
from roll.config.names import CORRECTION_PRESETS
from roll.config.schema import SchemaReader, closest

Level = Literal["token", "segment", "geometric", "sequence"]
RuleLevel = Literal["token", "segment", "geometric", "sequence", "max"]


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
class CorrectionRuleConfig:
    """An entry of the list form of ``train_infer_correction``."""

    level: RuleLevel = "token"
    """Level at which trainer and engine are compared."""
    action: Literal["truncate", "mask", "both"] = "truncate"
    """Weigh by the ratio, mask what lies outside the bounds, or both."""
    metric: Literal["ratio", "log_diff", "prob_diff", "k1", "k2", "k3"] = "ratio"
    """What the bounds speak of."""
    low: float | None = None
    """Lower bound; null: none."""
    high: float | None = None
    """Upper bound; null: none."""
    only_negative: bool = False
    """Only where the advantage is negative."""
    policy: Literal["old", "current"] = "old"
    """Which policy of the trainer is compared with the engine: the one before the update or the current one."""


def check_rule(rule: CorrectionRuleConfig, path: str, problems: Problems) -> None:
    """Keys of a rule against one another."""
    if rule.action != "mask" and rule.metric != "ratio":
        problems.add(f"{path}.metric", rule.metric, f"needs action: mask; {rule.action} weighs by the ratio", "ratio")
    if rule.action != "mask" and rule.level == "max":
        problems.add(f"{path}.level", rule.level, f"needs action: mask; {rule.action} has no weight there", "sequence")
    if rule.low is not None and rule.high is not None and rule.low > rule.high:
        problems.add(f"{path}.low", rule.low, f"must not be greater than high {rule.high:g}", rule.high)


def parse_correction(value: Any) -> Any:
    """The value unchanged.

    Raises:
        ValueError: neither a preset nor a dotted path, nor a list of rules, nor a section with ``is_weight`` and
            ``filters``; or a mistake inside one of them.
    """
    problems = Problems()
    reader = SchemaReader(problems)
    if isinstance(value, str):
        if value not in CORRECTION_PRESETS and not DOTTED_PATH.fullmatch(value):
            nearest = closest(value, CORRECTION_PRESETS)
            meant = f" (nearest: {nearest})" if nearest else ""
            presets = ", ".join(CORRECTION_PRESETS)
            raise ValueError(
                f"must be one of the presets {presets}{meant}, the dotted path of your own function, a list of rules "
                "or a section"
            )
    elif isinstance(value, list):
        for index, rule in enumerate(value):
            values = reader.read(CorrectionRuleConfig, rule, f"[{index}]")
            if not problems.errors:
                check_rule(CorrectionRuleConfig(**values), f"[{index}]", problems)
    elif isinstance(value, Mapping):
        reader.read(CorrectionConfig, value, "")
        for index, entry in enumerate(value.get("filters") or []):
            reader.read(MismatchFilterConfig, entry, f"filters[{index}]")
    else:
        raise ValueError("must be a preset's name, a list of rules or a section")
    if problems.errors:
        raise ValueError("; ".join(str(problem) for problem in problems.errors))
    return value
