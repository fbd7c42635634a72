"""The collectives of ``fully_shard``: over gloo as messages between each two ranks, and with one rank none.

gloo's own reduce-scatter is an all-reduce of a copy, of which every rank keeps its part: twice the bytes.  Its
all-gather receives into a buffer and copies from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


def choose_exchange(unit: FSDPModule, group: ProcessGroup) -> None:
    """Let a unit that is sharded over a group of gloo gather and sum by messages, and one that a single rank has whole
    keep its gradients where they are; larger groups of other backends keep their own collectives."""
    if group.size() == 1:
        unit.set_custom_reduce_scatter(_SumOfOne())
    elif dist.get_backend(group) == "gloo":
        unit.set_custom_all_gather(_DirectAllGather())
        unit.set_custom_reduce_scatter(_DirectReduceScatter())


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _DirectAllGather(_Allocates, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        parts = list(output_tensor.view(group.size(), -1))
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr()  # a rank's own part lies where it belongs
        _exchange([input_tensor] * group.size(), parts, group)


class _DirectReduceScatter(_Allocates, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """The sum, in the order of the ranks."""
        assert op == dist.ReduceOp.SUM
        sent = list(input_tensor.view(group.size(), -1))
        parts = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(sent)]
        _exchange(sent, parts, group)
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor += part


class _SumOfOne(_DirectReduceScatter):
    """The gradients of one rank are their sum.

    ``fully_shard`` joins a unit's gradients in a first tensor, and with one rank copies that to a second, all gradients
    in every micro-batch.  Here the second one is the first, and copying a tensor to itself does nothing.
    """

    _input: Tensor | None = None
    """Between the two calls of a unit's backward pass."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._input = self._input, None
        if given is None:
            given = self._input = super().allocate(size, dtype=dtype, device=device)
        return given


def _exchange(sent: list[Tensor], received: list[Tensor], group: ProcessGroup) -> None:
    """Send ``sent[r]`` to every other rank r of the group, and fill ``received[r]`` with what it sends."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    messages = [dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
    messages += [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    for message in messages:
        assert message is not None  # as outside the group
        message.wait()
