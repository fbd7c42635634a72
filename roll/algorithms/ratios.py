"""Probability ratios at the level of tokens, segments and sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_starts(mask: Tensor) -> Tensor:
    """bool (B, L): the first token of each run of masked tokens."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def has_holes(mask: Tensor) -> Tensor:
    """bool scalar: some row has more than one run of masked tokens."""
    bits = mask.view(torch.uint8)
    starts = torch.count_nonzero(bits[:, 1:] > bits[:, :-1]) + torch.count_nonzero(bits[:, :1])
    return starts > torch.count_nonzero(bits.amax(-1)) if bits.numel() else starts > 0


def segment_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each run of masked tokens, repeated on its tokens: (B, L) -> (B, L), 0 outside the mask."""
    ids = segment_starts(mask).flatten().cumsum(0)  # 1.. on masked tokens; what stands between is masked out below
    kept = torch.where(mask, values, 0.0).flatten()
    size = mask.numel() + 1
    totals = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, ids, kept)
    counts = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, ids, mask.flatten().to(kept))
    means = totals / counts.clamp(min=1)
    return torch.where(mask, means[ids].view_as(values), 0.0)


def level_log_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Log-ratio of the unit that each token belongs to: (B, L) -> (B, L).

    ``token``: its own; ``segment``: mean over its run; ``geometric`` or ``seq``: mean over its response (GSPO, arXiv
    2507.18071 eq. 7); ``sequence``: sum over its response.  Raises ``ValueError`` for another level.
    """
    if level == "token":
        return log_ratio
    if level == "segment":
        return segment_mean(log_ratio, mask)
    total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
    if level in ("geometric", "seq"):
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"unknown ratio level {level!r}; known: token, segment, geometric (seq), sequence")
    return torch.where(mask, total, 0.0)
