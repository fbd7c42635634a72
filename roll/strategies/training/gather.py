"""Shards of parameters, and gathering them on rank 0.

FSDP1, FSDP2 and ZeRO-3 shard alike in this: a rank holds a run of the elements of a parameter, all of them or none, and
the runs of the ranks in their order are the parameter.  So every run is received where it belongs in the whole tensor,
and nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from roll.models.lora import MergedWeight
from roll.protocol.columns import copy_into, flat_view

EXPORT_BUCKET_BYTES = 2**30
"""Device memory that an export may hold gathered at once; the whole model is put together in host memory."""

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter by itself, in peft's format, next to the merged model of an export."""


def in_buckets(
    weights: Iterable[MergedWeight], bucket_bytes: int, num_bytes: Callable[[MergedWeight], int]
) -> Iterator[list[MergedWeight]]:
    """Runs of consecutive weights of at most ``bucket_bytes`` together; a larger one is alone."""
    bucket: list[MergedWeight] = []
    size = 0
    for weight in weights:
        more = num_bytes(weight)
        if bucket and size + more > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += more
    if bucket:
        yield bucket


def runs_of(named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The matrices of experts, of which a layer's are gathered as two tensors, in runs of at most ``bucket_bytes``."""
    run: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        if run and size + tensor.nbytes > bucket_bytes:
            yield run
            run, size = [], 0
        run.append((name, tensor))
        size += tensor.nbytes
    if run:
        yield run


@dataclass(frozen=True)
class Pieces:
    """One parameter over the ranks of a shard group."""

    shape: torch.Size
    sizes: tuple[int, ...]
    """Elements that each rank holds; they sum to those of ``shape``."""

    @classmethod
    def even(cls, shape: torch.Size, size: int, num_ranks: int) -> Pieces:
        """``size`` elements for each rank in turn, until there are none left."""
        total = shape.numel()
        return cls(shape, tuple(max(0, min(size, total - rank * size)) for rank in range(num_ranks)))

    def within(self, part: torch.Tensor, rank: int, begin: int, end: int) -> tuple[torch.Tensor, Pieces]:
        """Of ``part``, which ``rank`` holds, the elements that lie in ``begin:end`` of the whole, flattened; and the
        pieces of that stretch by itself."""
        ends = list(accumulate(self.sizes))
        runs = [(max(begin, last - size), min(end, last)) for last, size in zip(ends, self.sizes, strict=True)]
        stretch = Pieces(torch.Size([end - begin]), tuple(max(0, last - first) for first, last in runs))
        first, start = runs[rank][0], ends[rank] - self.sizes[rank]
        return flat_view(part)[first - start : first - start + stretch.sizes[rank]], stretch


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
    parts: list[torch.Tensor],
    pieces: list[Pieces],
    group: ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    span: tuple[int, int] | None = None,
) -> list[torch.Tensor]:
    """Collective over ``group``, which rank 0 of the world is in. The tensors whole, by messages all in flight at once.

    Args:
        parts: this rank's elements of each tensor, flat or not; more than the rank's share are ignored.
        span: gather these elements of each, flattened, and no others.

    Returns:
        On rank 0 the tensors, of ``dtype`` on ``device``; empty ones on the others.
    """
    rank = dist.get_rank(group)
    if span is not None:
        cut = [piece.within(part, rank, *span) for part, piece in zip(parts, pieces, strict=True)]
        parts, pieces = [part for part, _ in cut], [piece for _, piece in cut]
    held = [part.detach().to(device) for part in parts]
    if rank != 0:
        own = [flat_view(part)[: piece.sizes[rank]].to(dtype) for part, piece in zip(held, pieces, strict=True)]
        _exchange([dist.P2POp(dist.isend, run, 0, group, tag) for tag, run in enumerate(own) if run.numel()])
        return [torch.empty(0, dtype=dtype, device=device) for _ in parts]
    whole = [torch.empty(piece.shape, dtype=dtype, device=device) for piece in pieces]
    arriving = []
    for tag, (tensor, piece) in enumerate(zip(whole, pieces, strict=True)):
        runs = _runs(tensor, piece)
        senders = [dist.get_global_rank(group, peer) for peer in range(len(runs))]
        from_others = list(zip(runs, senders, strict=True))[1:]
        arriving += [dist.P2POp(dist.irecv, run, peer, group, tag) for run, peer in from_others if run.numel()]
    works = dist.batch_isend_irecv(arriving) if arriving else []
    for tensor, part, piece in zip(whole, held, pieces, strict=True):
        run = _runs(tensor, piece)[0]
        copy_into(run, flat_view(part)[: run.numel()])
    for work in works:
        work.wait()
    return whole


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _runs(tensor: torch.Tensor, piece: Pieces) -> list[torch.Tensor]:
    """The parts of the flattened ``tensor``, one a rank."""
    ends = list(accumulate(piece.sizes))
    flat = tensor.view(-1)
    return [flat[end - size : end] for end, size in zip(ends, piece.sizes, strict=True)]
