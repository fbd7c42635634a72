"""The common base of the strategies' option classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from roll.config.reading.schema import section_fields

if TYPE_CHECKING:
    from roll.config.reading.errors import Problems
    from roll.config.roles import WorkerConfig


UpdateMode = Literal["full", "trained", "delta"]
"""Contents of a weight update: everything, what training changes, or of that the elements that have changed."""

ShapeProblem = tuple[str, Any, str, Any]
"""Key, value, rule and a value that works."""


@dataclass(frozen=True)
class StrategyConfig:
    """Base of the strategies' options."""

    @property
    def devices_per_worker(self) -> int:
        """Devices that one worker of the role computes on by itself."""
        return 1

    def replica_size(self, role: WorkerConfig) -> int:
        """Ranks that compute the same rows together."""
        return 1

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        """Report options that do not fit the role.

        Args:
            name: of the role's section.
            world_size: the role's ranks.
            trains: the role takes optimizer steps.
        """

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        """Sizes that do not fit the model.

        Args:
            name: of the role's section.
            model: its ``config.json``.
        """
        yield from ()


def model_size(model: Mapping[str, Any], key: str) -> int:
    """A positive number of a model's ``config.json`` (of the language model in it); 0 where it has none."""
    section = model.get("text_config")
    value = section.get(key) if isinstance(section, Mapping) and key not in model else model.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def largest_divisor(size: int, count: int) -> int:
    """The largest number up to ``size`` that divides ``count``."""
    return max(number for number in range(1, min(size, count) + 1) if count % number == 0)


def head_problems(key: str, size: int, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
    """An engine's tensor-parallel ranks take whole heads; a key-value head may be held by several ranks."""
    heads = model_size(model, "num_attention_heads")
    groups = model_size(model, "num_key_value_heads") or heads
    if heads and heads % size:
        rule = f"must divide the model's {heads} attention heads"
    elif groups and groups % size and size % groups:
        rule = f"must divide the model's {groups} key-value heads, or be a multiple of them"
    else:
        return
    yield key, size, rule, largest_divisor(size, gcd(heads, groups))


@dataclass(frozen=True)
class Package:
    """An optional package that a backend needs."""

    module: str
    """Found when it is installed."""
    install: str
    """The command, or where to read about it."""
    title: str = ""
    """As its makers write it."""
    tested: tuple[str, str] = ("0", "0")
    """Versions that this code was tried with: from the first up to, not including, the second."""


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
    scores: str | None = None
    """Dotted path of a class that gives log-probs of given tokens only, as a teacher needs them
    (:class:`roll.strategies.engines.scoring.ScoringStrategy`)."""
    is_remote: bool = False
    """The model is computed elsewhere: its roles have no devices."""
    trains: bool = False
    """The class that computes batches takes optimizer steps as well, under ``<name>_train``; ``<name>_infer`` builds it
    without an optimizer."""
    checkpoints: str | None = None
    """Format of its training checkpoints; backends of one format read each other's."""
    package: Package | None = None
    """None: it comes with the base install."""
    size_keys: tuple[str, ...] = ()
    """Options that give an engine's tensor-parallel size; its workers then take ``devices_per_worker`` devices."""
    updates: tuple[UpdateMode, ...] = ("full",)
    """Modes of weight updates that an engine takes; the first is what ``weight_sync.mode: auto`` means."""
    holds_sent_dtype: bool = False
    """It computes in the type of the weights that it is sent."""
    adapter_ranks: tuple[int, ...] = ()
    """Of an engine that computes with an adapter itself: the ranks that it makes room for when it starts."""
    adapter_arguments: Callable[[int], dict[str, Any]] | None = None
    """From an adapter's rank to the engine arguments that make this room."""
    only_plain_adapters: bool = False
    """Alongside adapters it trains in full only what stands outside of projections."""
    ulysses: bool = False
    """It deals with ``model_args.ulysses_size`` itself."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Values of ``strategy_name``."""
        return (f"{self.name}_train", f"{self.name}_infer") if self.trains else (self.name,)

    @property
    def names(self) -> tuple[str, ...]:
        return self.strategies


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
    section: type = type(options)
    own = {item.name for item in section_fields(section)}
    for key, value in options.engine_args.items():
        if key in own:
            problems.add(f"{path}.engine_args.{key}", value, f"has a key of its own: write {path}.{key}")
        elif key in decided:
            problems.add(f"{path}.engine_args.{key}", value, f"is not yours to set: {decided[key]} decides")
