"""Degrees of parallelism as each backend's options give them, and the coordinates of ranks."""

from __future__ import annotations

import pytest

from roll.config.roles import ModelArguments, WorkerConfig
from roll.config.strategies.base import ParallelDims
from roll.config.strategies.fsdp import Fsdp2StrategyConfig
from roll.config.strategies.megatron import MegatronStrategyConfig


@pytest.mark.parametrize(
    ("world", "fsdp_size", "copies_and_shards"),
    [
        *((16, 16, (1, 16)), (16, 8, (2, 8)), (8, 4, (2, 4)), (8, 1, (1, 8))),
        *((8, 0, (1, 8)), (8, -1, (1, 8)), (8, 32, (1, 8))),
    ],
)
def test_fsdp_shards_over_all_ranks_or_groups_of_fsdp_size(world, fsdp_size, copies_and_shards):
    role = WorkerConfig(model_args=ModelArguments(ulysses_size=2))
    dims = Fsdp2StrategyConfig(fsdp_size=fsdp_size).parallel_dims(role, world)
    dims.validate("actor_train")
    assert (dims.dp_replicate, dims.dp_shard) == copies_and_shards
    assert dims.dp == world // 2 and dims.rank_info(3).cp_rank == 1


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "tp: 3 must divide the role's 8 ranks; use e.g. 2"),
        ({"tp": 2, "pp": 2, "cp": 4}, "tp: 2 x cp 4 x pp 2 = 16 must divide the role's 8 ranks; use e.g. 1"),
        ({"tp": 4, "pp": 4}, "tp: 4 x pp 4 = 16 must divide the role's 8 ranks; use e.g. 2"),
        ({"dp_shard": 3}, "dp_shard: 3 must divide the role's 8 ranks"),
        ({"pp": 2, "ep": 8, "keys": {"ep": "s.ep_size"}}, "s.ep_size: 8 must divide the 4 ranks of a pipeline stage"),
        ({"tp": 2, "vpp": 2}, "vpp: 2 needs pp of at least 2"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, message):
    with pytest.raises(ValueError, match=rf"actor_train\.{message}"):
        ParallelDims(8, **degrees).validate("actor_train")


def test_ranks_fill_the_mesh():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    options = MegatronStrategyConfig(**sizes, sequence_parallel=True)
    dims = options.parallel_dims(WorkerConfig(), 16)
    infos = [dims.rank_info(rank) for rank in range(16)]
    assert len({(i.tp_rank, i.cp_rank, i.dp_rank, i.pp_rank) for i in infos}) == 16
    assert {(i.tp_size, i.cp_size, i.dp_size, i.pp_size) for i in infos} == {(2, 2, 2, 2)}
    assert dims.sequence_divisor == 4 and not dims.has_expert_groups
    for replica in range(2):
        assert sum(i.is_data_source for i in infos if i.dp_rank == replica) == 1
        assert sum(i.is_first_of_replica for i in infos if i.dp_rank == replica) == 1
