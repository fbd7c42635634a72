"""What ``fully_shard`` sends over gloo, against gloo's own collectives; and one rank, which sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from roll.models.patterns import PackedSequences, Uncopied
from roll.strategies.fsdp.exchange import _DirectAllGather, _DirectReduceScatter, choose_exchange


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


class _Copies(TorchDispatchMode):
    """Elements that are copied from one float32 tensor to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.float32:
            self.count += args[0].numel() * (args[0].data_ptr() != args[1].data_ptr())
        return func(*args, **(kwargs or {}))


class _Layers(nn.Module):
    """Two layers, which note the pattern that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, pattern: Uncopied) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pattern)
        return x


class _Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen: list[PackedSequences] = []

    def forward(self, x: torch.Tensor, pattern: Uncopied) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(pattern.pattern)
        return super().forward(x)


def alone() -> dict[str, Any]:
    """Two backward passes of one rank in bf16 over float32 weights: gradients, those of plain bf16 layers, what was
    copied, and the patterns that the layers were given."""
    torch.manual_seed(0)
    model, plain = _Layers(), _Layers().bfloat16()
    plain.load_state_dict(model.state_dict())
    mesh = dist.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        choose_exchange(fully_shard(module, mesh=mesh, mp_policy=policy), mesh.get_group())
    pattern = Uncopied(PackedSequences((3,), torch.tensor([0, 3])))
    sums = [torch.zeros(parameter.shape) for parameter in plain.parameters()]
    copied = 0
    for x in torch.randn(2, 3, 8).bfloat16():
        loss = model(x, pattern).square().sum()
        with _Copies() as copies:
            loss.backward()
        copied += copies.count
        plain.zero_grad()
        plain(x, pattern).square().sum().backward()
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            total += parameter.grad
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    same = all(seen is pattern.pattern for layer in model.layers for seen in layer.seen)
    return {"gradients": gradients, "expected": sums, "copied": copied, "same": same}


def test_one_rank_copies_neither_gradients_nor_patterns(run_ranks: Callable[..., list[Any]]) -> None:
    """``fully_shard`` would copy the sum of its gradients, and build every layer a pattern of its own."""
    (answer,) = run_ranks(1, alone)
    for gradient, expected in zip(answer["gradients"], answer["expected"], strict=True):
        assert torch.equal(gradient, expected)
    assert answer["copied"] == 0
    assert answer["same"]
