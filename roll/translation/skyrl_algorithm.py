"""SkyRL's keys of the algorithm; :mod:`roll.translation.algorithms` says what follows from them.

Its two packages differ in what a mask of the off-policy correction does to the denominators, and in two losses.
"""

from __future__ import annotations

from typing import Any

from roll.translation.algorithms import named
from roll.translation.rules import Rule, Section, number, one_of, refused, truth, whole

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
ESTIMATORS = {name: name for name in ("grpo", "gae", "rloo", "reinforce++", "maxrl")}
KL_TYPES = {name: name for name in ("k1", "k2", "k3", "abs")}
LOSSES = {
    "regular": "ppo",
    "dual_clip": "ppo",
    "gspo": "gspo_token",
    "cispo": "cispo",
    "sapo": "sapo",
}
COVARIANCE_LOSSES = {"clip_cov": "clip_cov", "kl_cov": "kl_cov"}
ENGINE_LOSS = "its ratio is taken to the engine's log-probs"
OTHER_LOSSES = {
    "rollout_is": ENGINE_LOSS,
    "dppo": f"{ENGINE_LOSS} and not truncated",
    "cross_entropy": "it learns from demonstrations",
    "importance_sampling": "it is a sum over tokens without a mean",
}
SCALED = "this version divides advantages by the number of tokens first, "
OLDER_HAS_IT = "; `--from skyrl_train` has it"
OTHER_LOSSES_OF_NEWER = {
    "clip_cov": f"{SCALED}so that no covariance lies within the bounds{OLDER_HAS_IT}",
    "kl_cov": f"{SCALED}but not the penalty, which stays a sum over tokens{OLDER_HAS_IT}",
}
REDUCTIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}
OTHER_REDUCTIONS = {
    "token_mean_legacy": "it depends on how a batch is split into micro-batches",
}
FACTS: dict[str, Any] = {
    "dual_names": ("dual_clip",),
    "kl_aggregation": "seq-mean-token-mean",
    "entropy_aggregation": "token-mean",
    "value_aggregation": "seq-mean-token-mean",
    "one_kl_coef": True,
    "norm_is_sequence": True,
}
"""KL and value are means over responses, the entropy one over tokens, whatever ``loss_reduction`` says; one weight of
the KL serves loss and reward; the length that sums are divided by contains the prompt."""


def _computed(theirs: str, ours: tuple[str, ...], fact: str, value: Any = None, note: str = "") -> Rule:
    return Rule(theirs, ours, note, value or number, fact, computed=True)


def _advantages() -> tuple[Rule, ...]:
    return (
        Rule(
            f"{ALGORITHM}.advantage_estimator",
            ("adv_estimator", "whiten_advantages"),
            "`gae` whitens advantages there, so `whiten_advantages` too",
            named(ESTIMATORS),
            "estimator",
            computed=True,
            about="gae",
        ),
        _computed(
            f"{ALGORITHM}.grpo_norm_by_std",
            ("norm_std_type",),
            "grpo_std",
            truth,
            "with `grpo`; true: group; false: null (Dr. GRPO)",
        ),
        Rule(
            f"{ALGORITHM}.advantage_batch_normalize",
            note="`whiten_advantages` is another formula",
            value=refused(
                "divides by the biased spread there, in most versions around a mean over the padding too; "
                "whiten_advantages does neither",
                False,
            ),
        ),
        _computed(f"{ALGORITHM}.gamma", ("gamma",), "gamma", note="`gae` and `reinforce++` alone discount there"),
        _computed(f"{ALGORITHM}.lambd", ("lambd",), "lam", note="with `gae`"),
    )


def _kl() -> tuple[Rule, ...]:
    return (
        _computed(
            f"{ALGORITHM}.use_kl_loss",
            ("use_kl_loss", "kl_loss_agg_mode"),
            "kl_loss",
            truth,
            "that term is a mean over responses there, whatever `loss_reduction` says: `kl_loss_agg_mode`",
        ),
        _computed(
            f"{ALGORITHM}.kl_loss_coef",
            ("kl_loss_coef", "init_kl_coef"),
            "kl_loss_coef",
            note="of the KL where it is used: in the loss (`kl_loss_coef`) or in the reward (`init_kl_coef`)",
        ),
        _computed(
            f"{ALGORITHM}.use_kl_in_reward",
            ("add_token_level_kl",),
            "kl_in_reward",
            truth,
            "not with `grpo`, which compares rewards with the KL inside there",
        ),
        _computed(f"{ALGORITHM}.init_kl_coef", ("init_kl_coef",), "reward_kl_coef", note="oldest versions"),
        _computed(
            f"{ALGORITHM}.kl_estimator_type",
            ("kl_loss_type", "kl_penalty"),
            "kl_type",
            named(KL_TYPES),
            "of both places",
        ),
        _computed(
            f"{ALGORITHM}.use_kl_estimator_k3",
            ("kl_loss_type", "kl_penalty"),
            "kl_type",
            lambda value: "k3" if truth(value) else "k1",
            "older name; true: `k3`; false: `k1`",
        ),
        Rule(f"{ALGORITHM}.use_abs_kl", note="no", value=refused("write kl_estimator_type=abs", False)),
        _computed(
            f"{ALGORITHM}.kl_ctrl.type",
            ("target_kl",),
            "kl_control",
            one_of({"fixed": "fixed", "adaptive": "adaptive"}),
            "`fixed`: no `target_kl`",
        ),
        _computed(f"{ALGORITHM}.kl_ctrl.kl_target", ("target_kl",), "target_kl", note="with `type: adaptive`"),
        _computed(f"{ALGORITHM}.kl_ctrl.horizon", ("kl_horizon",), "kl_horizon", whole, "with `type: adaptive`"),
        Rule(
            f"{ALGORITHM}.kl_target",
            note="null",
            value=refused("write kl_ctrl.type=adaptive and kl_ctrl.kl_target", None),
        ),
    )


def _losses(newer: bool) -> tuple[Rule, ...]:
    """Policy and value loss."""
    losses = LOSSES if newer else LOSSES | COVARIANCE_LOSSES
    return (
        Rule(
            f"{ALGORITHM}.policy_loss_type {ALGORITHM}.ppo_loss_type",
            ("pg_variant", "dual_clip_loss"),
            "`dual_clip` is `ppo` with `dual_clip_loss`, `gspo` is `gspo_token`",
            named(losses, OTHER_LOSSES | OTHER_LOSSES_OF_NEWER),
            "loss",
            computed=True,
        ),
        _computed(
            f"{ALGORITHM}.loss_reduction",
            ("loss_agg_mode",),
            "aggregation",
            named(REDUCTIONS, OTHER_REDUCTIONS),
            "of the policy loss alone",
        ),
        _computed(
            f"{ALGORITHM}.max_seq_len",
            ("loss_norm_length",),
            "norm_length",
            lambda value: None if value is None else whole(value),
            "with `seq_mean_token_sum_norm`; null: longest prompt + longest response",
        ),
        *(
            _computed(
                f"{ALGORITHM}.eps_clip_{side}",
                (f"pg_clip_{side}", "use_pg_clip_range"),
                f"clip_{side}",
                note="of `regular`, `dual_clip`, `gspo` and `clip_cov`",
            )
            for side in ("low", "high")
        ),
        _computed(f"{ALGORITHM}.clip_ratio_c", ("dual_clip_coef",), "dual_clip", note="counts with `dual_clip`"),
        *(
            _computed(f"{ALGORITHM}.{theirs}", (ours,), fact, note=f"with `{theirs.partition('.')[0]}`")
            for theirs, ours, fact in (
                ("cispo.cispo_eps_clip_low", "cispo_epsilon_low", "cispo_low"),
                ("cispo.cispo_eps_clip_high", "cispo_epsilon_high", "cispo_high"),
                ("sapo.tau_pos", "sapo_tau_pos", "tau_pos"),
                ("sapo.tau_neg", "sapo_tau_neg", "tau_neg"),
                ("clip_cov.clip_ratio", "clip_cov_ratio", "clip_cov_ratio"),
                ("clip_cov.clip_cov_lb", "clip_cov_low", "clip_cov_low"),
                ("clip_cov.clip_cov_ub", "clip_cov_high", "clip_cov_high"),
                ("kl_cov.kl_cov_frac", "kl_cov_ratio", "kl_cov_ratio"),
                ("kl_cov.ppo_kl_coef", "kl_cov_coef", "kl_cov_coef"),
            )
        ),
        Rule(
            f"{ALGORITHM}.cispo.cispo_anchor",
            note="the policy before the update",
            value=refused(ENGINE_LOSS, "old", None),
        ),
        _computed(
            f"{ALGORITHM}.use_entropy_loss",
            ("entropy_loss_coef", "entropy_loss_agg_mode"),
            "entropy_on",
            truth,
            "false: 0",
        ),
        _computed(
            f"{ALGORITHM}.entropy_loss_coef",
            ("entropy_loss_coef",),
            "entropy_coef",
            note="counts with `use_entropy_loss`",
        ),
        _computed(
            f"{ALGORITHM}.value_clip",
            ("value_clip", "value_loss_agg_mode"),
            "value_clip",
            lambda value: None if value is None else number(value),
            "the critic's loss is a mean over responses there",
        ),
        Rule(
            f"{ALGORITHM}.temperature",
            note="the sampling's",
            value=refused("is that of the sampling here: leave it out", None),
        ),
        Rule(f"{ALGORITHM}.normalize_reward {ALGORITHM}.value_head_prefix", note="no such choice here"),
        _computed("trainer.update_epochs_per_batch", ("ppo_epochs",), "passes", whole),
    )


def _sampling() -> tuple[Rule, ...]:
    """Corrections, dynamic sampling, over-long responses."""
    ours = ("train_infer_correction",)
    levels = {None: None, "null": None, "token": "token", "sequence": "sequence"}
    metrics = {None: None, "null": None, "product": "product", "geometric": "geometric"}
    return (
        _computed(f"{CORRECTION}.tis_ratio_type", ours, "tis_type", one_of(levels), "truncated importance weights"),
        _computed(f"{CORRECTION}.token_tis_ratio_clip_high", ours, "tis_token_cap", note="with `token`"),
        _computed(f"{CORRECTION}.sequence_tis_ratio_clip_high", ours, "tis_sequence_cap", note="with `sequence`"),
        _computed(
            f"{CORRECTION}.sequence_mask_metric",
            ours,
            "mask_metric",
            one_of(metrics),
            "in `skyrl_train` not with `token_mean`, which then counts fewer tokens",
        ),
        *(
            _computed(f"{CORRECTION}.{name}_mask_{side}", ours, f"{name}_{side}", note=f"with `{metric}`")
            for name, metric in (("geo", "geometric"), ("product", "product"))
            for side in ("low", "high")
        ),
        *(
            _computed(
                f"{CORRECTION}.token_mask_is_threshold_{side}",
                ours,
                f"token_mask_{side}",
                lambda value: None if value is None else number(value),
                "together with `tis_ratio_type: token`",
            )
            for side in ("low", "high")
        ),
        *(
            _computed(
                f"{CORRECTION}.outlier_token_is_threshold_{side}",
                ours,
                f"outlier_{side}",
                lambda value: None if value is None else number(value),
                "together with another correction: a response with such a token is dropped (`level: max`)",
            )
            for side in ("low", "high")
        ),
        _computed(f"{ALGORITHM}.use_tis", ours, "use_tis", truth, "older name of `tis_ratio_type: token`"),
        _computed(f"{ALGORITHM}.tis_imp_ratio_cap", ours, "tis_cap", note="with `use_tis`"),
        _computed(
            f"{ALGORITHM}.dynamic_sampling.type",
            ("rewards.<name>.query_filter_config.type",),
            "filter_on",
            named(
                {"filter": True, None: False, "null": False},  # type: ignore[dict-item]
                {"replace": "groups without signal are replaced by new ones here, never by copies of others"},
            ),
            "`filter` is `std_filter`: groups whose scores are all the same are replaced by new ones",
        ),
        _computed(
            f"{ALGORITHM}.dynamic_sampling.max_sample_batches",
            (),
            "filter_limit",
            whole,
            "changes no gradient: a run asks until its groups are full",
        ),
        Rule(f"{ALGORITHM}.dynamic_sampling.min_replace_ratio", note="counts with `replace`"),
        Rule(
            f"{ALGORITHM}.zero_variance_filter",
            ("difficulty_mask",),
            "for scores of 0 and 1 `difficulty_mask: true` is the same",
            refused("looks at the spread of a group; for scores of 0 and 1 difficulty_mask: true is the same", False),
        ),
        _computed(
            "generator.apply_overlong_filtering",
            ("max_len_mask",),
            "mask_truncated",
            truth,
            "with `token_mean` and without `use_kl_loss`: means over responses count such responses there",
        ),
    )


def algorithm(newer: bool) -> Section:
    return Section("Algorithm", (*_advantages(), *_kl(), *_losses(newer), *_sampling()))


DEFAULTS: tuple[tuple[str, Any], ...] = (
    (f"{ALGORITHM}.advantage_estimator", "grpo"),
    (f"{ALGORITHM}.grpo_norm_by_std", True),
    (f"{ALGORITHM}.gamma", 1.0),
    (f"{ALGORITHM}.lambd", 1.0),
    (f"{ALGORITHM}.use_kl_loss", True),
    (f"{ALGORITHM}.kl_loss_coef", 0.001),
    (f"{ALGORITHM}.use_kl_in_reward", False),
    (f"{ALGORITHM}.kl_estimator_type", "k3"),
    (f"{ALGORITHM}.kl_ctrl.type", "fixed"),
    (f"{ALGORITHM}.kl_ctrl.kl_target", 0.1),
    (f"{ALGORITHM}.kl_ctrl.horizon", 10000),
    (f"{ALGORITHM}.policy_loss_type", "regular"),
    (f"{ALGORITHM}.loss_reduction", "token_mean"),
    (f"{ALGORITHM}.eps_clip_low", 0.2),
    (f"{ALGORITHM}.eps_clip_high", 0.2),
    (f"{ALGORITHM}.clip_ratio_c", 3.0),
    (f"{ALGORITHM}.cispo.cispo_eps_clip_low", 0.0),
    (f"{ALGORITHM}.cispo.cispo_eps_clip_high", 5.0),
    (f"{ALGORITHM}.sapo.tau_pos", 1.0),
    (f"{ALGORITHM}.sapo.tau_neg", 1.05),
    (f"{ALGORITHM}.clip_cov.clip_ratio", 0.0002),
    (f"{ALGORITHM}.clip_cov.clip_cov_lb", 1.0),
    (f"{ALGORITHM}.clip_cov.clip_cov_ub", 5.0),
    (f"{ALGORITHM}.kl_cov.kl_cov_frac", 0.2),
    (f"{ALGORITHM}.kl_cov.ppo_kl_coef", 1.0),
    (f"{ALGORITHM}.use_entropy_loss", False),
    (f"{ALGORITHM}.entropy_loss_coef", 0.01),
    (f"{ALGORITHM}.value_clip", 0.2),
    (f"{CORRECTION}.token_tis_ratio_clip_high", 2.0),
    (f"{CORRECTION}.sequence_tis_ratio_clip_high", 5.0),
    (f"{CORRECTION}.geo_mask_low", 0.99),
    (f"{CORRECTION}.geo_mask_high", 1.01),
    (f"{CORRECTION}.product_mask_low", 0.5),
    (f"{CORRECTION}.product_mask_high", 2.0),
    ("trainer.update_epochs_per_batch", 1),
)
"""Of the algorithm."""
