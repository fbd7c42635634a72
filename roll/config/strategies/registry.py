"""The registry of backends and engines, and the typed options of each strategy (``strategy_args.strategy_config``).

A :class:`Backend` is described in a file next to this one, those of engines in ``engines.py``; :data:`BACKENDS` is the
only list of them.
``StrategyArguments.strategy_config`` holds what the user wrote; :func:`typed_strategy_config` gives the checked
dataclass of the chosen strategy.  A key that belongs to another strategy is left out (the loader says so in one line),
so that one changed ``strategy_name`` is a whole switch of backend; a key that no strategy knows is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from roll.config.installation import offered
from roll.config.objects import imported
from roll.config.reading.errors import ConfigError, Problems, closest_value
from roll.config.reading.fields import Table
from roll.config.reading.legacy_keys import dead_keys
from roll.config.reading.schema import SchemaReader, build, known_keys
from roll.config.roles import StrategyArguments, WorkerConfig
from roll.config.strategies.base import Backend, StrategyConfig
from roll.config.strategies.deepspeed import DEEPSPEED
from roll.config.strategies.engines import HF_INFER, REMOTE, SGLANG, VLLM
from roll.config.strategies.fsdp import FSDP1, FSDP2
from roll.config.strategies.megatron import MEGATRON

# The only list of backends and engines, by `strategy_name`; those of installed packages come after its own.
BACKENDS: Table[Backend] = Table("strategy_name", FSDP2, FSDP1, DEEPSPEED, MEGATRON, HF_INFER, VLLM, SGLANG, REMOTE)

for _name, _path in offered("strategies").items():
    try:
        _backend: Backend = imported(_path)
    except ImportError as error:
        rule = f"the installed package that offers roll.strategies {_name!r} cannot be imported from {_path}"
        raise ImportError(f"{rule}: {error}; mend or uninstall it") from error
    if not BACKENDS.keys() & set(_backend.names):
        BACKENDS.add(_backend)


def backend_of(strategy_name: str) -> Backend:
    """The backend of a strategy; of an unknown name one that can do nothing, since the checks report the name."""
    return BACKENDS.get(strategy_name) or Backend(strategy_name, StrategyConfig)


def train_strategies() -> tuple[str, ...]:
    """Strategies that take optimizer steps."""
    return tuple(backend.names[0] for backend in BACKENDS.rows if backend.trains)


def infer_strategies() -> tuple[str, ...]:
    """Strategies that compute log-probs, forward-only ones first."""
    return tuple(name for backend in BACKENDS.rows if backend.computes for name in reversed(backend.names))


def scoring_strategies() -> tuple[str, ...]:
    """Strategies that only give log-probs of given tokens, at temperature 1: engines and services."""
    return BACKENDS.where(lambda backend: backend.scores is not None)


def all_scoring_strategies() -> tuple[str, ...]:
    """Strategies that give log-probs of given tokens, whatever else they do."""
    return (*infer_strategies(), *scoring_strategies())


def generation_strategies() -> tuple[str, ...]:
    """Engines."""
    return BACKENDS.where(lambda backend: backend.generates is not None)


def trains(strategy_name: str) -> bool:
    return strategy_name in train_strategies()


def checkpoint_readers(strategy_name: str) -> tuple[str, ...]:
    """The strategies that read training checkpoints of ``strategy_name``."""
    backend = backend_of(strategy_name)
    if not backend.trains:
        return (strategy_name,)
    return tuple(other.names[0] for other in BACKENDS.rows if other.checkpoints == backend.checkpoints)


def strategy_keys(strategy_name: str) -> frozenset[str]:
    """The option names of a strategy; empty for an unknown one."""
    options: type = backend_of(strategy_name).options
    return frozenset((*known_keys(options), *dead_keys(options)))


def read_strategy_config(arguments: StrategyArguments, path: str, problems: Problems) -> StrategyConfig | None:
    """The typed options, with every mistake added to ``problems`` under ``path``; None for a strategy without any."""
    name = arguments.strategy_name
    if name not in BACKENDS:
        rule = f"must be one of {', '.join(BACKENDS)}"
        problems.add(f"{path}.strategy_name", name, rule, closest_value(name, BACKENDS))
        return None
    options, own = BACKENDS[name].options, strategy_keys(name)
    foreign, section = [], f"{path}.strategy_config"
    for key in arguments.strategy_config:
        owners = [] if key in own else [strategy for strategy in BACKENDS if key in strategy_keys(strategy)]
        if owners:
            foreign.append(key)
            problems.note(f"{section}.{key}", f"belongs to {', '.join(owners)}; no effect under {name}")
    data = {key: value for key, value in arguments.strategy_config.items() if key not in foreign}
    whole, parts = options.passes_through
    typed = {*(item.name for item in fields(options)), *dead_keys(options)}
    beside = {key: data.pop(key) for key in parts if key in data and key not in typed}
    if beside and isinstance(data.get(whole) or {}, Mapping):
        # null: the library's own choice
        data[whole] = {**(data.get(whole) or {}), **{key: one for key, one in beside.items() if one is not None}}
    return build(options, SchemaReader(problems).read(options, data, section))


def typed_strategy_config(arguments: StrategyArguments) -> StrategyConfig:
    """The checked options of ``arguments.strategy_name``.

    Raises:
        ConfigError: an unknown strategy, an unknown option, a value of a wrong type.
    """
    problems = Problems()
    config = read_strategy_config(arguments, "strategy_args", problems)
    if config is None or problems.errors:
        raise ConfigError(problems.errors)
    return config


def is_sized_engine(role: WorkerConfig) -> bool:
    """True for an engine whose workers take as many devices as it has ranks."""
    return bool(backend_of(role.strategy_args.strategy_name).size_keys)


def with_engine_size(role: WorkerConfig) -> WorkerConfig:
    """The role with its engines' tensor-parallel size: as ``strategy_config`` says, else ``num_gpus_per_worker``, which
    ROLL's files often give alone."""
    arguments = role.strategy_args
    backend, options = backend_of(arguments.strategy_name), arguments.strategy_config
    if not backend.size_keys or any(options.get(key) is not None for key in backend.size_keys):
        return role
    has_stages = "pipeline_parallel_size" in strategy_keys(arguments.strategy_name)
    stages = options.get("pipeline_parallel_size") if has_stages else 1
    if not isinstance(stages, int) or stages < 1:
        stages = 1
    if role.num_gpus_per_worker == 1 or role.num_gpus_per_worker % stages:
        return role
    sized = {**options, backend.size_keys[0]: role.num_gpus_per_worker // stages}
    return replace(role, strategy_args=replace(arguments, strategy_config=sized))
