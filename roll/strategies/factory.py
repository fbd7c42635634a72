"""Construction of strategies by their names in the YAML. A backend is imported only when it is chosen: most are
optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from roll.config.roles import WorkerConfig
from roll.config.strategies.registry import BACKENDS
from roll.strategies.base import ModelHead, ModelStrategy
from roll.strategies.engines.base import GenerationStrategy


def create_strategy(
    role: WorkerConfig, head: ModelHead = ModelHead.CAUSAL_LM, seed: int = 42, max_grad_norm: float | None = None
) -> ModelStrategy:
    """The strategy that ``role.strategy_args.strategy_name`` names, not yet initialised. ``max_grad_norm``: the
    pipeline's; a training strategy uses it unless the role sets its own. Raises ValueError: an unknown name or one that
    cannot compute batches."""
    return _import(role, "computes", "compute batches")(role, head=head, seed=seed, max_grad_norm=max_grad_norm)


def create_scoring_strategy(role: WorkerConfig, seed: int = 42) -> ModelStrategy:
    """The scorer of given tokens (:class:`roll.strategies.engines.scoring.ScoringStrategy`) that
    ``role.strategy_args.strategy_name`` names, not yet initialised. Raises ValueError: an unknown name or one that has
    no such scorer."""
    return _import(role, "scores", "give log-probs of given tokens only")(role, seed=seed)


def create_generation_strategy(role: WorkerConfig, seed: int = 42) -> GenerationStrategy:
    """The generation engine that ``role.strategy_args.strategy_name`` names, not yet initialised. Raises ValueError: an
    unknown name or one that cannot generate."""
    return _import(role, "generates", "generate")(role, seed=seed)


def _import(role: WorkerConfig, kind: Literal["computes", "generates", "scores"], purpose: str) -> Any:
    name = role.strategy_args.strategy_name
    paths = {strategy: getattr(backend, kind) for strategy, backend in BACKENDS.items() if getattr(backend, kind)}
    if name not in paths:
        rule = f"is not a strategy that can {purpose}; use one of {', '.join(paths)}"
        raise ValueError(f"{role.name}.strategy_args.strategy_name: {name!r} {rule}")
    module, _, attribute = paths[name].rpartition(".")
    return getattr(import_module(module), attribute)
