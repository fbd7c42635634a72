"""Megatron's parallel sizes as far as a plan and the checks need them. Torch-free, and without Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.config.reading.errors import Problems
    from roll.config.roles import WorkerConfig
    from roll.config.strategies.registry import MegatronStrategyConfig


def ranks_of_a_replica(options: MegatronStrategyConfig) -> int:
    """Ranks over which one copy of the model is cut."""
    return options.tensor_model_parallel_size * options.pipeline_model_parallel_size * options.context_parallel_size


def check_megatron(
    name: str, role: WorkerConfig, options: MegatronStrategyConfig, world_size: int, problems: Problems
) -> None:
    """Report what this backend does not do, and sizes that do not make whole replicas of ``world_size`` ranks.

    Args:
        name: of the role's section.
    """
    path = f"{name}.strategy_args.strategy_config"
    if world_size % ranks_of_a_replica(options):
        tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
        rule = (
            f"tensor_model_parallel_size x pipeline_model_parallel_size {pipeline} x context_parallel_size "
            f"{options.context_parallel_size} = {ranks_of_a_replica(options)} must divide the role's {world_size} ranks"
        )
        problems.add(f"{path}.tensor_model_parallel_size", tensor, rule, 1)
    if (options.virtual_pipeline_model_parallel_size or 1) > 1 and options.pipeline_model_parallel_size == 1:
        rule = "needs pipeline_model_parallel_size of at least 2"
        problems.add(
            f"{path}.virtual_pipeline_model_parallel_size", options.virtual_pipeline_model_parallel_size, rule, "~"
        )
