"""Causal attention over rows or flat runs of tokens, whole or with the sequence cut over context-parallel ranks."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        pattern = None if packed_seq_params is None else packed_seq_params.pattern
        output, _weights = layout_attention(
            self,
            query,
            key,
            value,
            None,
            scaling=self.softmax_scale,
            attention_pattern=pattern,
            context_group=self.context_group if self.context_group.size() > 1 else None,
        )
        # Contiguous, or the product that follows is summed in another order where weights need a gradient.
        return output.transpose(0, 1).flatten(2).contiguous()
