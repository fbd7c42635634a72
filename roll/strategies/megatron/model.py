"""A Megatron ``GPTModel`` that computes log-probs, entropies or values of response tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from roll.strategies.base import ModelHead
from roll.strategies.megatron.adapters import AdaptedColumnLinear, AdaptedRowLinear
from roll.strategies.megatron.attention import CausalAttention
from roll.strategies.megatron.heads import LogProbHead, ValueHead
from roll.strategies.megatron.micro_batches import Arrangement, MicroBatch


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467), in float32 inside.

    Megatron's own runs with sequence parallelism only where Transformer Engine is installed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees its part of the sequence only: Megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class RotaryAngles(nn.Module):
    """Angles of rotary embeddings at this rank's positions: with context parallelism, a contiguous chunk of them."""

    # Megatron asks for a length and calls with it; in a flat run of tokens the positions themselves take that way.

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        # Not a buffer: it stays float32 when the model is cast.
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(
        self,
        inference_context: None,
        decoder: Any,
        hidden: Tensor | None,
        config: TransformerConfig,
        arrangement: Arrangement | None,
    ) -> int | Tensor:
        """The whole sequence's length, from this rank's part of the hidden states; or this rank's positions."""
        assert inference_context is None
        if arrangement is not None:
            return arrangement.position_ids
        first = hidden if decoder.input_tensor is None else decoder.input_tensor
        assert first is not None
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return first.shape[0] * ranks * config.context_parallel_size

    def forward(self, length: int | Tensor, **_: Any) -> Tensor:
        """float32 (length / context ranks, 1, 1, head_dim)."""
        if isinstance(length, Tensor):
            positions = length
        else:
            chunk = length // parallel_state.get_context_parallel_world_size()
            start = parallel_state.get_context_parallel_rank() * chunk
            positions = torch.arange(start, start + chunk, device=self.inverse_frequencies.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class ResponseGPT(GPTModel):
    """One chunk of the model: a pipeline stage, or one of a stage's chunks with virtual stages.

    Chunks but the last return hidden states; the last returns float32 (N,) tensors by output name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        head: ModelHead,
        vocab_size: int,
        tied: bool,
        inverse_frequencies: Tensor,
        virtual_stage: int | None,
    ) -> None:
        ranks = config.tensor_model_parallel_size
        padded = -(-vocab_size // ranks) * ranks
        self._head, self._vocab_size, self._padded_vocab_size = head, vocab_size, padded
        stage = {"ignore_virtual": virtual_stage is None, "vp_stage": virtual_stage}
        super().__init__(
            config=config,
            transformer_layer_spec=_block(config, virtual_stage),
            vocab_size=padded,
            max_sequence_length=0,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=tied and head is ModelHead.CAUSAL_LM,
            position_embedding_type="rope",
            vp_stage=virtual_stage,
        )
        self.rotary_pos_emb = RotaryAngles(inverse_frequencies)
        if self.pre_process:
            self.embedding.register_forward_hook(_start_of_gradients)

    def setup_embeddings_and_output_layer(self) -> None:
        """Called by Megatron when the layers exist: put our head in the place of the output layer, then tie it."""
        if self.post_process:
            tied = self.pre_process and self.share_embeddings_and_output_weights
            if self._head is ModelHead.VALUE:
                self.output_layer = ValueHead(self.config)
            else:
                self.output_layer = LogProbHead(self.config, self._padded_vocab_size, self._vocab_size, tied)
        super().setup_embeddings_and_output_layer()

    def forward(self, part: MicroBatch, outputs: Collection[str], temperature: float) -> Tensor | dict[str, Tensor]:
        hidden = super().forward(
            part.input_ids, position_ids=None, attention_mask=None, packed_seq_params=part.arrangement
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, part.predictors, part.targets, outputs, temperature, weight=weight)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Megatron would compute logits here."""
        return hidden_states


def _start_of_gradients(module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
    """Where the embeddings are frozen, let gradients come back to them all the same.

    Megatron gives a recomputed layer no gradient, and a pipeline stage no backward pass, unless its input wants one.
    """
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden


def _block(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.linear_qkv, attention.linear_proj = AdaptedColumnLinear, AdaptedRowLinear
    parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = AdaptedColumnLinear, AdaptedRowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
