"""A role's section as its workers get it."""

from __future__ import annotations

from dataclasses import replace

from roll.config.engine_args import with_engine_size
from roll.config.micro_batching import with_packed_lengths
from roll.config.plan import RolePlan
from roll.config.roles import WorkerConfig


def role_config(section: WorkerConfig, plan: RolePlan) -> WorkerConfig:
    """The section with what the plan derived filled in: model path, number of workers and their devices, the role's own
    worker class, an engine's ranks, the length of packed rows."""
    model_args = replace(section.model_args, model_name_or_path=plan.model_path)
    section = with_packed_lengths(with_engine_size(section), plan.sequence_length)
    return replace(
        section,
        name=plan.name,
        model_args=model_args,
        world_size=plan.world_size,
        num_gpus_per_worker=plan.num_gpus_per_worker,
        worker_cls=plan.worker_cls,
    )
