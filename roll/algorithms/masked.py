"""Statistics over the masked part of a tensor, and over groups of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
