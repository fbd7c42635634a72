"""Statistics over the masked part of a tensor, over groups of rows, and ratios of tokens, segments and sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_BLOCK = 2**17
"""Elements of a block: a handful of float32 tensors of this size stay in a core's cache of 2 MB."""


def row_blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same rows of each of several (B, L), block by block; several rows each, where there are several.

    On a CPU a chain of elementwise operations takes the time of moving its operands between memory and core: done block
    by block they stay in the cache.  Elsewhere there is one block.
    """
    first = tensors[0]
    count = first.numel() // (_BLOCK * torch.get_num_threads()) if first.device.type == "cpu" else 0
    count = min(count, len(first) // 2)
    return zip(*(tensor.tensor_split(count) for tensor in tensors), strict=True) if count > 1 else (tensors,)


class Keep:
    """Clears what stands outside a mask, NaN included, bit by bit.

    On a CPU this takes a quarter of the time of ``torch.where``.  No gradient passes through it.

    Args:
        mask: bool, any shape.
        dtype: of the values to come, a floating-point type.
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        # -1 has every bit, in one byte and in several.
        self.bits = mask.view(torch.int8).neg().to({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        """Integers of the size of ``dtype``, in the shape of the mask: all bits inside, none outside."""

    def __call__(self, values: Tensor) -> Tensor:
        """A copy, 0 outside the mask; ``values`` may be broadcast to the mask's shape."""
        return kept(values, self.bits)

    @cached_property
    def counts(self) -> Tensor:
        """int64 (B,): masked elements of each row of a (B, L) mask."""
        return self.bits.sum(-1, dtype=torch.int32).neg_().long()

    def in_place(self, fresh: Tensor) -> Tensor:
        """``fresh`` itself, 0 outside the mask."""
        return clear_(fresh, self.bits)


def kept(values: Tensor, bits: Tensor) -> Tensor:
    """A copy of ``values``, 0 where ``bits`` (of a :class:`Keep`) has none."""
    return torch.bitwise_and(values.detach().view(bits.dtype), bits).view(values.dtype)


def kept_(values: Tensor, bits: Tensor, out: Tensor) -> None:
    """Write :func:`kept` into ``out``, of the same shape and type."""
    torch.bitwise_and(values.detach().view(bits.dtype), bits, out=out.view(bits.dtype))


def clear_(fresh: Tensor, bits: Tensor) -> Tensor:
    """``fresh`` itself, changed to :func:`kept`."""
    fresh.view(bits.dtype).bitwise_and_(bits)
    return fresh


def within(values: Tensor, bound: float) -> bool:
    """True if all lie strictly within +- ``bound``; False, too, where the answer would wait for an accelerator."""
    if values.device.type != "cpu" or not values.numel():
        return False
    low, high = torch.aminmax(values)
    return -bound < low.item() and high.item() < bound


def nonempty_rows(mask: Tensor) -> Tensor:
    """bool (B,): rows of a bool (B, L) that have a masked token."""
    return mask.view(torch.uint8).amax(-1).bool() if mask.shape[-1] else mask.any(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` holds, as a scalar; 0 for an empty mask."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked tokens of each row: (B, L) -> (B,); 0 for an empty row."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Bring the masked values to zero mean and unit (Bessel-corrected) variance; 0 outside the mask.

    With fewer than two masked values nothing can be estimated and they are returned as they are.  Sums are taken in
    float64, so that equal values give exactly 0.
    """
    count = mask.sum()
    kept = torch.where(mask, values, 0.0)
    mean = kept.sum(dtype=torch.float64) / count.clamp(min=1)
    centred = torch.where(mask, values - mean.to(values.dtype), 0.0)
    variance = centred.square().sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    scale = (variance + eps).rsqrt().to(values.dtype)
    whitened = (centred if shift_mean else kept) * scale
    return torch.where(count > 1, whitened, kept)


@dataclass(frozen=True)
class Groups:
    """Which rows belong together. Rows of a group need not stand next to each other."""

    index: Tensor
    """int64 (B,): the group of each row, 0..G-1."""
    counts: Tensor
    """int64 (G,): rows of each group, all >= 1."""

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """From arbitrary int64 ids (B,)."""
        _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, counts)

    @property
    def sizes(self) -> Tensor:
        """int64 (B,): the size of each row's group."""
        return self.counts[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group: (B,) -> (G,), in the dtype of ``values``."""
        return torch.zeros_like(self.counts, dtype=values.dtype).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each group: (B,) -> (G,)."""
        return self.sum(values) / self.counts

    def std(self, values: Tensor) -> Tensor:
        """Bessel-corrected standard deviation of each group: (B,) -> (G,); 0 for a group of one."""
        centred = values - self.mean(values)[self.index]
        return (self.sum(centred.square()) / (self.counts - 1).clamp(min=1)).sqrt()


def segment_starts(mask: Tensor, turn_ids: Tensor | None = None) -> Tensor:
    """bool (B, L): the first token of each run of masked tokens; of each turn in it, where there are ``turn_ids``."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1] if turn_ids is None else ~mask[:, :-1] | (turn_ids[:, 1:] != turn_ids[:, :-1])
    return starts


def has_holes(mask: Tensor) -> Tensor:
    """bool scalar: some row has more than one run of masked tokens."""
    bits = mask.view(torch.uint8)
    starts = torch.count_nonzero(bits[:, 1:] > bits[:, :-1]) + torch.count_nonzero(bits[:, :1])
    return starts > torch.count_nonzero(bits.amax(-1)) if bits.numel() else starts > 0


def segment_mean(values: Tensor, mask: Tensor, turn_ids: Tensor | None = None) -> Tensor:
    """Mean over each segment of :func:`segment_starts`, on each of its tokens: (B, L) -> (B, L), 0 outside the mask."""
    # 1.. on masked tokens; what stands between is masked out below.
    ids = segment_starts(mask, turn_ids).flatten().cumsum(0)
    kept = torch.where(mask, values, 0.0).flatten()
    size = mask.numel() + 1
    totals = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, ids, kept)
    counts = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, ids, mask.flatten().to(kept))
    means = totals / counts.clamp(min=1)
    return torch.where(mask, means[ids].view_as(values), 0.0)


def level_log_ratio(log_ratio: Tensor, mask: Tensor, level: str, turn_ids: Tensor | None = None) -> Tensor:
    """Log-ratio of the unit that each token belongs to: (B, L) -> (B, L).

    ``token``: its own; ``segment``: mean over its turn, a run of masked tokens or, in it, of equal ``turn_ids``;
    ``geometric`` or ``seq``: mean over its response (GSPO, arXiv 2507.18071 eq. 7); ``sequence``: the sum over it;
    ``max``: the largest of its response.  Raises ``ValueError`` for another level.
    """
    if level == "token":
        return log_ratio
    if level == "max":
        largest = log_ratio.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) if mask.shape[-1] else log_ratio
        return torch.where(mask, largest, 0.0)
    if level == "segment":
        return segment_mean(log_ratio, mask, turn_ids)
    total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
    if level in ("geometric", "seq"):
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"unknown ratio level {level!r}; known: token, segment, geometric (seq), sequence, max")
    return torch.where(mask, total, 0.0)
