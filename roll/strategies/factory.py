"""From a strategy's name in the YAML to the strategy. A backend is imported only when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from roll.config.roles import WorkerConfig
from roll.strategies.base import ModelHead, ModelStrategy
from roll.strategies.engines.base import GenerationStrategy

MODEL_STRATEGIES = {
    "fsdp2_train": "roll.strategies.fsdp.fsdp2.Fsdp2TrainStrategy",
    "fsdp2_infer": "roll.strategies.fsdp.fsdp2.Fsdp2InferStrategy",
    "fsdp_train": "roll.strategies.fsdp.fsdp1.FsdpTrainStrategy",
    "fsdp_infer": "roll.strategies.fsdp.fsdp1.FsdpInferStrategy",
    "deepspeed_train": "roll.strategies.deepspeed.DeepSpeedTrainStrategy",
    "deepspeed_infer": "roll.strategies.deepspeed.DeepSpeedInferStrategy",
    "megatron_train": "roll.strategies.megatron.MegatronTrainStrategy",
    "megatron_infer": "roll.strategies.megatron.MegatronInferStrategy",
    "hf_infer": "roll.strategies.hf_infer.strategy.HfForwardStrategy",
}
"""Strategies that compute batches."""

GENERATION_STRATEGIES = {
    "hf_infer": "roll.strategies.hf_infer.HfInferStrategy",
    "vllm": "roll.strategies.vllm.VllmStrategy",
    "sglang": "roll.strategies.sglang.SglangStrategy",
}
"""Strategies that generate."""


def create_strategy(
    role: WorkerConfig,
    head: ModelHead = ModelHead.CAUSAL_LM,
    seed: int = 42,
    max_grad_norm: float | None = None,
) -> ModelStrategy:
    """The strategy that ``role.strategy_args.strategy_name`` names, not yet initialised.

    Args:
        max_grad_norm: the pipeline's; a training strategy uses it unless the role sets its own.

    Raises:
        ValueError: an unknown name or one that cannot compute batches.
    """
    strategy = _import(role, MODEL_STRATEGIES, "compute batches")
    if role.strategy_args.strategy_name.endswith("_train"):
        return strategy(role, head=head, seed=seed, max_grad_norm=max_grad_norm)
    return strategy(role, head=head, seed=seed)


def create_generation_strategy(role: WorkerConfig, seed: int = 42) -> GenerationStrategy:
    """The generation engine that ``role.strategy_args.strategy_name`` names, not yet initialised.

    Raises:
        ValueError: an unknown name or one that cannot generate.
    """
    return _import(role, GENERATION_STRATEGIES, "generate")(role, seed=seed)


def _import(role: WorkerConfig, registry: dict[str, str], purpose: str) -> Any:
    name = role.strategy_args.strategy_name
    if name not in registry:
        rule = f"is not a strategy that can {purpose}; use one of {', '.join(registry)}"
        raise ValueError(f"{role.name}.strategy_args.strategy_name: {name!r} {rule}")
    module, _, attribute = registry[name].rpartition(".")
    return getattr(import_module(module), attribute)
