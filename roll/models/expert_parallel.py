"""Fused experts divided over ranks: tokens are sent to the experts that they chose, and back.

The ranks of an expert-parallel role form a mesh (``ep``, ``efsdp``), the last fastest.  Experts are divided over
``ep``; the ranks of one ``efsdp`` group hold rows of the same experts and gather them for a pass (``fully_shard``).  A
rank sends each of its tokens to the rank of its own ``efsdp`` index that holds a chosen expert, by one all-to-all, and
gets the results by another.  No token is dropped and no capacity is set.

A rank's rows of a parameter are the same elements as under ``Shard(0)`` by ``ep`` and then by ``efsdp``: whatever
writes, reads, exports or counts parameters looks at them by :meth:`ExpertMesh.whole`, which shares their memory.
Gradients need no factor: an expert's gradient is the sum over the tokens of all ranks, as every other parameter's.

Adapters of experts are small. They are sharded over all ranks as other parameters are and gathered with their layer; a
rank adds those of its own experts once the experts are gathered, and its gradient of the others' is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from roll.models.experts import SparseLayer


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks of a role as experts are divided over them."""

    mesh: DeviceMesh
    """Ranks along the dimensions ``ep`` and ``efsdp``."""
    sharding: DeviceMesh
    """This rank's ``efsdp`` group."""

    @classmethod
    def build(cls, device_type: str, world_size: int, ep_size: int) -> ExpertMesh:
        """Collective. ``ep_size`` divides ``world_size``."""
        shape = (ep_size, world_size // ep_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("ep", "efsdp"))
        return cls(mesh, mesh["efsdp"])

    def divide(self, layers: Sequence[SparseLayer]) -> list[nn.Module]:
        """Leave each layer this rank's experts only, to which tokens of all ranks are sent, in place.

        Returns:
            The layers' experts, which are to be sharded over :attr:`sharding`, each as a unit of its own.
        """
        for layer in layers:
            size, index = layer.num_experts // self.mesh.size(0), self.mesh.get_local_rank("ep")
            assert size * self.mesh.size(0) == layer.num_experts, "checked with the configuration"
            own = slice(size * index, size * (index + 1))
            for name, parameter in list(layer.experts.named_parameters(recurse=False)):
                # A copy: a view would keep the storage of all experts alive.
                part = nn.Parameter(parameter.detach()[own].clone(), requires_grad=parameter.requires_grad)
                setattr(layer.experts, name, part)
            experts: Any = layer.experts
            experts.num_experts = own.stop - own.start
            experts.forward = DispatchedExperts(experts, own, layer.num_experts, self.mesh.get_group("ep"))
        return [layer.experts for layer in layers]

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter (or what has its form: a gradient, a moment) as a shard of all experts, of the same memory."""
        if not (isinstance(tensor, DTensor) and tensor.device_mesh == self.sharding):
            return tensor
        shape = torch.Size((tensor.shape[0] * self.mesh.size(0), *tensor.shape[1:]))
        placements = [Shard(0), Shard(0)]
        return DTensor.from_local(
            tensor.to_local(), self.mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
        )


def row_runs(tensor: DTensor) -> list[slice]:
    """The rows of a tensor that is sharded along its first dimension, for each rank of its sharding mesh dimensions in
    turn: as ``torch.chunk`` divides them, by one mesh dimension after the other."""
    runs = [slice(0, tensor.shape[0])]
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, placement
            number, parts = tensor.device_mesh.size(mesh_dim), []
            for run in runs:
                # As torch.chunk: all but the last ones have the same size, and the last ones may be empty.
                size = -(-(run.stop - run.start) // number)
                ends = [min(run.start + size * index, run.stop) for index in range(number + 1)]
                parts += [slice(begin, end) for begin, end in pairwise(ends)]
            runs = parts
    return runs


def own_rows(tensor: Tensor) -> slice:
    """The rows that this rank holds: of :func:`row_runs`, or all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor) or not any(isinstance(one, Shard) for one in tensor.placements):
        return slice(None)
    mesh, index = tensor.device_mesh, 0
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            index = index * mesh.size(mesh_dim) + mesh.get_local_rank(mesh_dim)
    return row_runs(tensor)[index]


@contextmanager
def substituted(experts: nn.Module, name: str, tensor: Tensor) -> Iterator[None]:
    """Let a module find ``tensor`` under the name of a parameter, inside the block."""
    held = experts.__dict__.get(name)  # FSDP1 keeps a gathered parameter there
    experts.__dict__[name] = tensor  # found before nn.Module.__getattr__ looks for the parameter, which is untouched
    try:
        yield
    finally:
        if held is None:
            del experts.__dict__[name]
        else:
            experts.__dict__[name] = held


class DispatchedExperts:
    """The forward pass of a layer's experts, of which this rank holds some.

    Args:
        experts: the module of those that this rank holds; its own forward pass takes (T, H) tokens, (T, k) experts and
            (T, k) weights to (T, H).
        own: which they are.
        num_experts: of all ranks.
        group: the ranks that hold the others.
    """

    def __init__(self, experts: nn.Module, own: slice, num_experts: int, group: ProcessGroup) -> None:
        self._experts, self._forward, self._own = experts, experts.forward, own
        self.num_experts, self.group = num_experts, group
        self._adapters: dict[str, tuple[Tensor, Tensor, float]] = {}

    @contextmanager
    def adapted(self, name: str, up: Tensor, down: Tensor, scaling: float) -> Iterator[None]:
        """Passes in this block add ``scaling * up @ down`` to a tensor of the experts: (E, out, r) and (E, r, in) of
        all experts. Not before the call: outside of it, the experts are sharded."""
        self._adapters[name] = up[self._own], down[self._own], scaling
        try:
            yield
        finally:
            del self._adapters[name]

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        # Sorted by expert, and so by rank: an all-to-all sends one contiguous run to each rank.
        order = chosen.argsort(stable=True)
        token = order // top_k
        sent, received, experts = self.destinations(chosen)
        rows = exchange(hidden[token], sent, received, self.group)
        number = len(rows)
        if not number:
            # A rank that no token reaches computes a dummy one: without a backward pass through its parameters their
            # reduce-scatter would not be called here, and the other ranks would hang in theirs.
            rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
        with ExitStack() as stack:
            for name, (up, down, scaling) in self._adapters.items():
                tensor = torch.baddbmm(getattr(self._experts, name), up, down, alpha=scaling)
                stack.enter_context(substituted(self._experts, name, tensor))
            computed = self._forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
        back = exchange(computed[:number], received, sent, self.group)
        # Weighted here, not at the expert: the router's gradient then needs no exchange of its own.
        weighted = back * top_k_weights.reshape(-1)[order, None].to(back.dtype)
        return torch.zeros_like(hidden).index_add(0, token, weighted)

    def destinations(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Collective. Rows that go to and come from each rank of the group, and the expert (N,) of this rank for each
        row that comes."""
        ranks = self.group.size()
        counts = torch.bincount(chosen, minlength=self.num_experts).view(ranks, -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        local = torch.arange(counts.shape[1], device=chosen.device).expand(ranks, -1)
        experts = local.reshape(-1).repeat_interleave(arriving.reshape(-1))
        return counts.sum(1).tolist(), arriving.sum(1).tolist(), experts


def exchange(rows: Tensor, sent: list[int] | None, received: list[int] | None, group: ProcessGroup) -> Tensor:
    """Collective, differentiable. An all-to-all of (N, ...) rows: the first ``sent[0]`` of them go to the first rank of
    the group and so on, or as many to each (None). Those that arrive, in the order of the ranks."""
    return _Exchange.apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int] | None, received: list[int] | None, group: ProcessGroup
    ) -> Tensor:
        ctx.inverse = (received, sent, group)
        arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], *ctx.inverse), None, None, None


def sum_of_parts(part: Tensor, group: ProcessGroup) -> Tensor:
    """Collective. The sum over ranks, the same on each; a gradient flows back to each rank's own part only.

    Ranks that all compute the same loss from the sum thus differentiate it once, not once each.
    """
    return _SumOfParts.apply(part, group)


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
