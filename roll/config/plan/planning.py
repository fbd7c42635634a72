"""Derives the parts of a plan that pipelines share: placement, batch arithmetic, finished role sections, folders.

The checks come first: nothing is reported here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from roll.config.model_files import loadable
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.plan.plan import RolePlan, TrainingPlan, micro_batching, with_packed_lengths
from roll.config.reading.errors import Problems
from roll.config.roles import DataArguments, GeneratingArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.registry import is_sized_engine, read_strategy_config, with_engine_size

# Keys that a validation's data section inherits where it is silent: columns, and the form of prompts.
INHERITED_KEYS = (
    "template",
    "chat_template_kwargs",
    "system_prompt",
    "tag",
    "id",
    "response",
    "ground_truth",
    "images",
    "videos",
)
# Completes the section of a role with what only its pipeline knows.
Finish = Callable[[str, WorkerConfig], WorkerConfig]


def world_size(role: WorkerConfig) -> int:
    """One worker per :func:`devices_per_worker` devices; without devices, ``world_size`` workers."""
    if role.device_mapping is not None:
        return max(1, len(role.device_mapping) // devices_per_worker(role))
    return role.world_size or 1


def devices_per_worker(role: WorkerConfig) -> int:
    """An engine's own size, else ``num_gpus_per_worker``."""
    role = with_engine_size(role)
    # A collector to throw away: check_strategy reports mistakes in the options.
    options = read_strategy_config(role.strategy_args, role.name, Problems())
    if is_sized_engine(role) and options is not None:
        return options.devices_per_worker
    return role.num_gpus_per_worker


def data_parallel_size(role: WorkerConfig) -> int:
    """Ranks that compute different rows: all of them, unless the model or each sequence is cut over some."""
    options = read_strategy_config(role.strategy_args, role.name, Problems())
    ranks = world_size(role)
    return max(1, ranks if options is None else options.parallel_dims(role, ranks).dp)


def training_plan(
    role: WorkerConfig, sequence_length: int, samples: int, epochs: int, num_steps: int | None
) -> TrainingPlan:
    arguments = role.training_args
    return TrainingPlan(
        samples_per_step=samples,
        micro_batch_size=arguments.per_device_train_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        dp_size=data_parallel_size(role),
        epochs=epochs,
        num_steps=num_steps,
        rule=micro_batching(with_packed_lengths(role, sequence_length), trains=True),
    )


def role_plans(definition: PipelineDefinition, config: RunConfig, finish: Finish) -> dict[str, RolePlan]:
    """The plan of every role whose workers a run starts; ``finish`` is given sections with model, workers and packed
    lengths filled in."""
    models, sections = definition.models(config), definition.started(config)
    sequence = definition.longest_row(config)
    plans = {}
    for name, role in sections.items():
        is_model = name in models
        plan = RolePlan(
            name=name,
            key=definition.section_key(name),
            section=role,
            strategy_name=role.strategy_args.strategy_name if is_model else None,
            device_mapping=tuple(role.device_mapping or ()),
            num_gpus_per_worker=devices_per_worker(role),
            world_size=world_size(role),
            dp_size=data_parallel_size(role),
            colocated_with=tuple(n for n, other in sections.items() if n != name and shares_devices(role, other)),
            model_path=loadable(definition.model(config, name, role)[1]) if is_model else None,
            sequence_length=sequence,
            forward_rule=micro_batching(with_packed_lengths(role, sequence), trains=False),
            worker_cls=definition.worker_name(name, role),
        )
        section = finished_section(role, plan) if is_model else role
        section = replace(section, name=name, worker_cls=plan.worker_cls, world_size=plan.world_size)
        plans[name] = replace(plan, section=finish(name, section))
    return plans


def finished_section(section: WorkerConfig, plan: RolePlan) -> WorkerConfig:
    """The section of a role that holds a model, with what the plan derived filled in: model path, devices of a worker,
    an engine's ranks, the length of packed rows."""
    model_args = replace(section.model_args, model_name_or_path=plan.model_path)
    section = with_packed_lengths(with_engine_size(section), plan.sequence_length)
    return replace(section, model_args=model_args, num_gpus_per_worker=plan.num_gpus_per_worker)


def with_cache_length(role: WorkerConfig, length: int) -> WorkerConfig:
    """The role with a KV cache for sequences of ``length`` tokens, where its own section leaves that open."""
    # A null in the file leaves the length open, too.
    options = {"max_model_len": length} | {k: v for k, v in role.strategy_args.strategy_config.items() if v is not None}
    return replace(role, strategy_args=replace(role.strategy_args, strategy_config=options))


def shares_devices(one: WorkerConfig, other: WorkerConfig) -> bool:
    return bool(set(one.device_mapping or ()) & set(other.device_mapping or ()))


def shared_plan(
    definition: PipelineDefinition,
    config: RunConfig,
    exp_name: str,
    written: Written,
    finish: Finish = lambda name, section: section,
) -> dict[str, Any]:
    """The fields of a :class:`roll.config.plan.plan.Plan` that every pipeline derives in the same way.

    Left to the pipeline: ``training``, ``max_steps``, ``eval_steps``.
    """
    sections = definition.started(config).values()
    needed = max((device for role in sections for device in role.device_mapping or ()), default=0) + 1
    # A node is no larger than the ids ask for unless the file says so.
    per_node = config.num_gpus_per_node if written("num_gpus_per_node") else min(config.num_gpus_per_node, needed)
    output, logs = Path(config.output_dir), Path(config.logging_dir)
    # The shared defaults get a subfolder named after the experiment; the logs of a run with an `output_dir` of its own
    # are in it, so that runs of one file do not replace each other's.
    is_shared = output == Path("output")
    if logs == Path("output/logs"):
        logs = logs / exp_name if is_shared else output / "logs"
    output = output / exp_name if is_shared else output
    return {
        "pipeline": definition.name,
        "exp_name": exp_name,
        "roles": role_plans(definition, config, finish),
        "num_devices_per_node": per_node,
        "num_nodes": ceil(needed / per_node),
        "output_dir": output,
        "checkpoint_dir": output / "checkpoints",
        "log_dir": logs,
        "dump_dir": Path(config.rollout_dump_dir) if config.rollout_dump_dir else None,
        "save_steps": max(0, config.save_steps),
        "sequence_length": definition.longest_row(config),
    }


def validation_data(key: str, own: DataArguments, base: DataArguments, written: Written) -> DataArguments:
    """The data section at ``key``; what it leaves out of columns and template is as in ``base``."""
    inherited = {name: getattr(base, name) for name in INHERITED_KEYS if not written(f"{key}.{name}")}
    if own.prompt is None and own.messages is None:
        inherited |= {"prompt": base.prompt, "messages": base.messages}
    return replace(own, **inherited)


def validation_sampling(
    key: str, own: GeneratingArguments, base: GeneratingArguments, written: Written
) -> GeneratingArguments:
    """The sampling section at ``key``; what it leaves out is as in ``base``."""
    names = [item.name for item in fields(GeneratingArguments)]
    return replace(own, **{name: getattr(base, name) for name in names if not written(f"{key}.{name}")})
