"""OpenRLHF's arguments (``python3 -m openrlhf.cli.train_ppo_ray``) with their table, ``openrlhf.table``.

In older versions its means over tokens are those of one micro-batch on one device, averaged; in newer ones and here
they are of the whole optimizer step. The two are the same where micro-batches have as many tokens.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from roll.translation.assembly import data_name
from roll.translation.rules import Dialect, Draft
from roll.translation.tables import number, pair, read_table

LOCAL_MEAN = (
    "a mean over the tokens of each micro-batch in older versions, of the whole optimizer step in newer ones and here"
)
GROUPED = ("rloo", "grpo", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of a prompt."""


def prepare(draft: Draft) -> None:
    """Facts that the common arithmetic reads."""
    draft.state("strategy", "deepspeed")
    samples = int(draft.get("samples", default=1))
    mini = Fraction(int(draft.get("mini.actor", default=128)), samples)
    for role in ("actor", "critic"):
        draft.state(f"mini.{role}", mini)
    in_loss, coef = bool(draft.get("in_loss")), float(draft.get("kl_coef", default=0.01))
    draft.state("kl_loss", in_loss and coef > 0)
    draft.state("kl_in_reward", not in_loss and coef > 0)
    engines = draft.get("vllm_engines") or 0
    draft.state("engine", "vllm" if engines else "hf_infer")
    draft.put("actor_infer.strategy_args.strategy_name", draft.facts["engine"], "vllm_engines")
    if engines:
        draft.state("engines", int(engines))
    else:
        draft.state("colocate", True)
    if draft.get("dynamic.actor") and draft.get("rollout_budget") is not None:
        draft.state("forward_budget.actor", draft.facts["rollout_budget"])
    loggers = [name for name in ("wandb", "tensorboard") if draft.get(f"use_{name}")]
    draft.state("loggers", loggers or ["stdout"])
    draft.put("track_with", loggers or ["stdout"], "use_wandb", "use_tensorboard")
    put_data_names(draft)


def put_data_names(draft: Draft) -> None:
    for fact, split in (("train_files", "train_split"), ("val_files", "eval_split")):
        if draft.get(fact) is not None:
            draft.state(fact, [data_name(draft, str(draft.facts[fact]), split, "train")])
    template = "native" if draft.get("templated") else "raw"
    draft.put("actor_train.data_args.template", template, "templated")
    draft.put("actor_infer.generating_args.top_k", -1)


def put_openrlhf_algorithm(draft: Draft) -> None:
    """Every key of the algorithm, its rewards, and the options of DeepSpeed."""
    put_advantages(draft)
    put_kl(draft)
    put_loss(draft)
    put_rewards(draft)
    put_deepspeed(draft)


def put_advantages(draft: Draft) -> None:
    """Estimators; all but ``gae`` and ``reinforce`` have no discount there."""
    estimator, name = str(draft.get("estimator")), draft.raw.get("estimator", "gae")
    draft.put("adv_estimator", estimator, "estimator")
    draft.put("whiten_advantages", estimator == "gae", "estimator")
    if estimator == "grpo":
        draft.put("norm_std_type", None if name == "dr_grpo" else "group", "estimator")
    if estimator in GROUPED:
        draft.without_effect(f"{name} does not discount there", "gamma", "lam")
        if draft.get("kl_in_reward"):
            rule = "takes the KL off each token behind the comparison of the group there; use_kl_loss puts it into the "
            draft.refuse("kl_coef", f"with {name} {rule}loss, and 0 is none", 0)
    else:
        draft.put("gamma", float(draft.get("gamma", default=1.0)), "gamma")
    if estimator == "gae":
        draft.put("lambd", float(draft.get("lam", default=1.0)), "lam")
        draft.put("value_clip", float(draft.get("value_clip", default=0.5)), "value_clip")
        draft.put("value_loss_agg_mode", "token-mean", "estimator")
    low, high = draft.get("reward_range", default=[-10, 10])
    if -low != high:
        draft.refuse("reward_range", "must be as far below 0 as above: there is one bound here", [-10, 10])
    else:
        draft.put("reward_clip", float(high), "reward_range")
    if estimator == "rloo" and "reward_range" in draft.explicit:
        rule = "holds differences of scores within it, behind the comparison, there; here the scores themselves"
        draft.refuse("reward_range", f"with rloo {rule}; left out, it is -10 and 10", [-10, 10])


def put_kl(draft: Draft) -> None:
    """One weight and one estimator, in the loss or in the reward."""
    kind, coef = str(draft.get("kl_estimator", default="k1")), float(draft.get("kl_coef", default=0.01))
    in_loss, in_reward = bool(draft.get("kl_loss")), bool(draft.get("kl_in_reward"))
    draft.put("use_kl_loss", in_loss, "in_loss")
    draft.put("add_token_level_kl", in_reward, "in_loss")
    if in_loss:
        draft.put("kl_loss_coef", coef, "kl_coef")
        draft.put("kl_loss_type", kind, "kl_estimator")
        if draft.get("policy") == "gspo":
            draft.put("kl_loss_agg_mode", "token-mean", "policy")
    if in_reward:
        draft.put("init_kl_coef", coef, "kl_coef")
        draft.put("kl_penalty", kind, "kl_estimator")
    if draft.get("kl_target") is not None:
        if in_loss:
            draft.refuse("kl_target", "moves the weight of the KL in the loss there; here that of the KL in the reward")
        draft.put("target_kl", float(draft.facts["kl_target"]), "kl_target")
        draft.put("kl_horizon", int(draft.get("horizon", default=10000)), "horizon")
    else:
        draft.without_effect("the weight stays fixed", "horizon")


def put_loss(draft: Draft) -> None:
    """PPO's clip or GSPO, the entropy, and weights against vLLM's mismatch."""
    gspo = draft.get("policy") == "gspo"
    draft.put("pg_variant", "gspo" if gspo else "ppo", "policy")
    draft.put("loss_agg_mode", "seq-mean-token-mean" if gspo else "token-mean", "policy")
    low, high = draft.get("eps_both", default=[draft.get("eps", default=0.2)] * 2)
    draft.put("use_pg_clip_range", True, "eps", "eps_both")
    draft.put("pg_clip_low", min(float(low), 1.0), "eps", "eps_both")
    draft.put("pg_clip_high", float(high), "eps", "eps_both")
    if draft.get("dual") is not None:
        if gspo:
            draft.refuse("dual", "with gspo has no translation")
        draft.put("dual_clip_loss", True, "dual")
        draft.put("dual_clip_coef", float(draft.facts["dual"]), "dual")
    entropy = draft.get("entropy", default=0.0)
    draft.put("entropy_loss_coef", float(entropy), "entropy")
    if entropy and gspo:
        draft.put("entropy_loss_agg_mode", "token-mean", "entropy")
    draft.remark(["policy"], LOCAL_MEAN)
    if draft.get("corrects") and gspo:
        draft.refuse("corrects", "with gspo takes the ratio against the engine there: leave one of the two out", False)
    elif draft.get("corrects"):
        put_correction(draft)
    else:
        draft.without_effect("without enable_vllm_is_correction it does not count", "is_cap", "is_kind", "icepop")


def put_correction(draft: Draft) -> None:
    """Weights against the mismatch of engine and trainer, in the three forms of newer versions."""
    kind = draft.get("is_kind", default="icepop" if draft.get("icepop") else "tis")
    bounds = draft.get("is_cap", default=[0.5, 5.0] if draft.states("is_kind", "icepop") else 2.0)
    if not draft.states("is_cap"):
        draft.remark(["corrects"], "bounded by 2 as in older versions, by 0.5 and 5 where the type is written")
    low, high = bounds if isinstance(bounds, list) else (None, bounds)
    band = {"high": high} if low is None else {"low": low, "high": high}
    rules: dict[str, list[dict[str, Any]]] = {
        "tis": [{"level": "token", "action": "truncate", **band}],
        "icepop": [{"level": "token", "action": "both", **band}],
        "seq-mask-tis": [{"level": "geometric", "action": "mask", **band}, {"level": "token", "action": "truncate"}],
    }
    draft.put("train_infer_correction", rules[kind], "corrects", "is_cap", "is_kind", "icepop")


def put_rewards(draft: Draft) -> None:
    """A reward model on its role; functions and services have another protocol."""
    remote, model = draft.get("remote"), draft.get("rm_path")
    if remote is not None:
        rule = "is asked in a protocol of its own: write the function as one of ours (docs/rewards.md), or serve it as "
        draft.refuse("remote", f"{rule}http_reward asks it, and name it in rewards.<name>.worker_cls")
    elif model is None:
        draft.problems.missing("reward_pretrain", "is needed: the reward model", "owner/reward-model")
    else:
        draft.facts["rm"] = True
        draft.facts["rm_own"] = not draft.get("colocate")
    if draft.get("critic_path") is not None or "critic" in draft.roles:
        path = draft.get("critic_path", "rm_path", "model")
        draft.put("critic.model_args.model_name_or_path", str(path), "critic_path")
    if draft.get("overlong") is not None:
        draft.put("overlong_buffer_length", int(draft.facts["overlong"]), "overlong")
        draft.put("overlong_penalty_factor", float(draft.get("overlong_share", default=1.0)), "overlong_share")
    if draft.get("filtering"):
        if list(draft.get("filter_range", default=[0, 1])) != [0, 1]:
            draft.refuse("filter_range", "must be 0 and 1: groups whose scores are all the same are replaced", [0, 1])
        draft.put("rewards.reward_model.query_filter_config.type", "std_filter", "filtering")


def put_deepspeed(draft: Draft) -> None:
    """ZeRO, offload, Adam's betas and the end of the schedule."""
    for section in ("actor_train", "reference", "critic"):
        options = f"{section}.strategy_args.strategy_config"
        draft.put(f"{options}.zero_stage", int(draft.get("zero_stage", default=2)), "zero_stage")
        if section == "reference":
            continue
        if draft.get("adam_offload"):
            draft.put(f"{options}.offload", "cpu", "adam_offload")
        for place, beta in enumerate(draft.get("adam_betas", default=[0.9, 0.95]), start=1):
            draft.put(f"{section}.training_args.adam_beta{place}", float(beta), "adam_betas")
        if draft.raw.get("scheduler", "cosine_with_min_lr") == "cosine_with_min_lr":
            draft.put(f"{section}.training_args.min_lr_ratio", 0.1, "scheduler")
    if draft.get("lora_rank", default=0) > 0 and draft.get("lora_dropout"):
        draft.put("actor_train.model_args.lora_dropout", float(draft.facts["lora_dropout"]), "lora_dropout")


OPENRLHF = Dialect(
    "openrlhf",
    "OpenRLHF",
    read_table(
        "openrlhf",
        {
            "rounded_down": lambda value: int(number(value)),
            "threshold": lambda value: pair(value) if isinstance(value, list) else number(value),
        },
    ),
    "pretrain",
    programs=((r"openrlhf\.cli\.train_ppo_ray", {}),),
    prepare=prepare,
    algorithm=put_openrlhf_algorithm,
)
