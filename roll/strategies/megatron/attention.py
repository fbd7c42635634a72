"""Causal attention over rows or flat runs of tokens, whole or with the sequence cut over context-parallel ranks.

A context-parallel rank holds a contiguous chunk of the sequence and all of its heads; attention needs the whole
sequence and does with some heads.  An all-to-all before attention turns the one into the other, and one after it back
(Jacobs et al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509).  What ranks exchange is queries, keys, values and outputs
once each; no rank needs to know of masks or of the order of chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.models.attention import layout_attention
from roll.strategies.megatron.micro_batches import Arrangement


class CausalAttention(MegatronModule):
    """The ``core_attention`` of a layer: (s, b, heads, dim) queries, keys and values to (s, b, heads * dim).

    Right padding needs no mask: no real token sees what comes after it.  In a flat run of tokens (b = 1) the
    arrangement says who sees whom.  With context parallelism s is the length of this rank's chunk.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale
        self.context_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Arrangement | None = None,
        **_: Any,
    ) -> Tensor:
        assert attention_mask is None, "rows are right-padded and causal; there is no other mask"
        ranks = self.context_group.size()
        if ranks > 1:
            if key.shape[2] % ranks:
                # Fewer groups than ranks: each head brings its own copy, so that heads can be dealt out evenly.
                repeats = query.shape[2] // key.shape[2]
                key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
            query, key, value = (heads_for_sequence(tensor, self.context_group) for tensor in (query, key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        pattern = None if packed_seq_params is None else packed_seq_params.pattern
        output, _weights = layout_attention(
            self, query, key, value, None, scaling=self.softmax_scale, attention_pattern=pattern
        )
        output = output.transpose(0, 1)
        if ranks > 1:
            output = sequence_for_heads(output, self.context_group)
        return output.flatten(2)


def heads_for_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(s / n, b, heads, dim) of each of n ranks to (s, b, heads / n, dim): the whole sequence, some heads."""
    chunk, rows, heads, dim = tensor.shape
    ranks = group.size()
    parts = tensor.view(chunk, rows, ranks, heads // ranks, dim).permute(2, 0, 1, 3, 4).contiguous()
    return _AllToAll.apply(parts, group).view(ranks * chunk, rows, heads // ranks, dim)


def sequence_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of :func:`heads_for_sequence`."""
    length, rows, heads, dim = tensor.shape
    ranks = group.size()
    parts = tensor.reshape(ranks, length // ranks, rows, heads, dim).contiguous()
    received = _AllToAll.apply(parts, group)
    return received.permute(1, 2, 0, 3, 4).reshape(length // ranks, rows, ranks * heads, dim)


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
