"""The algorithm's keys: advantages, policy loss, KL, masks, and the correction of the engine's probabilities.

Options of estimators and policy losses are in :mod:`roll.config.choices`. ``train_infer_correction`` says what to do
about an engine whose probabilities differ from the trainer's: a correction is a list of rules; a rule is level x action
x metric x bounds. The key has four spellings: the name of a preset, the dotted path of a function, a list of rules, and
ROLL's section with ``is_weight`` and ``filters``. :mod:`roll.algorithms.losses` applies the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES, GaeOptions, PpoOptions
from roll.config.reading.errors import Problems, closest
from roll.config.reading.fields import DOTTED_PATH, Choice, rules, setting
from roll.config.reading.schema import SchemaReader, build

Level = Literal["token", "segment", "geometric", "sequence"]
RuleLevel = Literal[Level, "max"]
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
    problems, found = Problems(), list[CorrectionRule]()
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
                found.append(CorrectionRule(**values))
                check_rule(found[-1], f"[{index}]", problems)
        options = CorrectionOptions(tuple(found))
    elif isinstance(value, Mapping):
        # ROLL's spelling: importance weights that are truncated, and masks by ratio or by difference of probabilities.
        read = build(CorrectionConfig, SchemaReader(problems).read(CorrectionConfig, value, ""))
        weight = read.is_weight
        if weight.enabled:
            found.append(CorrectionRule(weight.weight_type, "truncate", high=weight.upper_bound))
        for one in read.filters:
            if one.enabled and one.ratio_enabled:
                found.append(CorrectionRule(one.agg_type, "mask", "ratio", one.ratio_low, one.ratio_high))
            if one.enabled and one.diff_enabled:
                found.append(CorrectionRule(one.agg_type, "mask", "prob_diff", one.diff_low, one.diff_high))
        options = CorrectionOptions(tuple(found), detach=weight.detach)
    else:
        raise ValueError("must be a preset's name, a list of rules or a section")
    if problems.errors:
        raise ValueError("; ".join(str(problem) for problem in problems.errors))
    return options


# Estimators of the KL, which are those of `roll.algorithms.kl`.
KL_PENALTIES = (
    *("kl", "k1", "k2", "k3", "abs", "mse", "low_var_kl"),
    *("k1+", "kl+", "abs+", "k3+", "low_var_kl+", "full"),
)
LOSS_AGG_MODES = (
    *("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    *("prompt-mean", "token-sum"),
)
NORM_TYPES = ("batch", "group", "running")

ESTIMATOR = rules(
    table=ADV_ESTIMATORS,
    choices=ADV_ESTIMATORS,
    dotted_path=True,
    plugins="estimators",
    aliases=("adv_estimator",),
    example="grpo",
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The algorithm's keys, at the top of an RLVR configuration."""

    pretrain: str = ""
    """Model that the policy and the reference start from: a folder, a GGUF file or a hub name."""
    reward_pretrain: str | None = None
    """Model that the critic starts from; null: ``pretrain``."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes over a rollout batch."""
    shuffle_mini_batches: bool = False
    """Shuffle the samples before every pass; false: mini-batches of consecutive samples, the same in every pass."""
    estimator: Choice = field(default=Choice("gae", GaeOptions()), metadata=ESTIMATOR)
    """Advantage estimator: its name, or a section with ``name`` and the options that it has: ``gae`` (needs a critic),
    ``grpo``, ``reinforce``, ``reinforce++``, ``rloo`` ..."""
    loss: Choice = setting(
        Choice("ppo", PpoOptions()),
        table=POLICY_LOSSES,
        choices=POLICY_LOSSES,
        dotted_path=True,
        plugins="losses",
        aliases=("pg_variant",),
    )
    """Policy loss: its name, or a section with ``name`` and the options that it has."""
    value_clip: float | None = setting(None, gt=0, read_if={"critic": ()})
    """Clip range of the critic's new values around the old ones; null: not clipped."""
    loss_agg_mode: str = setting("seq-mean-token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
    """Aggregation of token losses to one number. Denominators are always those of the whole optimizer step."""
    kl_loss_agg_mode: str | None = setting(
        None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean", read_if={"use_kl_loss": (True,)}
    )
    """The same for the KL in the loss; null: ``loss_agg_mode``."""
    entropy_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the entropy bonus; null: ``loss_agg_mode``."""
    value_loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES, dotted_path=True, read_if={"critic": ()})
    """The same for the critic's loss."""
    loss_norm_length: int | None = setting(None, ge=1)
    """Tokens that ``seq-mean-token-sum-norm`` divides by; null: the longest response."""
    rl_loss_coef: float = setting(1.0, ge=0)
    """Weight of the policy loss."""
    entropy_loss_coef: float = setting(0.0, ge=0)
    """Weight of the entropy bonus."""
    log_entropy: bool = True
    """Report the policy's entropy also where no bonus needs it; costs a part of the forward pass."""
    target_entropy: float | None = setting(None, ge=0, example=0.2)
    """Entropy in nats a token below which the bonus acts: its weight begins at ``entropy_loss_coef``, grows by
    0.005 with every step below and falls with every step above, where the bonus is off. null: a fixed weight."""
    use_kl_loss: bool = setting(False, read_if={"kl_loss_coef": ()})
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.0, ge=0, read_if={"use_kl_loss": (True,)})
    """Weight of that KL."""
    kl_loss_type: str = setting("k3", choices=KL_PENALTIES, dotted_path=True, read_if={"use_kl_loss": (True,)})
    """Estimator of that KL."""
    kl_loss_clamp: float | None = setting(10.0, gt=0, read_if={"use_kl_loss": (True,), "kl_loss_type": ("k3",)})
    """Bound of the ``k3`` estimate in the loss; null: none."""
    kl_loss_importance_weighted: bool = setting(False, read_if={"use_kl_loss": (True,)})
    """Weigh that estimate by the policy's ratio: unbiased after the first update of a batch."""
    add_token_level_kl: bool = setting(False, read_if={"init_kl_coef": ()})
    """Subtract the KL to the reference policy from the reward, token by token."""
    kl_penalty: str = setting("kl", choices=KL_PENALTIES, dotted_path=True, read_if={"reference": ()})
    """Estimator of the KL in the reward."""
    init_kl_coef: float = setting(0.2, ge=0, read_if={"add_token_level_kl": (True,)})
    """Weight of the KL in the reward (its first value with an adaptive controller). Counts with
    ``add_token_level_kl`` only."""
    target_kl: float | None = setting(None, gt=0, read_if={"add_token_level_kl": (True,)})
    """KL that an adaptive controller aims at; null: the weight stays fixed."""
    kl_horizon: int = setting(10000, ge=1, read_if={"add_token_level_kl": (True,), "target_kl": ()})
    """Samples over which the adaptive controller acts."""
    enable_reference: bool = False
    """Compute reference log-probs for the metrics even when nothing else needs them."""
    reward_clip: float | None = setting(None, gt=0)
    """Response rewards are clipped to plus and minus this; null: not clipped."""
    norm_mean_type: str | None = setting("auto", choices=("auto", *NORM_TYPES), example="group")
    """Mean taken off the response rewards: over the ``batch``, the ``group`` of a prompt, ``running`` over steps, or
    null (none). ``auto``: what the estimator's paper asks for (``grpo``: group; most others: none)."""
    norm_std_type: str | None = setting("auto", choices=("auto", *NORM_TYPES), example="group")
    """Spread that response rewards are divided by: ``batch``, ``group``, ``running`` or null (none; with ``grpo``
    that is Dr. GRPO). ``auto``: what the estimator's paper asks for."""
    overlong_buffer_length: int | None = setting(None, ge=1)
    """DAPO's soft punishment: within so many tokens of the length limit the score falls, linearly, by up to
    ``overlong_penalty_factor``. null: none."""
    overlong_penalty_factor: float = setting(1.0, gt=0, read_if={"overlong_buffer_length": ()})
    """Penalty of a response at the length limit with ``overlong_buffer_length``."""
    whiten_rewards: bool = False
    """Bring token rewards to mean 0 and spread 1 over the batch."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and spread 1 over the response tokens of the batch."""
    advantage_clip: float | None = setting(None, gt=0)
    """Advantages are clipped to plus and minus this; null: not clipped."""
    critic_warmup: int = setting(0, ge=0, read_if={"critic": ()})
    """Steps in which only the critic learns."""
    enable_old_logprobs_recompute: bool = False
    """Compute the trainer's log-probs before the update even when nothing needs them."""
    force_disable_old_logprobs_recompute: bool = False
    """Never compute them: the engine's log-probs stand in for them, also with a single update a batch (there, a
    ``train_infer_correction`` compares the current policy with the engine)."""
    train_infer_correction: str | list[Any] | dict[str, Any] | None = setting(
        None, parse=parse_correction, example="tis"
    )
    """Correction for engine probabilities that differ from the trainer's: a preset's name, a list of rules, a section
    with ``is_weight`` and ``filters``, or the dotted path of your own function. null: measured only."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1, example=0.2)
    """Share of the response tokens, those of highest entropy before the update, that the policy loss uses; 1: all of
    them."""
    max_len_mask: bool = False
    """Leave responses that hit the length limit out of the loss."""
    difficulty_mask: bool = False
    """Leave out samples of prompts whose mean score lies outside the two thresholds."""
    difficulty_low_threshold: float = setting(0.0, ge=0, le=1, read_if={"difficulty_mask": (True,)})
    """Least mean score of a prompt that is kept."""
    difficulty_high_threshold: float = setting(1.0, ge=0, le=1, read_if={"difficulty_mask": (True,)})
    """Greatest mean score of a prompt that is kept."""
    error_max_len_clip: bool = False
    """Leave wrong responses that are longer than the threshold out of the loss."""
    error_max_len_threshold: int = setting(9999999999, ge=0, read_if={"error_max_len_clip": (True,)})
    """Length in tokens for ``error_max_len_clip``."""
    difficulty_loss_weight: bool = False
    """Weigh samples by the difficulty of their prompt."""
    length_loss_weight: bool = False
    """Weigh samples by the length of their response, short ones more."""
