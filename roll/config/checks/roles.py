"""Checks that look at several keys at once. Shared by all pipelines: devices, strategies, models, files.

A check is silent about keys that were wrong by themselves already, so that one mistake gives one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.checks.models import check_model
from roll.config.data import name_problem
from roll.config.lora import check_lora
from roll.config.names import DECAY_TYPES, LR_SCHEDULER_OPTIONS, TEMPLATE_ENDINGS, UNPUBLISHED_TRACKERS
from roll.config.pipelines import COMPUTES_LOG_PROBS, GENERATES, TRAINS, PipelineDefinition, Written
from roll.config.plan.micro_batching import check_micro_batching
from roll.config.plan.planning import devices_per_worker, world_size
from roll.config.reading.errors import Problems
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.registry import (
    AVAILABLE,
    GENERATION_STRATEGIES,
    StrategyConfig,
    read_strategy_config,
)


@dataclass(frozen=True)
class Checks:
    """What a check works with."""

    problems: Problems
    written: Written
    check_files: bool
    pipeline: PipelineDefinition
    """Whose configuration is checked."""
    is_own: Callable[[str], bool] = field(default=lambda key: True)
    """A key stands in the file itself or on the command line, not in a file of its ``defaults``, which holds what
    several files share."""

    def add(self, key: str, value: Any, rule: str, example: Any = None) -> None:
        """Report a mistake, unless the key has one already."""
        if not self.broken(key):
            self.problems.add(key, value, rule, example)

    def missing(self, key: str, rule: str, example: Any = None) -> None:
        if not self.broken(key):
            self.problems.missing(key, rule, example)

    def note(self, key: str, text: str) -> None:
        self.problems.note(key, text)

    def broken(self, *keys: str) -> bool:
        """True when one of the keys, or a section above or a key below it, has a mistake already."""
        return any(
            error.key == key or error.key.startswith(f"{key}.") or key.startswith(f"{error.key}.")
            for error in self.problems.errors
            for key in keys
        )


def check_roles(config: RunConfig, checks: Checks) -> dict[str, StrategyConfig]:
    """Devices, strategy and model of every role that holds one; the strategies' typed options."""
    strategies = {}
    pipeline = checks.pipeline
    for role_name, role in pipeline.models(config).items():
        name = pipeline.section_key(role_name)
        check_devices(name, role, checks)
        options = check_strategy(name, role, checks)
        check_model(config, role_name, role, options, checks)
        check_lora(name, role, pipeline.task_of(name, role) is TRAINS, pipeline.compares_log_probs, checks)
        if options is not None:
            strategies[name] = options
            check_strategy_fit(name, role, options, checks)
            check_rows(config, name, role, checks)
    check_nodes(config, checks)
    note_tracker(config, checks)
    return strategies


def check_devices(name: str, role: WorkerConfig, checks: Checks) -> None:
    key, devices = f"{name}.device_mapping", role.device_mapping
    if devices is None:
        checks.missing(key, "is needed: the devices (CPU slots on a host without accelerators) of this role", "[0]")
        return
    per_worker = role.num_gpus_per_worker
    if checks.pipeline.task_of(name, role) is not GENERATES and per_worker != 1:
        checks.add(f"{name}.num_gpus_per_worker", per_worker, "must be 1: every device is a rank of its own here", 1)
        return
    size = devices_per_worker(role)
    if len(devices) % size and size == per_worker:
        rule = f"must divide the {len(devices)} devices of device_mapping"
        checks.add(f"{name}.num_gpus_per_worker", per_worker, rule, 1)
    elif len(devices) % size:
        rule = f"must be a multiple of {size} devices: strategy_config makes engines of {size} ranks"
        checks.add(key, devices, rule, f"list(range(0, {size * max(1, len(devices) // size)}))")
    if role.world_size is not None and role.world_size != world_size(role):
        rule = f"device_mapping gives {world_size(role)} workers; leave world_size out, or make them agree"
        checks.add(f"{name}.world_size", role.world_size, rule, world_size(role))


def check_nodes(config: RunConfig, checks: Checks) -> None:
    """Device ids exist, and no worker spans two nodes."""
    per_node = config.num_gpus_per_node
    for name, role in checks.pipeline.models(config).items():
        devices = role.device_mapping or []
        key = f"{checks.pipeline.section_key(name)}.device_mapping"
        if config.num_nodes is not None and devices and max(devices) >= per_node * config.num_nodes:
            rule = (
                f"device {max(devices)} does not exist: num_nodes {config.num_nodes} x num_gpus_per_node {per_node} "
                f"gives ids 0 to {per_node * config.num_nodes - 1}"
            )
            checks.add(key, devices, rule, f"list(range(0, {per_node * config.num_nodes}))")
        size = devices_per_worker(role)
        for start in range(0, len(devices) - size + 1, size):
            group = devices[start : start + size]
            if len({device // per_node for device in group}) > 1:
                rule = f"the worker on devices {group} would span two nodes of num_gpus_per_node {per_node}"
                checks.add(key, devices, rule)
                break


def check_strategy(name: str, role: WorkerConfig, checks: Checks) -> StrategyConfig | None:
    path, strategy = f"{name}.strategy_args", role.strategy_args.strategy_name
    if checks.broken(path):
        return None
    task = checks.pipeline.task_of(name, role)
    able = task.strategies
    if strategy in AVAILABLE and strategy not in able:
        if task is COMPUTES_LOG_PROBS and strategy in GENERATION_STRATEGIES:
            checks.problems.not_available(f"{path}.strategy_name", strategy, "log-probs by an engine", able[0])
        else:
            checks.add(
                f"{path}.strategy_name", strategy, f"{name} {task.name}; that needs {' or '.join(able)}", able[0]
            )
        return None
    return read_strategy_config(role.strategy_args, path, checks.problems)


def check_strategy_fit(name: str, role: WorkerConfig, options: StrategyConfig, checks: Checks) -> None:
    """Options of a strategy against the role and its devices."""
    trains = checks.pipeline.task_of(name, role) is TRAINS
    options.check(name, role, world_size(role), trains, checks.problems)


def check_rows(config: RunConfig, name: str, role: WorkerConfig, checks: Checks) -> None:
    """How rows form micro-batches, against the longest of them."""
    task = checks.pipeline.task_of(name, role)
    if task is GENERATES or checks.broken("prompt_length", "response_length", "sequence_length"):
        return
    longest = checks.pipeline.longest_row(config)
    arguments = role.training_args
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    check_micro_batching(name, role, longest, rows if task is TRAINS else None, checks.problems)


def check_data_files(key: str, arguments: DataArguments, checks: Checks) -> None:
    """At least one data file, each of a known kind and there."""
    names = arguments.file_name
    if not names:
        checks.missing(f"{key}.file_name", "is needed: the data file or files", "[data/train.jsonl]")
        return
    for name in [names] if isinstance(names, str) else names:
        rule = name_problem(name, checks.check_files)
        if rule is not None:
            example = f"{Path(name).stem or 'train'}.jsonl" if rule.startswith("must be") else None
            checks.add(f"{key}.file_name", name, rule, example)
    if arguments.filter_overlong_prompts and arguments.truncation != "error":
        checks.note(f"{key}.truncation", "has no effect with filter_overlong_prompts: true")
    check_template_file(f"{key}.template", arguments.template, checks)


def check_template_file(key: str, template: str | None, checks: Checks) -> None:
    """A template that is a file is there."""
    if template is None or not template.endswith(TEMPLATE_ENDINGS) or not checks.check_files:
        return
    if not Path(template).expanduser().is_file():
        checks.add(key, template, f"no such file (relative names start from {Path.cwd()})")


def note_tracker(config: RunConfig, checks: Checks) -> None:
    """A tracker that is not public, and what takes its place."""
    names = [config.track_with] if isinstance(config.track_with, str) else config.track_with
    for name in names:
        if name in UNPUBLISHED_TRACKERS:
            checks.note("track_with", f"{name} is not public: metrics go to {UNPUBLISHED_TRACKERS[name]}")


def check_columns(key: str, arguments: DataArguments, checks: Checks) -> None:
    if arguments.prompt is not None and arguments.messages is not None:
        rule = f"excludes {key}.messages ({arguments.messages}): keep the one that the file has"
        checks.add(f"{key}.prompt", arguments.prompt, rule)


def check_resume(config: RunConfig, checks: Checks) -> None:
    path = config.resume_from_checkpoint
    if isinstance(path, str) and checks.check_files and not Path(path).expanduser().is_dir():
        checks.add("resume_from_checkpoint", path, "no such checkpoint folder; true continues from the newest", "true")


def check_schedule(name: str, role: WorkerConfig, total_steps: int | None, checks: Checks) -> None:
    """Warm-up within the run, and options that the schedule has."""
    kind, options = role.training_args.lr_scheduler_type, role.training_args.lr_scheduler_kwargs
    known = LR_SCHEDULER_OPTIONS.get(kind, tuple(options))
    for option, value in options.items():
        path = f"{name}.training_args.lr_scheduler_kwargs.{option}"
        if option not in known:
            checks.add(path, value, f"{kind} has no such option; it has {', '.join(known) or 'none'}")
        elif option == "decay_type" and value not in DECAY_TYPES:
            checks.add(path, value, f"must be one of {', '.join(DECAY_TYPES)}", DECAY_TYPES[0])
        elif option != "decay_type" and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            checks.add(path, value, "must be a number of at least 0", 0.5)
    warmup, key = role.training_args.warmup_steps, f"{name}.training_args.warmup_steps"
    total = role.training_args.max_steps or total_steps
    if total is not None and warmup >= total > 0:
        checks.note(
            key, f"{warmup} warm-up steps, but the run makes {total} optimizer steps: full rate is never reached"
        )


def note_engine_length(options: dict[str, StrategyConfig], prompt: int, sequence: int, checks: Checks) -> None:
    """An engine shorter than the longest sequence cuts responses; one without room for a prompt cannot work."""
    engine = options.get("actor_infer")
    longest: int | None = getattr(engine, "max_model_len", None)
    if longest is None:
        return
    key = "actor_infer.strategy_args.strategy_config.max_model_len"
    if longest <= prompt:
        rule = f"leaves no room for a response after prompts of {prompt} tokens"
        checks.add(key, longest, rule, sequence)
    elif longest < sequence:
        checks.note(key, f"{longest} is less than prompt plus response ({sequence}): responses end there")
