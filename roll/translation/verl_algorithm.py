"""verl's keys of the algorithm; :mod:`roll.translation.algorithms` says what follows from them."""

from __future__ import annotations

from typing import Any

from roll.translation.algorithms import named
from roll.translation.rules import Rule, Section, number, one_of, refused, truth, whole
from roll.translation.verl_roles import ACTOR_KEYS

ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
OTHER_ESTIMATORS = {
    "grpo_passk": "only the best response of a group has an advantage there, its reward minus the second best "
    "(2503.19595); pass@k is another estimator (2508.10751)",
    "gpg": "it is scaled by responses / responses whose reward is not 0 there, here as in its paper by responses / "
    "responses in groups with a signal; grpo with algorithm.norm_adv_by_std_in_grpo=False is the same without a scale",
    "gdpo": "the sum is whitened over tokens there, here as in its paper over responses",
}
"""Why the others are refused."""
KL_TYPES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_TYPES |= {f"{theirs}+": ours if ours == "k2" else f"{ours}+" for theirs, ours in KL_TYPES.items()}
OTHER_KL_TYPES = {"full": "it is not implemented in verl either"}
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "clip-cov": "clip_cov",
    "kl_cov": "kl_cov",
    "kl-cov": "kl_cov",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "vanilla",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
AGGREGATIONS = {
    mode: mode
    for mode in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
}
LOSS, CORRECTION = f"{ACTOR_KEYS}.policy_loss", "algorithm.rollout_correction"
NULLS = (None, "null", "none", "None", "")
FACTS: dict[str, Any] = {
    "dual_names": ("vanilla",),
    "sequence_mean_losses": ("gspo_token", "gmpo", "sapo"),
}
"""What its losses do whatever the keys say: bound negative advantages, take the mean over responses."""


def nullable(value: Any) -> Any:
    """Null in its spellings."""
    return None if value in NULLS else value


def _level(value: Any) -> Any:
    return None if value in (*NULLS, False) else named({"token": "token", "sequence": "sequence"})(value)


def _computed(theirs: str, ours: tuple[str, ...], fact: str, value: Any = None, note: str = "") -> Rule:
    return Rule(theirs, ours, note, value or number, fact, computed=True)


def _advantages() -> tuple[Rule, ...]:
    """Advantages and KL."""
    return (
        Rule(
            "algorithm.adv_estimator",
            ("adv_estimator", "whiten_advantages"),
            "`gae` whitens advantages there, so `whiten_advantages` too",
            named(ESTIMATORS, OTHER_ESTIMATORS),
            "estimator",
            computed=True,
            about="gae",
        ),
        _computed(
            "algorithm.norm_adv_by_std_in_grpo",
            ("norm_std_type",),
            "grpo_std",
            truth,
            "with `grpo`; true: group; false: null (Dr. GRPO)",
        ),
        _computed("algorithm.gamma", ("gamma",), "gamma", note="`gae` and `reinforce_plus_plus` alone discount there"),
        _computed("algorithm.lam", ("lambd",), "lam", note="with `gae`"),
        _computed(
            "algorithm.use_kl_in_reward",
            ("add_token_level_kl",),
            "kl_in_reward",
            truth,
            "not with `grpo` and `reinforce_plus_plus_baseline`, which compare rewards with the KL inside there",
        ),
        _computed("algorithm.kl_penalty", ("kl_penalty",), "reward_kl_type", named(KL_TYPES, OTHER_KL_TYPES)),
        _computed("algorithm.kl_ctrl.kl_coef", ("init_kl_coef",), "reward_kl_coef", note="with `use_kl_in_reward`"),
        _computed(
            "algorithm.kl_ctrl.type",
            ("target_kl",),
            "kl_control",
            one_of({"fixed": "fixed", "adaptive": "adaptive"}),
            "`fixed`: no `target_kl`",
        ),
        _computed("algorithm.kl_ctrl.target_kl", ("target_kl",), "target_kl", note="with `type: adaptive`"),
        _computed("algorithm.kl_ctrl.horizon", ("kl_horizon",), "kl_horizon", whole, "with `type: adaptive`"),
        _computed(f"{ACTOR_KEYS}.use_kl_loss", ("use_kl_loss",), "kl_loss", truth),
        _computed(f"{ACTOR_KEYS}.kl_loss_coef", ("kl_loss_coef",), "kl_loss_coef", note="counts with `use_kl_loss`"),
        _computed(f"{ACTOR_KEYS}.kl_loss_type", ("kl_loss_type",), "kl_loss_type", named(KL_TYPES, OTHER_KL_TYPES)),
        Rule(
            "algorithm.use_pf_ppo",
            note="no resampling by score",
            value=refused("resampling by score (PF-PPO) is not available", False),
        ),
    )


def _losses() -> tuple[Rule, ...]:
    """Policy loss with its options, aggregation, and the critic's."""
    return (
        Rule(
            f"{LOSS}.loss_mode",
            ("pg_variant",),
            "`vanilla` is `ppo` with the dual clip, `gspo` is `gspo_token`, `geo_mean` is `gmpo`",
            named(LOSSES),
            "loss",
            computed=True,
        ),
        _computed(
            f"{ACTOR_KEYS}.clip_ratio",
            (),
            "clip",
            note="verl's losses read `clip_ratio_low` and `clip_ratio_high`, which are 0.2 in its files",
        ),
        *(
            _computed(
                f"{ACTOR_KEYS}.clip_ratio_{side}",
                (
                    f"pg_clip_{side}",
                    "use_pg_clip_range",
                    f"cispo_epsilon_{side}",
                    f"gmpo_clip_{side}",
                    "dppo_threshold",
                ),
                f"clip_{side}",
                note="the range of the loss that is used",
            )
            for side in ("low", "high")
        ),
        _computed(
            f"{ACTOR_KEYS}.clip_ratio_c",
            ("dual_clip_loss", "dual_clip_coef", "dppo_ratio_bound"),
            "dual_clip",
            note="verl's `vanilla` always bounds the loss of negative advantages, at 3.0 unless written",
        ),
        _computed(f"{ACTOR_KEYS}.tau_pos", ("sapo_tau_pos",), "tau_pos", note="with `sapo`"),
        _computed(f"{ACTOR_KEYS}.tau_neg", ("sapo_tau_neg",), "tau_neg", note="with `sapo`"),
        _computed(f"{LOSS}.clip_cov_ratio", ("clip_cov_ratio",), "clip_cov_ratio", note="with `clip_cov`"),
        _computed(f"{LOSS}.clip_cov_lb", ("clip_cov_low",), "clip_cov_low", note="with `clip_cov`"),
        _computed(f"{LOSS}.clip_cov_ub", ("clip_cov_high",), "clip_cov_high", note="with `clip_cov`"),
        _computed(f"{LOSS}.kl_cov_ratio", ("kl_cov_ratio",), "kl_cov_ratio", note="with `kl_cov`"),
        _computed(f"{LOSS}.ppo_kl_coef", ("kl_cov_coef",), "kl_cov_coef", note="with `kl_cov`"),
        _computed(
            f"{ACTOR_KEYS}.loss_agg_mode",
            ("loss_agg_mode", "kl_loss_agg_mode", "entropy_loss_agg_mode", "value_loss_agg_mode"),
            "aggregation",
            one_of(AGGREGATIONS),
            "`gspo`, `sapo` and `geo_mean` take the mean over responses whatever it says; it still counts for KL, "
            "entropy and the critic",
        ),
        _computed(
            f"{ACTOR_KEYS}.loss_scale_factor",
            ("loss_norm_length",),
            "norm_length",
            lambda value: None if value is None else whole(value),
            "null: the longest response",
        ),
        _computed(f"{ACTOR_KEYS}.entropy_coeff", ("entropy_loss_coef",), "entropy_coef"),
        _computed(f"{ACTOR_KEYS}.ppo_epochs", ("ppo_epochs",), "passes", whole),
        _computed("critic.ppo_epochs", ("ppo_epochs",), "passes.critic", whole, "one number for both roles"),
        _computed("critic.cliprange_value", ("value_clip",), "value_clip"),
        _computed(
            "critic.loss_agg_mode",
            ("value_loss_agg_mode",),
            "value_aggregation",
            one_of(AGGREGATIONS),
            "unwritten: the actor's",
        ),
        Rule(
            "critic.enable",
            note="the critic runs where `adv_estimator` is `gae`",
            fact="critic",
            computed=True,
            value=lambda value: None if value is None else truth(value),
        ),
    )


def _sampling() -> tuple[Rule, ...]:
    """Corrections, dynamic sampling, over-long responses."""
    weights = ("train_infer_correction",)
    buffers = ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg")
    buffer = {
        key: " ".join(f"{section}.{key}" for section in (*buffers, "reward_model.overlong_buffer"))
        for key in ("enable", "len", "penalty_factor", "log")
    }
    return (
        _computed(
            f"{CORRECTION}.rollout_is",
            weights,
            "is_level",
            _level,
            "`token` or `sequence`: weights of the engine's mismatch, truncated, or 0 outside a band (`0.5_5.0`: "
            "IcePop)",
        ),
        _computed(f"{CORRECTION}.rollout_is_threshold", weights, "is_bound", lambda value: value, "with `rollout_is`"),
        Rule(
            f"{CORRECTION}.rollout_is_batch_normalize",
            note="weights are not normalised",
            value=refused("weights with a mean of 1 over the batch are not available", False, *NULLS),
        ),
        _computed(
            f"{CORRECTION}.rollout_rs",
            (),
            "rejection",
            nullable,
            "refused: what is rejected leaves the denominators too, which masks here do not change",
        ),
        Rule(f"{CORRECTION}.rollout_rs_threshold", note="counts with `rollout_rs`"),
        _computed(
            f"{CORRECTION}.bypass_mode",
            ("force_disable_old_logprobs_recompute",),
            "bypass",
            truth,
            "the engine's log-probs stand in for the old ones",
        ),
        _computed(
            f"{CORRECTION}.loss_type",
            ("pg_variant", *weights),
            "bypass_loss",
            one_of({"ppo_clip": "ppo_clip", "reinforce": "reinforce"}),
            "with `bypass_mode`; `reinforce` is `vanilla` with weights of the current policy",
        ),
        _computed(f"{ACTOR_KEYS}.tis_imp_ratio_cap", weights, "actor_tis_cap", note="older name; -1: no correction"),
        _computed(
            "algorithm.filter_groups.enable",
            ("rewards.<name>.query_filter_config.type",),
            "filter_on",
            truth,
            "`std_filter`: groups whose scores are all the same are replaced",
        ),
        _computed(
            "algorithm.filter_groups.metric",
            (),
            "filter_metric",
            lambda value: value,
            "groups are judged by their scores, without punishment and KL",
        ),
        _computed(
            "algorithm.filter_groups.max_num_gen_batches",
            (),
            "filter_limit",
            whole,
            "changes no gradient: a run asks until its groups are full",
        ),
        _computed(buffer["enable"], ("overlong_buffer_length",), "overlong_on", truth, "with reward manager `dapo`"),
        _computed(buffer["len"], ("overlong_buffer_length",), "overlong_len", whole),
        _computed(
            buffer["penalty_factor"],
            ("overlong_penalty_factor",),
            "overlong_factor",
            note="halved for DAPO's own data, which is scored with -1 and 1 there, with 0 and 1 here",
        ),
        Rule(buffer["log"], note="`critic/overlong_penalty` is always logged"),
        _computed(
            "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len",
            (),
            "max_response",
            whole,
            "must be the longest response",
        ),
        _computed(
            "reward_model.reward_manager reward.reward_manager.name",
            (),
            "reward_manager",
            one_of({name: name for name in ("naive", "dapo", "prime", "batch")}),
            "rewards are scored concurrently; `dapo` adds the over-long buffer",
        ),
    )


ALGORITHM = Section("Algorithm", (*_advantages(), *_losses(), *_sampling()))
DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("algorithm.adv_estimator", "gae"),
    ("algorithm.norm_adv_by_std_in_grpo", True),
    ("algorithm.gamma", 1.0),
    ("algorithm.lam", 1.0),
    ("algorithm.use_kl_in_reward", False),
    ("algorithm.kl_penalty", "kl"),
    ("algorithm.kl_ctrl.type", "fixed"),
    ("algorithm.kl_ctrl.kl_coef", 0.001),
    ("algorithm.kl_ctrl.target_kl", 0.1),
    ("algorithm.kl_ctrl.horizon", 10000),
    (f"{ACTOR_KEYS}.use_kl_loss", False),
    (f"{ACTOR_KEYS}.kl_loss_coef", 0.001),
    (f"{ACTOR_KEYS}.kl_loss_type", "low_var_kl"),
    (f"{LOSS}.loss_mode", "vanilla"),
    (f"{ACTOR_KEYS}.clip_ratio_low", 0.2),
    (f"{ACTOR_KEYS}.clip_ratio_high", 0.2),
    (f"{ACTOR_KEYS}.clip_ratio_c", 3.0),
    (f"{ACTOR_KEYS}.tau_pos", 1.0),
    (f"{ACTOR_KEYS}.tau_neg", 1.05),
    (f"{LOSS}.clip_cov_ratio", 0.0002),
    (f"{LOSS}.clip_cov_lb", 1.0),
    (f"{LOSS}.clip_cov_ub", 5.0),
    (f"{LOSS}.kl_cov_ratio", 0.0002),
    (f"{LOSS}.ppo_kl_coef", 0.1),
    (f"{ACTOR_KEYS}.loss_agg_mode", "token-mean"),
    (f"{ACTOR_KEYS}.entropy_coeff", 0.0),
    (f"{ACTOR_KEYS}.ppo_epochs", 1),
    ("critic.cliprange_value", 0.5),
    (f"{CORRECTION}.rollout_is_threshold", 2.0),
    (f"{CORRECTION}.loss_type", "ppo_clip"),
    ("reward_model.reward_manager", "naive"),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", 1.0),
)
"""Of the algorithm."""
