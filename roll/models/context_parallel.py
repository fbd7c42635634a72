"""One sequence on several ranks: each holds a contiguous chunk of its tokens.

Attention is the only layer that needs the whole sequence, and it does with some of its heads.  An all-to-all before
attention turns a chunk of the sequence with all heads into the whole sequence with some heads, and one after it turns
it back (Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509).  What ranks exchange is queries, keys, values and
outputs once each; no rank needs to know of masks or of the order of chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def heads_for_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(s / n, b, heads, dim) of each of n ranks to (s, b, heads / n, dim): the whole sequence, some heads."""
    chunk, rows, heads, dim = tensor.shape
    ranks = group.size()
    parts = tensor.reshape(chunk, rows, ranks, heads // ranks, dim).permute(2, 0, 1, 3, 4).contiguous()
    return _AllToAll.apply(parts, group).view(ranks * chunk, rows, heads // ranks, dim)


def sequence_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of :func:`heads_for_sequence`."""
    length, rows, heads, dim = tensor.shape
    ranks = group.size()
    parts = tensor.reshape(ranks, length // ranks, rows, heads, dim).contiguous()
    received = _AllToAll.apply(parts, group)
    return received.permute(1, 2, 0, 3, 4).reshape(length // ranks, rows, ranks * heads, dim)


def divisible_heads(tensor: Tensor, query_heads: int, group: ProcessGroup) -> Tensor:
    """Keys or values (s / n, b, heads, dim) with heads that n ranks can share evenly.

    Where there are fewer than ranks, each query head brings its own copy.
    """
    heads = tensor.shape[2]
    return tensor if heads % group.size() == 0 else tensor.repeat_interleave(query_heads // heads, 2)


def sum_of_parts(part: Tensor, group: ProcessGroup) -> Tensor:
    """Collective. The sum over ranks, the same on each; a gradient flows back to each rank's own part only.

    So ranks that all compute the same loss of the sum differentiate it once, not once each.
    """
    return _SumOfParts.apply(part, group)


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to rank i. Its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.group), None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
