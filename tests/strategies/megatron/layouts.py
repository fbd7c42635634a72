"""Parallel sizes under short names, and the rows that each rank is given."""

from __future__ import annotations

from typing import Any

from roll.protocol.metrics import RankInfo
from tests.strategies.samples import TensorBatch, split_rows

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dispatcher": "moe_token_dispatcher_type",
    "sp": "sequence_parallel",
    "dist_opt": "use_distributed_optimizer",
}
SPLITS = {1: (12,), 2: (7, 5), 3: (5, 4, 3), 4: (5, 4, 3, 0)}


def infos(world: int, config: dict[str, Any]) -> list[RankInfo]:
    from roll.config.strategies.registry import MegatronStrategyConfig
    from roll.strategies.megatron.parallel import ParallelSizes, rank_info

    sizes = ParallelSizes.from_config(MegatronStrategyConfig(**config))
    return [rank_info(rank, world, sizes) for rank in range(world)]


def rows_by_rank(world: int, config: dict[str, Any], batch: TensorBatch) -> list[TensorBatch]:
    """All ranks of a replica get the same rows; replicas get different numbers of rows."""
    ranks = infos(world, config)
    parts = split_rows(batch, SPLITS[ranks[0].dp_size])
    return [parts[info.dp_rank] for info in ranks]


def by_replica(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each data-parallel replica, the result of the rank that is asked for it."""
    sources = [result for result in results if result["rank_info"].is_data_source]
    return sorted(sources, key=lambda result: result["rank_info"].dp_rank)
