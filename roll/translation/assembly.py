"""What one key alone does not say: roles, backends, devices, batches, KL, rewards, and the frame of a whole run."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from roll.translation.algorithms import put_algorithm
from roll.translation.draft import Draft
from roll.translation.judging import put_reward
from roll.translation.models import put_models
from roll.translation.placement import device_count, put_devices, put_run_ahead
from roll.translation.rules import OPTIONS, Dialect
from roll.translation.sampling import put_sampling

CUTTING = ("tensor", "pipeline", "context")
"""Megatron's parallel sizes that leave fewer data-parallel ranks."""
TRACKERS_WITH_PROJECT = {"wandb", "swanlab"}


def find_roles(draft: Draft) -> None:
    """Which sections the run has: a critic for ``gae``, a reference for a KL."""
    estimator, critic = draft.get("estimator"), draft.facts.get("critic")
    if draft.states("estimator", "critic"):
        wanted = estimator == "gae" and critic is not False
        draft.roles = (draft.roles | {"critic"}) if wanted else (draft.roles - {"critic"})
        if estimator == "gae" and critic is False:
            draft.problems.missing("critic.enable", "is false, but adv_estimator: gae needs values", "grpo")
        if critic is False:
            draft.remark(["critic"], "no critic: keys of the critic are left out")
    if draft.states("kl_loss", "kl_in_reward"):
        used = bool(draft.get("kl_loss")) or bool(draft.get("kl_in_reward"))
        draft.roles = (draft.roles | {"reference"}) if used else (draft.roles - {"reference"})


def assemble(draft: Draft, dialect: Dialect) -> None:
    """Set every key that follows from several facts."""
    for step in dialect.steps or STEPS:
        (dialect.algorithm or step if step is put_algorithm else step)(draft)


def strategy_of(draft: Draft, role: str) -> str:
    """``fsdp``, ``fsdp2``, ``deepspeed`` or ``megatron``. A reference without one of its own follows the actor."""
    if draft.get("config_name") == "megatron":
        return str(draft.get(f"strategy.{role}.written", default="megatron"))
    names = (f"strategy.{role}", "strategy", *(("strategy.actor",) if role == "reference" else ()))
    return str(draft.get(*names, default="fsdp2"))


def put_strategies(draft: Draft) -> None:
    for role, section in draft.sections():
        because = ["strategy", f"strategy.{role}", "config_name"]
        because += ["strategy.actor"] if role == "reference" and not draft.states("strategy.reference") else []
        if draft.states(*because):
            kind = "infer" if role == "reference" else "train"
            draft.put(f"{section}.strategy_args.strategy_name", f"{strategy_of(draft, role)}_{kind}", *because)


def put_host_memory(draft: Draft) -> None:
    """Parameters in host memory, an option of FSDP alone."""
    for role, section in draft.sections():
        fact = f"cpu_offload.{role}"
        if not draft.states(fact):
            continue
        asked, strategy = bool(draft.facts[fact]), strategy_of(draft, role)
        if not strategy.startswith("fsdp"):
            draft.remark([fact], f"left out: has no effect under {strategy}")
        else:
            draft.put(f"{section}.{OPTIONS}.offload_policy", asked, fact)


def put_switches(draft: Draft) -> None:
    """verl's environment variables, for the roles that train under DeepSpeed."""
    for name in ("offload_param", "fp32_grad_accumulation", "step_each_micro_batch"):
        fact = f"env.{name}"
        if not draft.states(fact):
            continue
        for role, section in draft.sections():
            if role != "reference" and strategy_of(draft, role) == "deepspeed":
                draft.put(f"{section}.{OPTIONS}.{name}", draft.facts[fact], fact)


def put_engine(draft: Draft) -> None:
    """Tensor-parallel ranks of an engine, and a length that cuts responses."""
    if draft.states("engine_tensor") and draft.get("engine") != "hf_infer":
        size = draft.facts["engine_tensor"]
        name = "tp_size" if draft.get("engine") == "sglang" else "tensor_parallel_size"
        draft.put(f"actor_infer.{OPTIONS}.{name}", size, "engine_tensor")
        draft.put("actor_infer.num_gpus_per_worker", size, "engine_tensor")
    longest = draft.get("max_model_len")
    if draft.states("max_model_len") and longest is not None:
        draft.put(f"actor_infer.{OPTIONS}.max_model_len", int(longest), "max_model_len")
        prompt, response = draft.get("prompt_length", default=0), draft.get("response_length", default=0)
        if longest < prompt + response:
            text = f"is less than prompt {prompt} + response {response}: a response after a prompt of {prompt} tokens "
            text += f"has at most {max(0, longest - prompt)} tokens"
            if longest <= prompt:
                kept = int(longest) - 1
                draft.put("prompt_length", kept, "max_model_len")
                text += f"; prompt_length becomes {kept}, which leaves room for one"
            draft.remark(["max_model_len"], text)


def data_parallel_size(draft: Draft, role: str) -> int:
    """Ranks that learn from different samples."""
    cut = 1
    strategy = strategy_of(draft, role)
    if strategy == "megatron":
        for name in CUTTING:
            cut *= int(draft.get(f"{name}.{role}", default=1))
    elif strategy != "deepspeed":
        cut = int(draft.get(f"ulysses.{role}", default=1))
    return max(1, device_count(draft, role) // cut)


def put_batches(draft: Draft) -> None:
    """Their mini-batches are prompts; our optimizer step is micro-batch x ``gradient_accumulation_steps`` x ranks."""
    for role, section in draft.sections():
        sizes = (f"mini.{role}", f"micro.{role}", "micro", f"micro_of_all.{role}", "samples", f"dynamic.{role}")
        layout = ("gpus", "nodes", f"gpus.{role}", f"nodes.{role}", f"ulysses.{role}", f"tensor.{role}")
        if role == "reference" or not draft.states(*sizes, *layout, f"pipeline.{role}", f"context.{role}"):
            continue
        mini = draft.get(f"mini.{role}", "mini.actor")
        micro = draft.get(
            f"micro.{role}", "micro", default=1 if draft.get(f"dynamic.{role}", "dynamic.actor") else None
        )
        of_all = draft.get(f"micro_of_all.{role}")
        if of_all is not None and draft.states(f"micro_of_all.{role}"):
            micro = max(1, of_all // device_count(draft, role))
        if mini is None or micro is None:
            draft.problems.missing(f"micro-batch of {section}", "is needed: samples of a micro-batch on one device", 1)
            continue
        put_accumulation(draft, role, section, Fraction(mini), int(micro))


def put_accumulation(draft: Draft, role: str, section: str, mini: Fraction, micro: int) -> None:
    """Set the two keys of a trained role's batch, with the arithmetic as a remark."""
    samples, ranks = int(draft.get("samples", default=1)), data_parallel_size(draft, role)
    total = mini * samples
    steps = total / (micro * ranks)
    because = (f"mini.{role}", f"micro.{role}", "micro", f"micro_of_all.{role}")
    text = f"{float(mini):g} prompts x {samples} = {float(total):g} samples an optimizer step"
    if steps.denominator != 1:
        rule = f"{text} do not divide into micro-batches of {micro} on {ranks} ranks"
        draft.problems.add(f"{section}: mini-batch", float(mini), rule)
        return
    if draft.whole or draft.states(*because[1:], f"dynamic.{role}"):
        draft.put(f"{section}.training_args.per_device_train_batch_size", micro, *because[1:])
    draft.put(f"{section}.training_args.gradient_accumulation_steps", int(steps), *because)
    draft.remark(because, f"{section}: {text} = {int(steps)} micro-batches of {micro} on {ranks} ranks")


def put_forward_batches(draft: Draft) -> None:
    """Micro-batches of passes without gradient that are given for all devices together."""
    for role, section in draft.sections():
        fact = f"forward_of_all.{role}"
        if draft.states(fact) and draft.facts[fact] is not None:
            draft.put(f"{section}.infer_batch_size", max(1, draft.facts[fact] // device_count(draft, role)), fact)


def put_token_budgets(draft: Draft) -> None:
    """verl's token budgets count with ``use_dynamic_bsz`` only, which critic and reference have from the actor."""
    for role, section in draft.sections():
        own, dynamic = f"token_budget.{role}", (f"dynamic.{role}", "dynamic.actor")
        ranks = ranks_of_a_sequence(draft, role)
        forward: tuple[str, ...] = (f"forward_dynamic.{role}", *dynamic)
        phases: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "train": (dynamic, (own, "token_budget.actor")),
            "infer": (forward, (f"forward_budget.{role}", own, "token_budget.actor")),
        }
        for phase, (switches, budgets) in phases.items():
            if (role == "reference" and phase == "train") or not draft.states(*switches):
                continue
            asked = bool(draft.get(*switches, default=False))
            if asked or draft.get(*dynamic):
                draft.put(f"{section}.use_dynamic_batching_in_{phase}", asked, *switches)
            budget = draft.get(*budgets)
            if asked and budget is not None:
                draft.put(f"{section}.max_tokens_per_microbatch_in_{phase}", int(budget) * ranks, *budgets)
        counted: dict[str, tuple[str, ...]] = {own: dynamic, f"forward_budget.{role}": forward}
        for fact, switches in counted.items():
            if fact in draft.given and not (draft.states(*switches) and draft.get(*switches)):
                draft.remark([fact], "left out: without use_dynamic_bsz it has no effect")


def ranks_of_a_sequence(draft: Draft, role: str) -> int:
    """Ranks that share the tokens of one sequence."""
    strategy = strategy_of(draft, role)
    if strategy == "megatron":
        return int(draft.get(f"context.{role}", default=1))
    return 1 if strategy == "deepspeed" else int(draft.get(f"ulysses.{role}", default=1))


def put_optimizers(draft: Draft) -> None:
    for section in ("actor_train", "critic"):
        betas = draft.get(f"betas.{section}")
        if draft.states(f"betas.{section}") and betas is not None:
            for number, beta in enumerate(betas, start=1):
                draft.put(f"{section}.training_args.adam_beta{number}", float(beta), f"betas.{section}")


def put_steps(draft: Draft) -> None:
    """Passes over the data become steps where the number of rows is known."""
    if not draft.states("epochs") or draft.states("steps"):
        return
    epochs, rows, prompts = draft.facts["epochs"], draft.get("rows"), draft.get("prompts")
    if rows is None or prompts is None:
        draft.remark(
            ["epochs"],
            "give --train-rows, or max_steps yourself: its default holds otherwise",
        )
        return
    steps = max(1, rows // prompts * epochs)
    draft.put("max_steps", steps, "epochs")
    draft.remark(["epochs"], f"{rows} rows // {prompts} prompts x {epochs} = {steps} steps")


def put_data(draft: Draft) -> None:
    for fact, section in (("train_files", "actor_train"), ("val_files", "validation")):
        if draft.states(fact):
            draft.put(f"{section}.data_args.file_name", [file_or_folder(name) for name in draft.facts[fact]], fact)
    if draft.get("text_key") is not None:
        draft.put("actor_train.data_args.prompt", str(draft.facts["text_key"]), "text_key")
    elif draft.states("train_files", "prompt_key"):
        column = draft.get("prompt_key", default="prompt")
        draft.put("actor_train.data_args.messages", column, "train_files", "prompt_key")
    for fact, key in (("seed", "seed"), ("val_batch", "val_batch_size")):
        if draft.states(fact) and draft.get(fact) is not None and key not in draft.keys:
            draft.put(key, int(draft.facts[fact]), fact)
    if draft.whole and draft.states("val_files") and draft.get("val_temperature") == 0:
        draft.put("validation.greedy", False, "val_temperature")


def file_or_folder(name: Any) -> Any:
    """A name without an ending is a folder there."""
    if not isinstance(name, str) or re.search(r"\.\w+$|[*?\[}]$|/$|^hub:", name):
        return name
    return f"{name}/"


def put_stops(draft: Draft) -> None:
    """Stop strings, which stay in the response."""
    for fact, section in (("stop.train", "actor_infer"), ("stop.validation", "validation")):
        if draft.get(fact):
            draft.put(f"{section}.generating_args.stop_strings", draft.facts[fact], fact)
            draft.put(f"{section}.generating_args.include_stop_str_in_output", True, fact)


def put_tracking(draft: Draft) -> None:
    used = TRACKERS_WITH_PROJECT & set(draft.get("loggers", default=[]))
    if draft.states("project") and draft.facts["project"] is not None:
        if used:
            draft.put("tracker_kwargs.project", draft.facts["project"], "project")
        else:
            draft.remark(["project"], "left out: neither wandb nor swanlab is used")
    resume = draft.get("resume")
    if draft.states("resume_path") and draft.get("resume_path") is not None:
        draft.put("resume_from_checkpoint", draft.facts["resume_path"], "resume_path")
    elif draft.states("resume") and resume is not None:
        draft.put("resume_from_checkpoint", resume, "resume")


STEPS: tuple[Callable[[Draft], None], ...] = (
    put_strategies,
    put_host_memory,
    put_switches,
    put_engine,
    put_devices,
    put_run_ahead,
    put_batches,
    put_forward_batches,
    put_token_budgets,
    put_optimizers,
    put_algorithm,
    put_models,
    put_steps,
    put_data,
    put_stops,
    put_reward,
    put_sampling,
    put_tracking,
)
"""What an RLVR run has, in order."""
