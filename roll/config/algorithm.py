"""``train_infer_correction``: its three spellings, checked; the value itself stays as written.

:func:`roll.algorithms.corrections.correction_options` gives it its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.config.names import (
    ADV_ESTIMATORS,
    CORRECTION_PRESETS,
    DISCOUNTING_ESTIMATORS,
    KL_PENALTIES,
    LOSS_AGG_MODES,
    NORM_TYPES,
    PG_VARIANTS,
    PLANNED_ADV_ESTIMATORS,
    VALUE_LOSSES,
)
from roll.config.reading.errors import Problems
from roll.config.reading.fields import DOTTED_PATH, parse_dotted_path, rules, setting
from roll.config.reading.schema import SchemaReader, closest

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


SPELLINGS = {
    "gspo_token": ("gspo-token",),
    "raft++": ("raft_plus_plus", "raftpp"),
    "clip_cov": ("clip-cov",),
    "kl_cov": ("kl-cov",),
}
"""Other spellings of policy losses."""
CLIPPED = ("ppo", "gspo", "gspo_token", "clip_cov")
"""Policy losses that are PPO's clipped surrogate, with a dual clip where asked."""


def readers(*variants: str) -> dict[str, tuple[str, ...]]:
    """``read_if`` of a key that these policy losses read, in all their spellings."""
    return {"pg_variant": tuple(name for one in variants for name in (one, *SPELLINGS.get(one, ())))}


@dataclass(frozen=True)
class PolicyLossConfig:
    """Keys at the top of an RLVR configuration that belong to one ``pg_variant`` each."""

    tis_lower_bound: float = setting(0.0, ge=0, read_if=readers("tis"))
    """``tis``: least weight."""
    tis_upper_bound: float = setting(1.0, gt=0, read_if=readers("tis"))
    """``tis``: greatest weight."""
    cispo_epsilon_low: float = setting(0.1, ge=0, read_if=readers("cispo"))
    """``cispo``: weights are clipped at 1 - this from below."""
    cispo_epsilon_high: float = setting(0.1, ge=0, read_if=readers("cispo"))
    """``cispo``: weights are clipped at 1 + this from above."""
    cispo_unified_mask: bool = setting(False, read_if=readers("cispo"))
    """``cispo``: drop the tokens that PPO's clip would drop, and weigh the others by their ratio, instead of clipping
    the weight."""
    m2po_threshold: float = setting(0.04, gt=0, read_if=readers("m2po"))
    """``m2po``: greatest mean squared log-ratio of the tokens that stay; those of the largest are dropped."""
    m2po_all_tokens: bool = setting(False, read_if=readers("m2po"))
    """``m2po``: bound and drop all tokens, not only those whose update leads further from the policy that sampled."""
    vespo_k_pos: float = setting(2.0, ge=0, read_if=readers("vespo"))
    """``vespo``: how fast weights below 1 fall, for positive advantages."""
    vespo_lambda_pos: float = setting(3.0, ge=0, read_if=readers("vespo"))
    """``vespo``: how fast weights above 1 fall, for positive advantages."""
    vespo_k_neg: float = setting(3.0, ge=0, read_if=readers("vespo"))
    """``vespo``: how fast weights below 1 fall, for negative advantages."""
    vespo_lambda_neg: float = setting(2.0, ge=0, read_if=readers("vespo"))
    """``vespo``: how fast weights above 1 fall, for negative advantages."""
    topr_positive_weight: float = setting(1.0, ge=0, read_if=readers("topr"))
    """``topr``: weight of samples with positive reward."""
    topr_negative_weight: float = setting(1.0, ge=0, read_if=readers("topr"))
    """``topr``: weight of samples with negative reward."""
    topr_lower_bound: float = setting(0.0, ge=0, read_if=readers("topr"))
    """``topr``: least importance weight of negative samples."""
    topr_upper_bound: float = setting(1.0, gt=0, read_if=readers("topr"))
    """``topr``: greatest importance weight of negative samples."""
    kimi15_tau: float = setting(0.1, ge=0, read_if=readers("kimi15"))
    """``kimi15``: weight of the squared log-ratio."""
    sapo_tau_pos: float = setting(1.0, gt=0, read_if=readers("sapo"))
    """``sapo``: temperature of the gate for positive advantages."""
    sapo_tau_neg: float = setting(1.05, gt=0, read_if=readers("sapo"))
    """``sapo``: temperature of the gate for negative advantages."""
    gmpo_clip_low: float = setting(0.4, ge=0, read_if=readers("gmpo"))
    """``gmpo``: a token's ratio is at least exp(-this)."""
    gmpo_clip_high: float = setting(0.4, ge=0, read_if=readers("gmpo"))
    """``gmpo``: a token's ratio is at most exp(this)."""
    dro_tau: float = setting(0.1, gt=0, read_if=readers("dro"))
    """``dro``: strength of the regularisation."""
    dppo_divergence: Literal["tv", "kl"] = setting("tv", read_if=readers("dppo"))
    """``dppo``: total variation or KL of the sampled token's probability."""
    dppo_threshold: float = setting(0.15, gt=0, read_if=readers("dppo"))
    """``dppo``: tokens beyond it lose their gradient where the update would lead further away."""
    dppo_ratio_bound: float = setting(20.0, gt=0, read_if=readers("dppo"))
    """``dppo``: the weight is truncated here."""
    clip_cov_ratio: float = setting(2e-4, ge=0, le=1, read_if=readers("clip_cov"))
    """``clip_cov``: share of tokens that lose their gradient."""
    clip_cov_low: float = setting(1.0, read_if=readers("clip_cov"))
    """``clip_cov``: least covariance of these tokens."""
    clip_cov_high: float = setting(5.0, read_if=readers("clip_cov"))
    """``clip_cov``: greatest covariance of these tokens."""
    kl_cov_ratio: float = setting(2e-3, ge=0, le=1, read_if=readers("kl_cov"))
    """``kl_cov``: share of tokens that get the KL penalty."""
    kl_cov_coef: float = setting(1.0, ge=0, read_if=readers("kl_cov"))
    """``kl_cov``: weight of that penalty."""


@dataclass(frozen=True)
class PPOConfig(PolicyLossConfig):
    """The algorithm's keys, at the top of an RLVR configuration."""

    pretrain: str = ""
    """Model that the policy and the reference start from: a folder or a hub name."""
    reward_pretrain: str | None = None
    """Model that the critic starts from; null: ``pretrain``."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes over a rollout batch."""
    shuffle_mini_batches: bool = False
    """Draw the samples of each mini-batch anew in every pass; false: consecutive samples, the same in every pass."""
    adv_estimator: str = setting(
        "gae", choices=ADV_ESTIMATORS, planned=PLANNED_ADV_ESTIMATORS, dotted_path=True, example="grpo"
    )
    """Advantage estimator: ``gae`` (needs a critic), ``grpo``, ``reinforce``, ``reinforce++``, ``rloo`` ..."""
    pg_variant: str = setting("ppo", choices=PG_VARIANTS, dotted_path=True)
    """Policy loss; ``actor_train.pg_variant`` counts where it is set."""
    pg_variant_args: dict[str, Any] = field(default_factory=dict)
    """Options of a policy loss of your own: the fields of its options class that are no keys here."""
    adv_estimator_args: dict[str, Any] = field(default_factory=dict)
    """Options of an advantage estimator of your own: ``options.adv_estimator_args`` of the function."""
    gamma: float = setting(1.0, ge=0, le=1, read_if={"adv_estimator": DISCOUNTING_ESTIMATORS})
    """Discount of later rewards."""
    lambd: float = setting(0.95, ge=0, le=1, read_if={"adv_estimator": ("gae",)})
    """GAE's lambda."""
    pg_clip: float = setting(0.2, ge=0, example=0.2, read_if=readers(*CLIPPED, "raft++"))
    """Clip range of the probability ratio, on both sides."""
    use_pg_clip_range: bool = setting(False, read_if=readers(*CLIPPED, "raft++"))
    """Clip with ``pg_clip_low`` and ``pg_clip_high`` instead of ``pg_clip``."""
    pg_clip_low: float = setting(0.2, ge=0, le=1, read_if={**readers(*CLIPPED, "raft++"), "use_pg_clip_range": (True,)})
    """Ratios are clipped at 1 - this from below."""
    pg_clip_high: float = setting(0.2, ge=0, read_if={**readers(*CLIPPED, "raft++"), "use_pg_clip_range": (True,)})
    """Ratios are clipped at 1 + this from above."""
    dual_clip_loss: bool = setting(False, read_if=readers(*CLIPPED))
    """Bound the loss of negative advantages (dual clip)."""
    dual_clip_coef: float | None = setting(None, gt=1, read_if={**readers(*CLIPPED), "dual_clip_loss": (True,)})
    """The dual clip's bound; null: 1 + 2 x ``pg_clip`` (3.0 in the paper)."""
    value_clip: float | None = setting(None, gt=0, read_if={"critic": ()})
    """Clip range of the critic's new values around the old ones; null: not clipped."""
    importance_sampling: Literal["token", "segment", "seq"] = setting("token", read_if=readers("ppo", "clip_cov"))
    """Level of the probability ratio; ``seq`` is GSPO."""
    value_loss_type: str = setting("mse", choices=VALUE_LOSSES, dotted_path=True, read_if={"critic": ()})
    """The critic's error: half its square, or the Huber loss."""
    loss_agg_mode: str = setting("seq-mean-token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
    """How token losses become one number. Denominators are always those of the whole optimizer step."""
    kl_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the KL in the loss; null: ``loss_agg_mode``."""
    entropy_loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES, dotted_path=True, example="token-mean")
    """The same for the entropy bonus; null: ``loss_agg_mode``."""
    value_loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES, dotted_path=True)
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
    ``entropy_coef_delta`` with every step below the target and falls with every step above it, where the bonus is off.
    null: the weight stays fixed."""
    entropy_coef_delta: float = setting(0.005, gt=0)
    """Change of that weight in a step."""
    entropy_coef_max: float | None = setting(None, gt=0)
    """Greatest value of that weight; null: none."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = setting(0.0, ge=0, read_if={"use_kl_loss": (True,)})
    """Weight of that KL."""
    kl_loss_type: str = setting("k3", choices=KL_PENALTIES, dotted_path=True, read_if={"use_kl_loss": (True,)})
    """Estimator of that KL."""
    kl_loss_clamp: float | None = setting(10.0, gt=0, read_if={"use_kl_loss": (True,), "kl_loss_type": ("k3",)})
    """Bound of the ``k3`` estimate in the loss; null: none."""
    kl_loss_importance_weighted: bool = setting(False, read_if={"use_kl_loss": (True,)})
    """Weigh that estimate by the policy's ratio: unbiased after the first update of a batch."""
    add_token_level_kl: bool = False
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
    pass_k: int = setting(4, ge=1, read_if={"adv_estimator": ("pass@k", "pass_at_k")})
    """``pass@k``: the k, less than ``num_return_sequences_in_group``. Right is a raw score of 1 or more."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """``gdpo``: the rewards to normalise apart, with their weights. Names are those of the numbers that the reward
    returns in addition to its score (``reward/<domain>/<name>`` in the log), or ``score`` for the score itself."""
    overlong_buffer_length: int | None = setting(None, ge=1)
    """DAPO's soft punishment: within so many tokens of the length limit the score falls, linearly, by up to
    ``overlong_penalty_factor``. null: none."""
    overlong_penalty_factor: float = setting(1.0, gt=0, read_if={"overlong_buffer_length": ()})
    """What a response at the length limit loses with ``overlong_buffer_length``."""
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
    """Never compute them: the engine's log-probs stand in for them, also where there is a single update a batch (there,
    a ``train_infer_correction`` compares the current policy with the engine instead)."""
    train_infer_correction: str | list[Any] | dict[str, Any] | None = field(
        default=None, metadata=rules(parse=parse_correction, example="tis")
    )
    """Correct for engine probabilities that differ from the trainer's: a preset's name, a list of rules, a section with
    ``is_weight`` and ``filters``, or the dotted path of your own function. null: measured, not corrected."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1, example=0.2)
    """Share of the response tokens, those of highest entropy before the update, that the policy loss uses; the others
    count as 0. 1: all of them."""
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
    sample_weighting: str | None = field(default=None, metadata=rules(parse=parse_dotted_path, example="~"))
    """Dotted path of your own function of scores, lengths and groups that gives each sample its weight."""
