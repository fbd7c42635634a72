"""Shows a plan on a terminal: who runs where, batch arithmetic, passes, steps, folders, warnings."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig
from roll.config.masking import masked_text
from roll.config.plan import Plan, RLVRPlan, RolePlan, SFTPlan
from roll.config.rlvr import RLVRConfig
from roll.config.run_ahead import RunAhead
from roll.config.sft import SFTConfig
from roll.config.strategy import GENERATION_STRATEGIES
from roll.config.wording import count

WIDEST_DEVICE_TABLE = 8


def render_plan(loaded: LoadedConfig[RLVRConfig] | LoadedConfig[SFTConfig], console: Console) -> None:
    """Print the plan of a loaded configuration."""
    plan = loaded.plan
    nodes = f"{count(plan.num_nodes, 'node')} x {count(plan.num_devices_per_node, 'device')}"
    console.print(line(f"{plan.exp_name}  ", "bold", f"{plan.pipeline} pipeline, {nodes}  ({loaded.source})"))
    console.print(role_table(plan))
    for label, text in facts(plan):
        console.print(line(f"{label:<12}", "bold", text), soft_wrap=True)
    for notice in loaded.warnings:
        console.print(line(f"{'note':<12}", "yellow", str(notice)), soft_wrap=True)


def line(label: str, style: str, text: str) -> Text:
    """A styled label and a plain text; no markup is read in either, whatever the user's names look like."""
    return Text.assemble((label, style), masked_text(text))


def role_table(plan: Plan) -> Table:
    """Roles x devices: a dot where a role has a worker on a device."""
    devices = sorted({device for role in plan.roles.values() for device in role.device_mapping})
    as_dots = len(devices) <= WIDEST_DEVICE_TABLE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("role", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    table.add_column("workers", justify="right", no_wrap=True)
    for heading in map(str, devices) if as_dots else ["devices"]:
        table.add_column(heading, justify="center" if as_dots else "left")
    table.add_column("shares devices with")
    for role in plan.roles.values():
        placed = ["●" if device in role.device_mapping else "·" for device in devices]
        cells = placed if as_dots else [compact(role.device_mapping)]
        does = role.strategy_name or role.worker_cls or ""
        texts = (role.name, does, workers(role), *cells, ", ".join(role.colocated_with))
        table.add_row(*map(Text, texts))
    return table


def workers(role: RolePlan) -> str:
    return f"{role.world_size} x {role.num_gpus_per_worker}" if role.num_gpus_per_worker > 1 else str(role.world_size)


def compact(devices: Sequence[int]) -> str:
    """``0-7, 12`` for a list of ids."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Label and sentence of everything but the role table."""
    lines = [("model", text) for text in model_sentences(plan)] + batch_facts(plan)
    if isinstance(plan, RLVRPlan):
        lines += rlvr_facts(plan)
    lines += [("forward", text) for text in forward_sentences(plan)]
    lines.append(("steps", steps_sentence(plan)))
    lines.append(("output", str(plan.output_dir)))
    lines.append(("checkpoints", f"{plan.checkpoint_dir}" if plan.save_steps else "none (save_steps 0)"))
    lines.append(("logs", str(plan.log_dir)))
    if plan.dump_dir is not None:
        lines.append(("samples", str(plan.dump_dir)))
    return lines


def model_sentences(plan: Plan) -> list[str]:
    """Each model with the roles that load it."""
    users: dict[str, list[str]] = {}
    for role in plan.roles.values():
        if role.model_path is not None:
            users.setdefault(role.model_path, []).append(role.name)
    return [f"{path} ({', '.join(names)})" for path, names in users.items()]


def forward_sentences(plan: Plan) -> list[str]:
    """How roles cut passes without gradient, where it is not by rows with their padding."""
    special = [
        (role.name, role.forward_rule)
        for role in plan.roles.values()
        if role.strategy_name not in (None, *GENERATION_STRATEGIES)
    ]
    return [f"{name}: {rule.sentence()}" for name, rule in special if rule.removes_padding or rule.max_tokens]


def batch_facts(plan: Plan) -> list[tuple[str, str]]:
    if isinstance(plan, RLVRPlan):
        samples = count(plan.samples_per_step, "sample")
        total = f"{count(plan.prompts_per_step, 'prompt')} x {plan.group_size} = {samples}"
        return [
            ("batch" if name == "actor_train" else name, f"{total}; {training.sentence()}")
            for name, training in plan.training.items()
        ]
    assert isinstance(plan, SFTPlan)
    return [("batch", plan.training["sft_train"].sentence())]


def rlvr_facts(plan: RLVRPlan) -> list[tuple[str, str]]:
    lengths = (
        f"prompt {plan.prompt_length} + response {plan.response_length} = {plan.sequence_length} tokens"
        f" (at most {plan.max_new_tokens} new)"
    )
    for one in plan.validation_sets if plan.eval_steps else ():
        response = one.sequence_length - one.prompt_length
        lengths += (
            f"; validation {one.name}{' ' if one.name else ''}{one.prompt_length} + {response} = {one.sequence_length}"
            f" (at most {one.max_new_tokens} new)"
        )
    reference = "reference log-probs" + ("" if "reference" in plan.roles else " (actor_train without its adapters)")
    passes = {
        reference: plan.needs_reference,
        "greedy baseline": plan.needs_greedy_baseline,
        "old log-probs": plan.needs_old_log_probs,
        "values": plan.needs_critic,
    }
    needed = ", ".join(name for name, needed in passes.items() if needed) or "none"
    facts = [("lengths", lengths), ("passes", f"{needed} (in addition to generation and training)")]
    return [*facts, ("ahead", run_ahead_sentence(plan))] if plan.is_async else facts


def run_ahead_sentence(plan: RLVRPlan) -> str:
    """How far generation may run ahead, how old samples may be, and which policy the loss takes for theirs."""
    ahead = RunAhead.of(plan.async_generation_ratio, plan.prompts_per_step, plan.num_additional_prompts)
    steps = "1 step" if plan.async_generation_ratio == 1 else f"{plan.async_generation_ratio:g} steps"
    age = count(ahead.max_lag, "version")
    old = "; ratios against the engine's log-probs" if plan.engine_log_probs_as_old else ""
    prompts = f"{count(ahead.capacity, 'prompt')} in flight or waiting at a time"
    turns = "; stopped while others have its devices" if plan.engines_take_turns else ""
    return f"generation up to {steps}: {prompts}; samples at most {age} of the weights old{turns}{old}"


def steps_sentence(plan: Plan) -> str:
    if plan.max_steps is None:
        parts = ["until the data has been seen num_train_epochs times"]
    else:
        parts = [count(plan.max_steps, "step")]
        for name, training in plan.training.items():
            if training.total_optimizer_steps != plan.max_steps:
                parts.append(f"{training.total_optimizer_steps:,} optimizer steps of {name}")
    beside = " (concurrent with training)" if isinstance(plan, RLVRPlan) and plan.validates_beside_training else ""
    parts.append(f"validation every {plan.eval_steps}{beside} and at the end" if plan.eval_steps else "no validation")
    parts.append(f"a checkpoint every {plan.save_steps}" if plan.save_steps else "no checkpoints")
    return "; ".join(parts)
