"""What ``fully_shard`` sends over gloo, against gloo's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.strategies.fsdp.exchange import _DirectAllGather, _DirectReduceScatter


def exchanged(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each collective what arrives, and what gloo's own brings."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    # Whole numbers: their sum is exact in any order.
    gradients = torch.randint(-9, 10, (ranks * 5,), generator=torch.Generator().manual_seed(rank)).to(dtype)
    summed, expected_sum = torch.empty(5, dtype=dtype), torch.empty(5, dtype=dtype)
    _DirectReduceScatter()(summed, gradients, group, dist.ReduceOp.SUM)
    dist.reduce_scatter_single(expected_sum, gradients)
    gathered, expected = torch.empty_like(gradients), torch.empty_like(gradients)
    own = gathered[5 * rank : 5 * rank + 5].copy_(summed)
    _DirectAllGather()(gathered, own, group)
    dist.all_gather_single(expected, summed)
    return {"sum": (summed, expected_sum), "gather": (gathered, expected)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_bring_what_the_collectives_of_gloo_do(
    run_ranks: Callable[..., list[Any]], dtype: torch.dtype
) -> None:
    for answer in run_ranks(3, exchanged, dtype):
        assert torch.equal(*answer["sum"])
        assert torch.equal(*answer["gather"])
