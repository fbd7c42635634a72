"""Shows a plan on a terminal: who runs where, batch arithmetic, passes, steps, folders, warnings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll import __version__
from roll.config.checks.keys import default_of, has_use, roles_of, sections_of, unmet_condition
from roll.config.loader import LoadedConfig
from roll.config.pipelines import PipelineDefinition
from roll.config.plan.plan import Plan
from roll.config.reading.compose import ROLL
from roll.config.reading.errors import count
from roll.config.reading.fields import Choice
from roll.config.reading.masking import masked, masked_text
from roll.config.reading.schema import rules_of
from roll.config.run import PolicyRunConfig
from roll.config.strategies.registry import generation_strategies

WIDEST_DEVICE_TABLE = 8


def render_plan(loaded: LoadedConfig[Any], console: Console) -> None:
    """Print the plan of a loaded configuration."""
    plan = loaded.plan
    nodes = f"{count(plan.num_nodes, 'node')} x {count(plan.num_devices_per_node, 'device')}"
    console.print(line(f"{plan.exp_name}  ", "bold", f"{plan.pipeline} pipeline, {nodes}  ({loaded.source})"))
    console.print(role_table(plan))
    for label, text in [*facts(loaded.pipeline, plan), *default_facts(loaded)]:
        console.print(line(f"{label:<12}", "bold", text), soft_wrap=True)
    for notice in loaded.warnings:
        console.print(line(f"{'note':<12}", "yellow", str(notice)), soft_wrap=True)


def default_facts(loaded: LoadedConfig[Any]) -> list[tuple[str, str]]:
    """Whose defaults a policy has."""
    if not isinstance(loaded.config, PolicyRunConfig):
        return []
    is_rolls = loaded.resolved.get("defaults") == ROLL
    return [
        ("defaults", "ROLL's (a group of 1, top_p 0.7, top_k 50 ...)" if is_rolls else "of GRPO, as verl's and TRL's")
    ]


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
        workers = f"{role.world_size}" + (f" x {role.num_gpus_per_worker}" if role.num_gpus_per_worker > 1 else "")
        texts = (role.name, does, workers, *cells, ", ".join(role.colocated_with))
        table.add_row(*map(Text, texts))
    return table


def compact(devices: Sequence[int]) -> str:
    """``0-7, 12`` for a list of ids."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def facts(pipeline: PipelineDefinition, plan: Plan) -> list[tuple[str, str]]:
    """Label and sentence of everything but the role table."""
    users: dict[str, list[str]] = {}
    for role in plan.roles.values():
        if role.model_path is not None:
            users.setdefault(role.model_path, []).append(role.name)
    lines = [("model", f"{path} ({', '.join(names)})") for path, names in users.items()]
    lines += [*pipeline.batch_facts(plan), *pipeline.facts(plan)]
    engines = (None, *generation_strategies())
    rules = [(one.name, one.forward_rule) for one in plan.roles.values() if one.strategy_name not in engines]
    # Micro-batches of padded rows, which most roles have, are not worth a line.
    special = [(name, rule) for name, rule in rules if rule.removes_padding or rule.max_tokens]
    lines += [("forward", f"{name}: {rule.sentence()}") for name, rule in special]
    parts = ["until the data has been seen num_train_epochs times"]
    if plan.max_steps is not None:
        trained = {name: training.total_optimizer_steps for name, training in plan.training.items()}
        others = [f"{steps:,} optimizer steps of {name}" for name, steps in trained.items() if steps != plan.max_steps]
        parts = [count(plan.max_steps, "step"), *others]
    validation = f"validation every {plan.eval_steps}{pipeline.validation_words(plan)} and at the end"
    parts.append(validation if plan.eval_steps else "no validation")
    parts.append(f"a checkpoint every {plan.save_steps}" if plan.save_steps else "no checkpoints")
    lines.append(("steps", "; ".join(parts)))
    lines.append(("output", str(plan.output_dir)))
    lines.append(("checkpoints", f"{plan.checkpoint_dir}" if plan.save_steps else "none (save_steps 0)"))
    lines.append(("logs", str(plan.log_dir)))
    if plan.dump_dir is not None:
        lines.append(("samples", str(plan.dump_dir)))
    return lines


def defaults_in_force(loaded: LoadedConfig[Any]) -> dict[str, Any]:
    """Keys that were not written and that the run reads, each with its default, in the order of the sections.

    Left out are nulls and empty values, whose meaning is in the documentation of the key, and roles that this run does
    not have.
    """
    config, pipeline = loaded.config, loaded.pipeline
    facts = pipeline.effective(config)
    roles = {name: role for name, role in roles_of(config) if not hasattr(config, name) or name in loaded.plan.roles}
    found: dict[str, Any] = {}
    for path, section in sections_of(config, ""):
        role = next((name for name in roles if path == name or path.startswith(f"{name}.")), None)
        if role is None and any(path == name or path.startswith(f"{name}.") for name, _ in roles_of(config)):
            continue
        for item in fields(section):
            key, value = f"{path}.{item.name}" if path else item.name, getattr(section, item.name)
            value = value.name if isinstance(value, Choice) else value
            if isinstance(getattr(config, path, None), Choice) and value != default_of(item):
                continue  # an option that was written, perhaps under a flat name
            holds_sections = is_dataclass(value) or (isinstance(value, dict) and any(map(is_dataclass, value.values())))
            names = (key.removesuffix(item.name) + name for name in (item.name, *rules_of(item).aliases))
            if value in (None, {}, [], ()) or holds_sections or any(map(loaded.is_written, names)):
                continue
            if unmet_condition(item, section, config, facts) is not None:
                continue
            if role is None or has_use(key.removeprefix(f"{role}."), role, roles[role], config, pipeline):
                found[key] = value
    return found


def effective_yaml(loaded: LoadedConfig[Any]) -> str:
    """The configuration as YAML that loads again, secrets masked. Comments say what was not written: the values that
    the plan filled in, by role, and the defaults in force."""
    written = loaded.pipeline.started(loaded.config)
    planned = {
        f"{name}.{key}": value
        for name, role in loaded.plan.roles.items()
        for key, value in differences(asdict(written[name]), asdict(role.section))
    }
    defaults = {key: value for key, value in defaults_in_force(loaded).items() if key not in planned}
    parts = [yaml.safe_dump(masked(loaded.resolved), sort_keys=False, allow_unicode=True, width=120)]
    for title, values in (("Filled in by the plan, by role", planned), (f"Defaults of roll {__version__}", defaults)):
        if values:
            parts += [f"\n# {title}:\n", *(f"# {key}: {_scalar(key, value)}\n" for key, value in values.items())]
    return "".join(parts)


def _scalar(key: str, value: object) -> str:
    """A value on one line of YAML, masked as its key asks for."""
    last = key.rpartition(".")[2]
    plain = masked({last: json.loads(json.dumps(value, default=str))})
    shown = yaml.safe_dump(plain, default_flow_style=True, width=math.inf).strip()[1:-1].partition(": ")[2]
    return json.dumps(plain[last], ensure_ascii=False) if "\n" in shown else shown  # a line break, as JSON writes it


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Key path and new value of what ``after`` has and ``before`` has not, or has otherwise."""
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            yield from differences(old, value, f"{path}{key}.")
        elif value != old:
            yield f"{path}{key}", value
