"""The base classes of the strategies' options, and the description of a backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from roll.config.reading.errors import Problems
from roll.config.roles import WorkerConfig

if TYPE_CHECKING:
    from roll.protocol.metrics import RankInfo


# Contents of a weight update: everything, what training changes, or of that the elements that have changed.
UpdateMode = Literal["full", "trained", "delta"]

ShapeProblem = tuple[str, Any, str, Any]  # key, value, rule and a value that works


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a role's ranks, the same description for every training backend (as torchtitan's).

    Ranks next to each other differ in ``tp`` first, then in ``cp``, in the data-parallel index, and in ``pp`` last.
    Within a pipeline stage experts are laid out on their own: ``etp`` ranks next to each other share an expert's
    matrices, ``ep`` such groups share the experts of a layer.
    """

    world_size: int
    dp_shard: int = 1
    """Ranks over which every parameter is sharded, as FSDP and ZeRO-3 do. They may share sequences (``cp``) as well."""
    cp: int = 1
    """Ranks that share each sequence."""
    tp: int = 1
    """Ranks over which every matrix is sharded."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of a pipeline stage."""
    ep: int = 1
    """Ranks over which the experts of a layer are divided."""
    etp: int = 1
    """Ranks over which a matrix of an expert is sharded."""
    sequence_parallel: bool = False
    """Norms and residuals are spread over the ``tp`` ranks along the sequence."""
    keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The degrees' paths in the section of the role, for messages."""

    @property
    def replica(self) -> int:
        """Ranks that compute the same rows together."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Ranks that compute different rows."""
        return self.world_size // self.replica

    @property
    def dp_replicate(self) -> int:
        """Copies of the parameters of a tensor-parallel rank and pipeline stage."""
        return self.world_size // (self.tp * self.pp * self.dp_shard)

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.world_size // self.pp

    @property
    def has_expert_groups(self) -> bool:
        """True if experts have their own process groups: they are not sharded and replicated as all else is."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def exchanges_tokens(self) -> bool:
        """Replicas compute an expert together, and so must make as many passes as each other."""
        return self.ep > 1 or self.etp > self.tp

    @property
    def sequence_divisor(self) -> int:
        """Divisor of the padded length of a micro-batch."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    def problems(self) -> Iterator[ShapeProblem]:
        """Degrees that do not divide the ranks, and virtual stages without a pipeline."""
        groups: list[tuple[str, ...]] = [("tp", "cp", "pp")]
        if self.dp_shard > 1:
            groups.append(("dp_shard", "tp", "pp"))
        if self.world_size % self.replica == 0:
            groups.append(("ep", "etp"))
        for names in groups:
            sizes = {self.keys.get(name, name): size for name in names if (size := getattr(self, name)) > 1}
            is_stage = "ep" in names and self.pp > 1
            ranks, product = self.stage if is_stage else self.world_size, prod(sizes.values())
            if ranks % product == 0:
                continue
            key, *others = sizes
            factors = "".join(f"x {other.rpartition('.')[2]} {sizes[other]} " for other in others)
            rule = f"{factors}{f'= {product} ' if others else ''}must divide the "
            rule += f"{ranks} ranks of a pipeline stage" if is_stage else f"role's {ranks} ranks"
            rest = product // sizes[key]
            yield key, sizes[key], rule, 1 if ranks % rest else largest_divisor(sizes[key], ranks // rest)
        if self.vpp > 1 and self.pp == 1:
            stages, chunks = (self.keys.get(name, name) for name in ("pp", "vpp"))
            yield chunks, self.vpp, f"needs {stages.rpartition('.')[2]} of at least 2", "~"

    def validate(self, role: str) -> None:
        """
        Raises:
            ValueError: the first of :meth:`problems`.
        """
        for key, size, rule, example in self.problems():
            raise ValueError(f"{role}.{key}: {size} {rule}; use e.g. {example}")

    def rank_info(self, rank: int) -> RankInfo:
        from roll.protocol.metrics import RankInfo  # its package imports torch, which a check does without

        rest, tensor = divmod(rank, self.tp)
        rest, context = divmod(rest, self.cp)
        stage, data = divmod(rest, self.dp)
        return RankInfo(
            rank=rank,
            world_size=self.world_size,
            dp_rank=data,
            dp_size=self.dp,
            tp_rank=tensor,
            tp_size=self.tp,
            pp_rank=stage,
            pp_size=self.pp,
            cp_rank=context,
            cp_size=self.cp,
        )


@dataclass(frozen=True)
class StrategyConfig:
    """Base of the strategies' options."""

    passes_through: ClassVar[tuple[str, Collection[str]]] = ("", ())
    """The key whose mapping a library gets as it is, and names that may be written beside it."""

    optimizers: ClassVar[Collection[str]] = ("adamw",)
    """Names of ``training_args.optimizer`` that the strategy has."""

    @property
    def devices_per_worker(self) -> int:
        """Devices that one worker of the role computes on by itself."""
        return 1

    def parallel_dims(self, role: WorkerConfig, world_size: int) -> ParallelDims:
        """Degrees of parallelism of the role's ranks, which are not checked yet; plain data parallelism here."""
        return ParallelDims(world_size)

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        """Report options that do not fit the role, such as degrees of parallelism that do not divide its ranks.

        Args:
            name: of the role's section.
            world_size: the role's ranks.
            trains: the role takes optimizer steps.
        """
        for key, size, rule, example in self.parallel_dims(role, world_size).problems():
            path = f"{name}.{key}"
            # One mistake of the key, or of one under it, is enough.
            if not any(f"{known.key}.".startswith(f"{path}.") for known in problems.errors):
                problems.add(path, size, rule, example)

    def shape_problems(self, name: str, role: WorkerConfig, model: Mapping[str, Any]) -> Iterator[ShapeProblem]:
        """Sizes that do not fit the model, which has the ``config.json`` ``model``; ``name`` is the role's section."""
        yield from ()


@dataclass(frozen=True)
class HostStatesConfig(StrategyConfig):
    """Options of the backends whose AdamW is PyTorch's: FSDP2, FSDP1 and Megatron."""

    optimizer_cpu_offload: bool = False
    """Keep AdamW's moments in host memory; the optimizer step copies them to the device and back, one parameter at a
    time. The same numbers, by the same kernel."""

    def check(self, name: str, role: WorkerConfig, world_size: int, trains: bool, problems: Problems) -> None:
        super().check(name, role, world_size, trains, problems)
        key, optimizer = "optimizer_cpu_offload", role.training_args.optimizer.name
        if trains and self.optimizer_cpu_offload and optimizer != "adamw":
            rule = f"goes with training_args.optimizer: adamw; this role has {optimizer}"
            problems.add(f"{name}.strategy_args.strategy_config.{key}", True, rule, False)


def model_size(model: Mapping[str, Any], key: str) -> int:
    """A positive number of a model's ``config.json`` (of the language model in it); 0 where it has none."""
    section = model.get("text_config")
    value = section.get(key) if isinstance(section, Mapping) and key not in model else model.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def largest_divisor(size: int, count: int) -> int:
    """The largest number up to ``size`` that divides ``count``."""
    return max(number for number in range(1, min(size, count) + 1) if count % number == 0)


@dataclass(frozen=True)
class Package:
    """An optional package that a backend needs."""

    module: str
    """Found when it is installed."""
    install: str
    """The command, or where to read about it."""
    title: str = ""
    """Display name, as its authors write it."""
    tested: tuple[str, str] = ("0", "0")
    """Versions that this code was tried with: from the first up to, not including, the second."""


@dataclass(frozen=True)
class Backend:
    """Torch-free description of a strategy folder: what configuration, plan, checks and preflight know of it."""

    name: str
    options: type[StrategyConfig]
    """The class of ``strategy_config``."""
    computes: str | None = None
    """Dotted path of the class that computes batches (:class:`roll.strategies.base.ModelStrategy`)."""
    generates: str | None = None
    """Dotted path of the generation engine."""
    scores: str | None = None
    """Dotted path of a class that gives log-probs of given tokens only, as distillation needs them
    (:class:`roll.strategies.engines.scoring.ScoringStrategy`)."""
    is_remote: bool = False
    """The model is computed elsewhere: its roles have no devices."""
    trains: bool = False
    """The class that computes batches takes optimizer steps as well, under ``<name>_train``; ``<name>_infer`` builds it
    without an optimizer."""
    accumulates: bool = False
    """Gradients of several backward passes add up until an optimizer step is taken, by calls of their own."""
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
    """For an engine that computes with an adapter itself: the adapter ranks that it can reserve room for at start."""
    adapter_arguments: Callable[[int], dict[str, Any]] | None = None
    """From an adapter's rank to the engine arguments that make this room."""
    only_plain_adapters: bool = False
    """Alongside adapters it trains in full only what is not a projection."""
    ulysses: bool = False
    """It deals with ``model_args.ulysses_size`` itself."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of ``strategy_name``."""
        return (f"{self.name}_train", f"{self.name}_infer") if self.trains else (self.name,)


def own_weights(role: WorkerConfig) -> WorkerConfig:
    """The role with the weights of its model folder, for an engine that no trainer sends weights to."""
    options = {**role.strategy_args.strategy_config, "load_format": "auto"}
    return replace(role, strategy_args=replace(role.strategy_args, strategy_config=options))
