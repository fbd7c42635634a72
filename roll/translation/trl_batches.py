"""TRL's processes, batches and steps in the terms of the other projects; adapters, data and engines go with them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from roll.translation.draft import Draft
from roll.translation.placement import devices

PROMPT_LENGTH = 1024
"""TRL cuts no prompt: the longest that is kept, where the command does not say."""
PEFT_DEFAULTS = {"lora_r": 16, "peft_alpha": 32, "peft_dropout": 0.05}


def prepare(draft: Draft) -> None:
    """Facts that the common arithmetic reads; those that have a name of theirs take its place."""
    draft.facts["accumulation"] = int(draft.get("mini.actor", default=1))
    draft.facts["per_device"] = int(draft.get("micro.actor", default=8))
    world = processes(draft)
    put_strategy(draft)
    put_intervals(draft, put_rollouts(draft, world) if "samples" in draft.facts else Fraction(1))
    put_data_names(draft)
    if draft.get("use_peft"):
        for ours, theirs in (("lora_rank", "lora_r"), ("lora_alpha", "peft_alpha")):
            state(draft, ours, draft.get(theirs, default=PEFT_DEFAULTS[theirs]))
        state(draft, "lora_target", draft.get("peft_target", default=["q_proj", "v_proj"]))


def state(draft: Draft, fact: str, value: Any) -> None:
    """Set a fact as if a key of theirs said it."""
    draft.facts[fact] = value
    draft.written.add(fact)


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
    state(draft, "gpus", max(1, int(total) // machines))
    state(draft, "nodes", machines)
    return int(total)


def put_strategy(draft: Draft) -> None:
    """The backend by the name of the file for ``accelerate`` or DeepSpeed."""
    options = draft.facts.get("launcher_options", {})
    name = str(draft.get("accelerate", default=options.get("config_file", options.get("accelerate_config", ""))) or "")
    stage = re.search(r"(?:zero|ds|stage)[-_]?(?:stage)?[-_]?(\d)", name.lower())
    if stage or "use_deepspeed" in options:
        state(draft, "strategy", "deepspeed")
        state(draft, "zero_stage", int(stage[1]) if stage else 2)
    else:
        state(draft, "strategy", "fsdp" if "fsdp1" in name.lower() else "fsdp2")
    draft.remark(["accelerate"], f"{draft.facts['strategy']}, by the file's name")


def put_rollouts(draft: Draft, world: int) -> Fraction:
    """Completions of a generation and of an optimizer step as prompts; returns optimizer steps of a generation."""
    samples, micro = int(draft.facts["samples"]), int(draft.get("per_device", default=8))
    accumulation = int(draft.get("accumulation", default=1))
    steps = draft.get("steps_per_generation", default=accumulation)
    if draft.get("generation_batch") is not None:
        steps = Fraction(int(draft.facts["generation_batch"]), micro * world)
    prompts = Fraction(micro * world * steps) / samples
    if prompts.denominator != 1 or prompts < 1:
        rule = f"{float(micro * world * steps):g} completions of a generation do not divide into groups of {samples}"
        draft.problems.add("num_generations", samples, f"must divide them: {rule}")
    state(draft, "prompts", max(1, int(prompts)))
    draft.put("rollout_batch_size", max(1, int(prompts)), "steps_per_generation", "generation_batch", "micro.actor")
    state(draft, "mini.actor", Fraction(micro * world * accumulation, samples))
    state(draft, "micro.actor", micro)
    iterations = int(draft.get("iterations", default=1))
    draft.put("ppo_epochs", iterations, "iterations")
    state(draft, "prompt_length", draft.get("trl_prompt", default=PROMPT_LENGTH))
    draft.put("prompt_length", draft.facts["prompt_length"], "trl_prompt")
    state(draft, "estimator", "grpo")
    state(draft, "kl_loss", bool(draft.get("beta", default=0.0)))
    put_engine_facts(draft)
    return Fraction(steps) / accumulation * iterations


def put_engine_facts(draft: Draft) -> None:
    vllm = bool(draft.get("use_vllm"))
    state(draft, "engine", "vllm" if vllm else "hf_infer")
    draft.put("actor_infer.strategy_args.strategy_name", draft.facts["engine"], "use_vllm")
    together = not vllm or bool(draft.get("trl_colocate", default=True))
    state(draft, "colocate", together)
    if not together:
        state(draft, "engines", 1)
        draft.remark(
            ["trl_colocate"], "one engine behind the trainer's devices: more of them in actor_infer.device_mapping"
        )


def put_intervals(draft: Draft, updates: Fraction) -> None:
    """Optimizer steps there are rollouts here: ``updates`` of them each."""
    steps = draft.get("optimizer_steps", default=-1)
    if steps is not None and steps > 0:
        state(draft, "steps", max(1, round(steps / updates)))
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
    state(draft, "train_files", [data_name(draft, str(name), "train_split", "train")])
    if draft.get("eval_strategy", default="no") != "no":
        state(draft, "val_files", [data_name(draft, str(name), "test_split", "test")])


def data_name(draft: Draft, name: str, split: str, default: str) -> str:
    if name.startswith((".", "/", "~", "$")) or re.search(r"\.\w+$", name):
        return name
    config = f"/{draft.facts['hub_config']}" if draft.get("hub_config") is not None else ""
    return f"hub:{name}{config}:{draft.get(split, default=default)}"


def put_sft(draft: Draft) -> None:
    """All of an SFT run that no key says alone."""
    count, role = int(draft.facts["gpus"]) * int(draft.facts["nodes"]), "sft_train"
    draft.put("num_gpus_per_node", int(draft.facts["gpus"]), "machines")
    draft.put(f"{role}.device_mapping", devices(0, count), "processes")
    draft.put(f"{role}.strategy_args.strategy_name", f"{draft.facts['strategy']}_train", "accelerate")
    if "zero_stage" in draft.facts:
        draft.put(f"{role}.strategy_args.strategy_config.zero_stage", draft.facts["zero_stage"], "accelerate")
    draft.put(
        f"{role}.training_args.per_device_train_batch_size", int(draft.get("per_device", default=8)), "micro.actor"
    )
    steps = int(draft.get("accumulation", default=1))
    draft.put(f"{role}.training_args.gradient_accumulation_steps", steps, "mini.actor")
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
