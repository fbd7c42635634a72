"""Defaults of a policy: values with which GRPO learns where a file leaves them open, and ROLL's in ROLL's files.

A file is ROLL's when it has a ``hydra`` section, which every file of ROLL's that can be run has, or when it says
``defaults: roll``. For every key that is not in the table below, and in other pipelines, both sets are the same: the
default of the key's dataclass.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast

from roll.config.choices import traits
from roll.config.lora import uses_lora
from roll.config.pipelines import PipelineDefinition, Written
from roll.config.plan.planning import data_parallel_size
from roll.config.roles import WorkerConfig
from roll.config.run import PolicyRunConfig
from roll.config.strategies.registry import backend_of

S = TypeVar("S")
P = TypeVar("P", bound=PolicyRunConfig)

GROUP = 8  # samples of a prompt, as in DeepSeekMath's and verl's examples of GRPO (which have 8 to 64)
# Sampling from the policy itself: the loss is that of these samples, not of those of a truncated distribution.
SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
MICRO_BATCH = 4  # rows of a micro-batch at most; more of them make the optimizer step of the whole batch
LEARNING_RATE = 1.0e-6
LORA_LEARNING_RATE = 1.0e-5  # adapters learn at about ten times the rate of a whole model
SHARING = ("actor_train", "actor_infer", "reference", "critic")  # roles that are computed on every device, in turns


# Words of the reference page: what takes the place of the dataclass's default, which is ROLL's.
LEARNING_DEFAULTS: Mapping[str, str] = {
    "estimator": "`grpo`, with a `critic` section `gae`",
    "num_return_sequences_in_group": f"{GROUP} with `grpo`",
    "group_size": f"{GROUP} with `grpo`",
    **{f"generating_args.{key}": f"{value:g}" for key, value in SAMPLING.items()},
    "training_args.learning_rate": f"{LEARNING_RATE:g}, with LoRA {LORA_LEARNING_RATE:g}",
    "training_args.per_device_train_batch_size": f"the largest up to {MICRO_BATCH} that divides the rows of a rank",
    "training_args.gradient_accumulation_steps": "one optimizer step of the whole batch",
    "num_gpus_per_node": "as many as the roles' devices, without any the GPUs of this host, else 1",
    "device_mapping": f"all devices of a node for {', '.join(SHARING)}",
}


def with_estimator(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file with the estimator of :data:`LEARNING_DEFAULTS`: its options depend on it, and so are read after it."""
    key = next((name for name in ("estimator", "adv_estimator") if name in data), "estimator")
    section = data.get(key, {})
    if data.get("critic") is not None or not isinstance(section, Mapping) or "name" in section:
        return data
    return {**data, key: {**section, "name": "grpo"}}


def with_learning_defaults(config: P, pipeline: PipelineDefinition, written: Written) -> P:
    """The configuration with :data:`LEARNING_DEFAULTS` in place of what was not written."""
    if traits(config.estimator).norm == ("group", "group"):
        config = _filled(config, config.group_key, _group_size(config, written), written)
    for section in ("actor_infer", "train_env_manager", "validation"):
        for key, value in SAMPLING.items():
            config = _filled(config, f"{section}.generating_args.{key}", value, written)
    rate = LORA_LEARNING_RATE if uses_lora(config.actor_train.model_args) else LEARNING_RATE
    config = _filled(config, "actor_train.training_args.learning_rate", rate, written)
    devices = _devices(config, pipeline, written)
    config = _filled(config, "num_gpus_per_node", devices, written)
    for name in SHARING:
        role = getattr(config, name)
        if role is not None and not backend_of(role.strategy_args.strategy_name).is_remote:
            config = _filled(config, f"{name}.device_mapping", list(range(devices)), written)
    # Last, since it divides the batch by the devices and group sizes chosen above.
    for name in ("actor_train", "critic"):
        role = getattr(config, name)
        if role is not None:
            whole: dict[str, Any] = {name: _in_one_step(role, name, config.samples_per_step, written)}
            config = replace(config, **whole)
    return config


def _group_size(config: PolicyRunConfig, written: Written) -> int:
    """:data:`GROUP`; of episodes as many as divide the batch that was written among its tasks."""
    manager = getattr(config, "train_env_manager", None)
    if manager is None or not written("rollout_batch_size"):
        return GROUP
    episodes, tasks = config.samples_per_step, manager.num_env_groups
    if written("train_env_manager.num_env_groups") and episodes % tasks == 0:
        return episodes // tasks
    return next(size for size in range(GROUP, 0, -1) if episodes % size == 0)


def _filled(section: S, path: str, value: object, written: Written) -> S:
    """``section`` with ``value`` at a dotted path that it has and that was not written."""
    name, _, rest = path.partition(".")
    is_there = hasattr(section, name) and not (rest and getattr(section, name) is None)
    if not is_dataclass(section) or not is_there or written(path):
        return section
    if rest:
        value = _filled(getattr(section, name), rest, value, lambda key: written(f"{name}.{key}"))
    changed: dict[str, Any] = {name: value}
    return cast(S, replace(cast(Any, section), **changed))


def _devices(config: PolicyRunConfig, pipeline: PipelineDefinition, written: Written) -> int:
    """Devices of a node: as written, else as many as the roles name, else the accelerators of this host, at least 1."""
    named = [device for role in pipeline.models(config).values() for device in role.device_mapping or ()]
    if written("num_gpus_per_node"):
        return config.num_gpus_per_node
    if named:
        return min(max(named) + 1, config.num_gpus_per_node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Device files, since no library of a driver is loaded for a check.
    found = (
        len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len([word for word in visible.split(",") if word])
    )
    return 1 if os.environ.get("ROLL_PLATFORM") == "cpu" else max(1, found)


def _in_one_step(role: WorkerConfig, name: str, samples: int, written: Written) -> WorkerConfig:
    """The role with micro-batches that make one optimizer step of a rollout batch, where that can be divided."""
    key = f"{name}.training_args"
    if written(f"{key}.gradient_accumulation_steps") or samples % (ranks := data_parallel_size(role)):
        return role
    arguments, rows = role.training_args, samples // ranks
    micro = arguments.per_device_train_batch_size
    if not written(f"{key}.per_device_train_batch_size"):
        micro = next(size for size in range(MICRO_BATCH, 0, -1) if rows % size == 0)
    if rows % micro:
        return role
    arguments = replace(arguments, per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro)
    return replace(role, training_args=arguments)
