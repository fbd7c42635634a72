"""TRL's GRPO: loss, clip range, KL, normalisation, correction and rewards, as keys of ours with the same gradient."""

from __future__ import annotations

from typing import Any

from roll.translation.draft import Draft
from roll.translation.trl_batches import put_adapter, put_attention

MODES = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "bnpo": "token-mean",
}
MODES |= {"cispo": "token-mean", "sapo": "seq-mean-token-mean"}
"""How each ``loss_type`` becomes one number."""
THINK = r"<think>(?!.*<think>)(.*?)</think>.*"
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"worker_cls": "math_rule"},
    "reasoning_accuracy_reward": {"worker_cls": "math_rule"},
    "think_format_reward": {"worker_cls": "format", "reward_kwargs": {"pattern": THINK, "mode": "full"}},
    "get_soft_overlong_punishment": {"worker_cls": "length_penalty", "reward_kwargs": {"free": 1024, "limit": 1280}},
}
"""Functions of its command line; the punishment has its own limits there, whatever ``max_completion_length``."""


def put_trl_algorithm(draft: Draft) -> None:
    """Every key of the algorithm."""
    draft.put("adv_estimator", "grpo")
    draft.put("norm_std_type", draft.facts.get("scale", "group"), "scale")
    put_kl(draft)
    put_loss(draft)
    put_correction(draft)
    put_rewards(draft)
    put_adapter(draft, "actor_train")
    put_attention(draft, ("actor_train", "reference"))
    if "zero_stage" in draft.facts:
        for section in ("actor_train", "reference"):
            draft.put(f"{section}.strategy_args.strategy_config.zero_stage", draft.facts["zero_stage"], "accelerate")


def put_kl(draft: Draft) -> None:
    """``beta`` times the k3 estimate, unbounded, within the same mean as the policy's loss."""
    beta = float(draft.get("beta", default=0.0))
    draft.put("use_kl_loss", beta > 0, "beta")
    if beta > 0:
        draft.put("kl_loss_coef", beta, "beta")
        draft.put("kl_loss_type", "k3", "beta")
        draft.put("kl_loss_clamp", None, "beta")


def put_loss(draft: Draft) -> None:
    """The loss by its type and the level of its ratio."""
    kind, level = str(draft.get("loss_type", default="dapo")), draft.get("level", default="token")
    if kind not in MODES:
        draft.refuse("loss_type", f"has no translation; known: {', '.join(MODES)}", "dapo")
        return
    if level == "sequence" and kind in ("cispo", "sapo"):
        draft.refuse("level", f"with loss_type {kind} has no translation: it is token by token here", "token")
        return
    low = float(draft.get("epsilon", default=0.2))
    high = float(draft.get("epsilon_high", default=low))
    variant = kind if kind in ("cispo", "sapo") else "gspo_token" if level == "sequence" else "ppo"
    draft.put("pg_variant", variant, "loss_type", "level")
    draft.put("loss_agg_mode", MODES[kind], "loss_type")
    if kind == "dr_grpo":
        draft.put("loss_norm_length", int(draft.get("response_length", default=256)), "loss_type")
    if kind == "bnpo":
        put_local_mean(draft)
    if variant in ("ppo", "gspo_token"):
        draft.put("use_pg_clip_range", True, "epsilon", "epsilon_high")
        draft.put("pg_clip_low", min(low, 1.0), "epsilon")
        draft.put("pg_clip_high", high, "epsilon_high", "epsilon")
        put_delta(draft, variant, high)
    elif variant == "cispo":
        draft.put("cispo_epsilon_low", 1.0, "loss_type")
        draft.put("cispo_epsilon_high", high - 1.0, "epsilon_high", "epsilon")
        draft.remark(["epsilon_high"], "the bound of the weight itself there, of what it exceeds 1 by here")
    else:
        draft.put("sapo_tau_pos", float(draft.get("sapo_pos", default=1.0)), "sapo_pos")
        draft.put("sapo_tau_neg", float(draft.get("sapo_neg", default=1.05)), "sapo_neg")


def put_local_mean(draft: Draft) -> None:
    """``bnpo`` divides by the tokens of one micro-batch on one device."""
    parts = int(draft.get("accumulation", default=1)) * int(draft.facts["gpus"]) * int(draft.facts["nodes"])
    if parts > 1:
        rule = f"divides by the tokens of each of the {parts} micro-batches of a step; denominators are global here"
        draft.refuse("loss_type", f"{rule}: dapo divides by all tokens of the step", "dapo")


def put_delta(draft: Draft, variant: str, high: float) -> None:
    """``delta`` bounds the ratio before the minimum: dual clip, as long as it lies beyond the clip range."""
    delta = draft.get("delta")
    if delta is None:
        return
    if variant != "ppo" or delta <= 1.0 + high:
        draft.refuse("delta", f"must be above 1 + epsilon_high = {1.0 + high:g}, with ratios of tokens", 4.0)
    draft.put("dual_clip_loss", True, "delta")
    draft.put("dual_clip_coef", float(delta), "delta")


def put_correction(draft: Draft) -> None:
    """Weights against the mismatch of vLLM and trainer."""
    facts = ("is_on", "is_mode", "is_cap")
    if not draft.get("use_vllm") or not draft.get("is_on", default=True):
        draft.without_effect("without vLLM there is nothing to correct", *facts)
        return
    level, _, action = str(draft.get("is_mode", default="sequence_mask")).partition("_")
    cap = float(draft.get("is_cap", default=3.0))
    rule: dict[str, Any] = {"level": level, "action": "truncate", "high": cap}
    if action == "mask":
        rule["action"] = "both"
    draft.put("train_infer_correction", [rule], *facts)


def put_rewards(draft: Draft) -> None:
    """Functions of the command line, added with their weights."""
    draft.facts["rewards_set"] = True
    names, weights = [str(name) for name in draft.get("reward_funcs", default=[])], draft.get("reward_weights")
    model = draft.get("rm_path")
    if model is not None:
        draft.facts["rm"] = True
        draft.facts["rewards_set"] = False
        if names:
            draft.refuse("reward_funcs", "together with a reward model: write both under rewards.<name>.components")
        return
    if not names:
        rule = "is needed: TRL's command line has accuracy_reward, think_format_reward and others"
        draft.problems.missing("reward_funcs", rule, "accuracy_reward")
        return
    if weights is not None and len(weights) != len(names):
        draft.refuse("reward_weights", f"must be as many as reward_funcs: {len(names)}")
        return
    for place, name in enumerate(names):
        if name not in REWARDS:
            rule = (
                f"function {name} takes whole batches as TRL calls them: write one of ours (docs/rewards.md) and "
                f"name it in "
            )
            draft.refuse("reward_funcs", f"{rule}rewards.<name>.worker_cls; known: {', '.join(REWARDS)}")
            continue
        prefix = "rewards.trl" if len(names) == 1 and weights is None else f"rewards.trl.components.{name}"
        for key, value in REWARDS[name].items():
            for inner, entry in value.items() if isinstance(value, dict) else [("", value)]:
                draft.put(f"{prefix}.{key}{'.' if inner else ''}{inner}", entry, "reward_funcs")
        if weights is not None:
            draft.put(f"{prefix}.weight", float(weights[place]), "reward_weights")
    draft.put("rewards.trl.tag_included", None, "reward_funcs")
