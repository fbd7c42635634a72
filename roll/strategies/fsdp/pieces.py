"""Which part of each parameter each rank holds under FSDP1, and putting the parts together.

FSDP1 lays a unit's parameters end to end and cuts the run into equal pieces, one a rank.  So a rank holds a run of the
elements of a parameter, all of them or none, and the runs of the ranks in their order are the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Pieces:
    """One parameter over the ranks of a shard group."""

    shape: torch.Size
    sizes: tuple[int, ...]
    """Elements that each rank holds; they sum to those of ``shape``."""


def exchange_sizes(
    parameters: Iterable[tuple[torch.Tensor, torch.Size]], group: ProcessGroup, device: torch.device
) -> list[Pieces]:
    """Collective. The pieces of parameters, given as this rank's part and the shape of the whole."""
    parameters = list(parameters)
    own = torch.tensor([part.numel() for part, _ in parameters], device=device)
    table = own.new_empty(dist.get_world_size(group), len(parameters))
    dist.all_gather(list(table.unbind()), own, group=group)
    sizes = table.T.tolist()
    pieces = [Pieces(shape, tuple(row)) for (_, shape), row in zip(parameters, sizes, strict=True)]
    assert all(sum(piece.sizes) == piece.shape.numel() for piece in pieces), pieces
    return pieces


def gather_to_rank0(
    parts: list[torch.Tensor], pieces: list[Pieces], group: ProcessGroup, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Collective over ``group``, which rank 0 of the world is in. The tensors whole, by one collective.

    Args:
        parts: this rank's elements of each tensor.

    Returns:
        On rank 0 the tensors, of ``dtype`` on ``device``; empty ones on the others.
    """
    totals = [sum(piece.sizes[rank] for piece in pieces) for rank in range(dist.get_world_size(group))]
    local = torch.zeros(max(totals), dtype=dtype, device=device)
    if parts:
        run = torch.cat([part.detach().flatten().to(device, dtype) for part in parts])
        local[: run.numel()] = run
    if dist.get_rank() != 0:
        dist.gather(local, dst=0, group=group)
        return [local.new_empty(0) for _ in parts]
    by_rank = local.new_empty(len(totals), local.numel())
    dist.gather(local, list(by_rank.unbind()), dst=0, group=group)
    starts, whole = [0] * len(totals), []
    for piece in pieces:
        runs = [by_rank[rank, start : start + piece.sizes[rank]] for rank, start in enumerate(starts)]
        whole.append(torch.cat(runs).view(piece.shape))
        starts = [start + size for start, size in zip(starts, piece.sizes, strict=True)]
    return whole
