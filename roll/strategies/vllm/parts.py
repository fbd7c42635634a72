"""Which part of a checkpoint's tensor a rank should hold, and where it lies: told by sizes, not by vLLM's loaders."""

from __future__ import annotations

from typing import Any

import torch


def held_part(layer: Any, parameter: torch.Tensor, shard: Any, num_rows: int) -> torch.Tensor:
    """The part of a layer's parameter that one tensor of the checkpoint went to, as far as this rank has any of it.

    Args:
        shard: which of a fused parameter's tensors: ``q``, ``k``, ``v`` or an index; None: the parameter is not fused.
        num_rows: of the tensor.
    """
    if hasattr(layer, "shard_indices"):  # a vocabulary matrix, padded to more rows
        own = layer.shard_indices
        return parameter.data[: own.org_vocab_end_index - own.org_vocab_start_index]
    if shard is None:
        return parameter.data[:num_rows]
    if isinstance(shard, str):
        begin, size = layer._get_shard_offset_mapping(shard), layer._get_shard_size_mapping(shard)
    else:
        sizes = layer.output_partition_sizes
        begin, size = sum(sizes[:shard]), sizes[shard]
    return parameter.data[begin : begin + size]


def meant_part(layer: Any, whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that belongs into ``held``; the whole where sizes do not tell, which is then no match."""
    if hasattr(layer, "shard_indices"):
        own = layer.shard_indices
        return whole[own.org_vocab_start_index : own.org_vocab_end_index]
    rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if held.ndim != whole.ndim:
        return whole
    for dim, (all_of_it, own) in enumerate(zip(whole.shape, held.shape, strict=True)):
        # Ranks share heads of keys and values that are fewer than they.
        sharing = own * size // all_of_it if all_of_it else 0
        if own != all_of_it and sharing and rank // sharing * own + own <= all_of_it:
            whole = whole.narrow(dim, rank // sharing * own, own)
    return whole
