"""The common base of the strategies' option classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.config.reading.errors import Problems
    from roll.config.roles import WorkerConfig


@dataclass(frozen=True)
class StrategyConfig:
    """Base of the strategies' options."""

    @property
    def devices_per_worker(self) -> int:
        """Devices that one worker of the role computes on by itself."""
        return 1


SIZE_KEYS = {"vllm": ("tensor_parallel_size",), "sglang": ("tp_size", "tensor_parallel_size")}
"""By strategy: the keys of an engine's tensor-parallel size."""


def with_engine_size(role: WorkerConfig) -> WorkerConfig:
    """The role with its engines' tensor-parallel size: as ``strategy_config`` says, else ``num_gpus_per_worker``, which
    ROLL's files often give alone."""
    arguments, keys = role.strategy_args, SIZE_KEYS.get(role.strategy_args.strategy_name)
    options = arguments.strategy_config
    if keys is None or any(options.get(key) is not None for key in keys):
        return role
    stages = options.get("pipeline_parallel_size") if arguments.strategy_name == "vllm" else 1
    if not isinstance(stages, int) or stages < 1:
        stages = 1
    if role.num_gpus_per_worker == 1 or role.num_gpus_per_worker % stages:
        return role
    sized = {**options, keys[0]: role.num_gpus_per_worker // stages}
    return replace(role, strategy_args=replace(arguments, strategy_config=sized))


def own_weights(role: WorkerConfig) -> WorkerConfig:
    """The role with the weights of its model folder: nobody sends it any."""
    options = {**role.strategy_args.strategy_config, "load_format": "auto"}
    return replace(role, strategy_args=replace(role.strategy_args, strategy_config=options))


def check_engine_args(path: str, options: Any, decided: Mapping[str, str], problems: Problems) -> None:
    """Report arguments that have a key of their own, and those that the strategy fills in.

    Args:
        path: of the role's ``strategy_config``.
        options: the dataclass of these options, with ``engine_args``.
        decided: arguments that the strategy fills in, and what decides about them.
    """
    own = {item.name for item in fields(options)}
    for key, value in options.engine_args.items():
        if key in own:
            problems.add(f"{path}.engine_args.{key}", value, f"has a key of its own: write {path}.{key}")
        elif key in decided:
            problems.add(f"{path}.engine_args.{key}", value, f"is not yours to set: {decided[key]} decides")
