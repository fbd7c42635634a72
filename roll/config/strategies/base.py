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

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together and are given the same rows."""
        return 1

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        """Report options that do not fit the role.

        Args:
            name: of the role's section.
            world_size: the role's ranks.
            trains: the role takes optimizer steps.
        """


@dataclass(frozen=True)
class Package:
    """An optional package that a backend needs."""

    module: str
    """Found when it is installed."""
    install: str
    """The command, or where to read about it."""


@dataclass(frozen=True)
class Backend:
    """Torch-free description of a strategy folder: what configuration, plan, checks and preflight know of it."""

    name: str
    options: type[StrategyConfig]
    """Of ``strategy_config``."""
    computes: str | None = None
    """Dotted path of the class that computes batches (:class:`roll.strategies.base.ModelStrategy`)."""
    generates: str | None = None
    """Dotted path of the generation engine."""
    trains: bool = False
    """The class that computes batches takes optimizer steps as well, under ``<name>_train``; ``<name>_infer`` builds it
    without an optimizer."""
    checkpoints: str | None = None
    """Format of its training checkpoints; backends of one format read each other's."""
    package: Package | None = None
    """None: it comes with the base install."""
    size_keys: tuple[str, ...] = ()
    """Options that give an engine's tensor-parallel size; its workers then take ``devices_per_worker`` devices."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Values of ``strategy_name``."""
        return (f"{self.name}_train", f"{self.name}_infer") if self.trains else (self.name,)


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
