"""TRL's arguments (``trl grpo`` and ``trl sft``) with their table, ``trl.table``: batches, losses and rewards.

Defaults are those of version 1: ``loss_type: dapo``, ``beta: 0``, ``vllm_importance_sampling_mode: sequence_mask``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from roll.translation.assembly import data_name
from roll.translation.placement import device_count, devices
from roll.translation.rules import Convert, Dialect, Draft
from roll.translation.tables import listed, number, one_of, read_table, whole

TRACKERS = {name: name for name in ("wandb", "tensorboard", "swanlab", "trackio")} | {"none": "stdout", "all": "stdout"}
MODES = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "bnpo": "token-mean",
}
MODES |= {"cispo": "token-mean", "sapo": "seq-mean-token-mean", "vespo": "token-mean", "luspo": "seq-mean-token-sum"}
"""Aggregation of each ``loss_type``."""
THINK = r"<think>(?!.*<think>)(.*?)</think>.*"
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"worker_cls": "math_rule"},
    "reasoning_accuracy_reward": {"worker_cls": "math_rule"},
    "think_format_reward": {"worker_cls": "format", "reward_kwargs": {"pattern": THINK, "mode": "full"}},
    "get_soft_overlong_punishment": {"worker_cls": "length_penalty", "reward_kwargs": {"free": 1024, "limit": 1280}},
}
"""Functions of its command line; the punishment has its own limits there, whatever ``max_completion_length``."""
PROMPT_LENGTH = 1024
"""TRL cuts no prompt: the longest that is kept, where the command does not say."""
PEFT_DEFAULTS = {"lora_r": 16, "peft_alpha": 32, "peft_dropout": 0.05}
LOSS_OPTIONS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "sapo": (("sapo_tau_pos", "sapo_pos", 1.0), ("sapo_tau_neg", "sapo_neg", 1.05)),
    "vespo": (
        *(("vespo_k_pos", "vespo_k_pos", 2.0), ("vespo_lambda_pos", "vespo_lambda_pos", 3.0)),
        *(("vespo_k_neg", "vespo_k_neg", 3.0), ("vespo_lambda_neg", "vespo_lambda_neg", 2.0)),
    ),
}
"""For each loss: our keys, the facts that they come from, and TRL's defaults."""


def prepare(draft: Draft) -> None:
    """State the facts that the common arithmetic reads."""
    draft.facts["accumulation"] = int(draft.get("mini.actor", default=1))
    draft.facts["per_device"] = int(draft.get("micro.actor", default=8))
    world = processes(draft)
    put_strategy(draft)
    put_intervals(draft, put_rollouts(draft, world) if "samples" in draft.facts else Fraction(1))
    put_data_names(draft)
    if draft.get("use_peft"):
        for ours, theirs in (("lora_rank", "lora_r"), ("lora_alpha", "peft_alpha")):
            draft.state(ours, draft.get(theirs, default=PEFT_DEFAULTS[theirs]))
        draft.state("lora_target", draft.get("peft_target", default=["q_proj", "v_proj"]))


def processes(draft: Draft) -> int:
    """One process a device, from the options of whatever starts them."""
    options = draft.facts.get("launcher_options", {})
    machines = int(draft.get("machines", default=options.get("num_machines", options.get("nnodes", 1))))
    per_node = options.get("nproc_per_node", options.get("num_gpus"))
    total = draft.get("processes", default=options.get("num_processes"))
    if total is None:
        total = int(per_node) * machines if per_node is not None and str(per_node).isdecimal() else machines
        if per_node is None:
            draft.remark(["micro.actor"], "one process is assumed: give --num_processes for more devices")
    draft.state("gpus", max(1, int(total) // machines))
    draft.state("nodes", machines)
    return int(total)


def put_strategy(draft: Draft) -> None:
    """The backend by the name of the file for ``accelerate`` or DeepSpeed."""
    options = draft.facts.get("launcher_options", {})
    name = str(draft.get("accelerate", default=options.get("config_file", options.get("accelerate_config", ""))) or "")
    stage = re.search(r"(?:zero|ds|stage)[-_]?(?:stage)?[-_]?(\d)", name.lower())
    if stage or "use_deepspeed" in options:
        draft.state("strategy", "deepspeed")
        draft.state("zero_stage", int(stage[1]) if stage else 2)
    else:
        draft.state("strategy", "fsdp" if "fsdp1" in name.lower() else "fsdp2")
    draft.remark(["accelerate"], f"{draft.facts['strategy']}, by the file's name")


def put_rollouts(draft: Draft, world: int) -> Fraction:
    """Completions of a generation and of an optimizer step as prompts; returns optimizer steps of a generation."""
    samples, micro, accumulation = (int(draft.facts[name]) for name in ("samples", "per_device", "accumulation"))
    steps = draft.get("steps_per_generation", default=accumulation)
    if draft.get("generation_batch") is not None:
        steps = Fraction(int(draft.facts["generation_batch"]), micro * world)
    prompts = Fraction(micro * world * steps) / samples
    if prompts.denominator != 1 or prompts < 1:
        rule = f"{float(micro * world * steps):g} completions of a generation do not divide into groups of {samples}"
        draft.problems.add("num_generations", samples, f"must divide them: {rule}")
    draft.state("prompts", max(1, int(prompts)))
    draft.put("rollout_batch_size", max(1, int(prompts)), "steps_per_generation", "generation_batch", "micro.actor")
    draft.state("mini.actor", Fraction(micro * world * accumulation, samples))
    draft.state("micro.actor", micro)
    iterations = int(draft.get("iterations", default=1))
    draft.put("ppo_epochs", iterations, "iterations")
    draft.state("prompt_length", draft.get("trl_prompt", default=PROMPT_LENGTH))
    draft.put("prompt_length", draft.facts["prompt_length"], "trl_prompt")
    draft.state("estimator", "grpo")
    draft.state("kl_loss", bool(draft.get("beta", default=0.0)))
    put_engine_facts(draft)
    return Fraction(steps) / accumulation * iterations


def put_engine_facts(draft: Draft) -> None:
    vllm = bool(draft.get("use_vllm"))
    draft.state("engine", "vllm" if vllm else "hf_infer")
    draft.put("actor_infer.strategy_args.strategy_name", draft.facts["engine"], "use_vllm")
    draft.state("colocate", not vllm or bool(draft.get("trl_colocate", default=True)))
    if not draft.facts["colocate"]:
        draft.state("engines", 1)
        text = "one engine behind the trainer's devices: more of them in actor_infer.device_mapping"
        draft.remark(["trl_colocate"], text)


def put_intervals(draft: Draft, updates: Fraction) -> None:
    """Optimizer steps there are rollouts here: ``updates`` of them each."""
    steps = draft.get("optimizer_steps", default=-1)
    if steps is not None and steps > 0:
        draft.state("steps", max(1, round(steps / updates)))
        draft.put("max_steps", draft.facts["steps"], "optimizer_steps")
    for fact, ours, default in (("save", "save_steps", 500), ("eval", "eval_steps", 10)):
        strategy, interval = draft.get(f"{fact}_strategy", default="no"), draft.get(f"{fact}_interval")
        value = max(1, round(Fraction(interval or default) / updates)) if strategy == "steps" else 0
        if strategy == "epoch":
            rows, prompts = draft.get("rows"), draft.get("prompts", default=1)
            value = max(1, int(rows) // int(prompts)) if rows is not None else 0
            text = "an epoch is as many steps" if value else "give --train-rows, and an epoch becomes steps"
            draft.remark([f"{fact}_strategy"], text)
        draft.put(ours, value, f"{fact}_strategy", f"{fact}_interval")


def put_data_names(draft: Draft) -> None:
    """``hub:OWNER/NAME/CONFIG:SPLIT``, or a file."""
    name = draft.get("train_files")
    if name is None:
        return
    draft.state("train_files", [data_name(draft, str(name), "train_split", "train")])
    if draft.get("eval_strategy", default="no") != "no":
        draft.state("val_files", [data_name(draft, str(name), "test_split", "test")])


def put_sft(draft: Draft) -> None:
    """All of an SFT run that no key says alone."""
    count, role = device_count(draft, "actor"), "sft_train"
    draft.put("num_gpus_per_node", int(draft.facts["gpus"]), "machines")
    draft.put(f"{role}.device_mapping", devices(0, count), "processes")
    draft.put(f"{role}.strategy_args.strategy_name", f"{draft.facts['strategy']}_train", "accelerate")
    if "zero_stage" in draft.facts:
        draft.put(f"{role}.strategy_args.strategy_config.zero_stage", draft.facts["zero_stage"], "accelerate")
    draft.put(f"{role}.training_args.per_device_train_batch_size", draft.facts["per_device"], "micro.actor")
    draft.put(f"{role}.training_args.gradient_accumulation_steps", draft.facts["accumulation"], "mini.actor")
    if "steps" not in draft.facts:
        draft.put(f"{role}.training_args.num_train_epochs", float(draft.get("epochs", default=3)), "epochs")
    if not draft.get("assistant_only"):
        rule = "must be true: without it every token of a conversation is learned there, here the answers alone"
        draft.problems.add("assistant_only_loss", bool(draft.get("assistant_only")), rule, True)
    for fact, section in (("train_files", role), ("val_files", "validation")):
        if draft.states(fact):
            draft.put(f"{section}.data_args.file_name", draft.facts[fact], "train_files", "eval_strategy")
            draft.put(f"{section}.data_args.messages", "messages", "train_files")
    put_adapter(draft, role)
    put_attention(draft, (role,))


def put_adapter(draft: Draft, role: str) -> None:
    if not draft.get("use_peft"):
        return
    arguments = f"{role}.model_args"
    draft.put(f"{arguments}.lora_rank", int(draft.facts["lora_rank"]), "use_peft", "lora_r")
    draft.put(f"{arguments}.lora_alpha", int(draft.facts["lora_alpha"]), "use_peft", "peft_alpha")
    draft.put(f"{arguments}.lora_target", draft.facts["lora_target"], "use_peft", "peft_target")
    dropout = draft.get("peft_dropout", default=PEFT_DEFAULTS["peft_dropout"])
    draft.put(f"{arguments}.lora_dropout", dropout, "use_peft", "peft_dropout")


def put_attention(draft: Draft, roles: tuple[str, ...]) -> None:
    if draft.get("attention") is not None:
        for role in roles:
            draft.put(f"{role}.model_args.attn_implementation", draft.facts["attention"], "attention")


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
    if draft.get("truncated_out") and MODES[kind] != "token-mean":
        rule = f"with loss_type {kind} counts them in the mean over responses there; here max_len_mask leaves them out"
        draft.refuse("truncated_out", f"{rule}: dapo and cispo are the same", False)
    if draft.get("weighted_kl") and level == "sequence":
        draft.refuse("weighted_kl", "weighs the KL by the ratio of the sequence there, by those of tokens here", False)
    low = float(draft.get("epsilon", default=0.2))
    high = float(draft.get("epsilon_high", default=low))
    variant = kind if kind in ("cispo", "sapo", "vespo") else "gspo_token" if level == "sequence" else "ppo"
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
    for key, fact, default in LOSS_OPTIONS.get(variant, ()):
        draft.put(key, float(draft.get(fact, default=default)), fact)
    if variant == "vespo" and draft.get("use_vllm") and draft.get("is_on", default=True):
        rule = "multiplies the ratio of the response with loss_type vespo there, the loss here"
        draft.refuse("is_on", rule, False)


def put_local_mean(draft: Draft) -> None:
    """``bnpo`` divides by the tokens of one micro-batch on one device."""
    parts = int(draft.facts["accumulation"]) * device_count(draft, "actor")
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
    level, _, mode = str(draft.get("is_mode", default="sequence_mask")).partition("_")
    action, cap = "both" if mode == "mask" else "truncate", float(draft.get("is_cap", default=3.0))
    draft.put("train_infer_correction", [{"level": level, "action": action, "high": cap}], *facts)


def put_rewards(draft: Draft) -> None:
    """Functions of the command line, added with their weights."""
    names, weights = [str(name) for name in draft.get("reward_funcs", default=[])], draft.get("reward_weights")
    draft.facts["rewards_set"] = draft.get("rm_path") is None
    if not draft.facts["rewards_set"]:
        draft.facts["rm"] = True
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
            rule = f"function {name} takes whole batches as TRL calls them: write one of ours (docs/rewards.md) and "
            rule += f"name it in rewards.<name>.worker_cls; known: {', '.join(REWARDS)}"
            draft.refuse("reward_funcs", rule)
            continue
        prefix = "rewards.trl" if len(names) == 1 and weights is None else f"rewards.trl.components.{name}"
        for key, value in REWARDS[name].items():
            for inner, entry in value.items() if isinstance(value, dict) else [("", value)]:
                draft.put(f"{prefix}.{key}{'.' if inner else ''}{inner}", entry, "reward_funcs")
        if weights is not None:
            draft.put(f"{prefix}.weight", float(weights[place]), "reward_weights")
    draft.put("rewards.trl.tag_included", None, "reward_funcs")


CONVERSIONS: dict[str, Convert] = {
    "trackers": lambda value: [one_of(TRACKERS)(name) for name in listed(value)],
    "logging_steps": lambda value: max(1, round(number(value))),
    "all_linear": lambda value: value[0] if value == ["all-linear"] else value,
    "top_k": lambda value: whole(value or 0) or -1,
}


def _dialect(name: str, roles: str, rate: str, **rest: Any) -> Dialect:
    """The table's common section and that of the program."""
    texts = {"ROLES": f"{{{roles}}}", "ROLE": roles.partition(",")[0], "RATE": rate}
    common, *others = read_table("trl", CONVERSIONS, texts)
    sections = (common, others[name == "trl_sft"])
    kind = "sft" if name == "trl_sft" else "grpo"
    return Dialect(
        name,
        "TRL",
        sections,
        "model_name_or_path",
        programs=((rf"(?:.*\.)?(?:trl\.(?:scripts\.)?{kind}|scripts\.{kind})", {}),),
        prepare=prepare,
        **rest,
    )


TRL_GRPO = _dialect("trl", "actor_train,actor_infer,reference", "1.0e-6", algorithm=put_trl_algorithm)
TRL_SFT = _dialect("trl_sft", "sft_train", "2.0e-5", steps=(put_sft,), pipeline="sft")
