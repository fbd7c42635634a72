"""Layers of a Megatron model: norms, rotary angles, attention, routers of experts, and the layers of each model family.

Attention takes rows or flat runs of tokens, whole or with the sequence sharded over context-parallel ranks.

A layer sets its router up before each pass with what belongs to the micro-batch of that pass.  It does so when
activations are computed again in the backward pass too: what is recomputed is what was computed, whichever micro-batch
came in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from roll.models.attention import Attend, layout_attention
from roll.models.experts import MISSING
from roll.models.invariant import filled, in_layout, linear
from roll.models.patterns import Uncopied
from roll.strategies.megatron.adapters import (
    AdaptedColumnLinear,
    AdaptedExperts,
    AdaptedRowLinear,
    ExpertColumnLinear,
    ExpertRowLinear,
)
from roll.strategies.megatron.micro_batches import Arrangement
from roll.strategies.megatron.parallel import sparse_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock
    from transformers import PretrainedConfig


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467), in float32 inside.

    Megatron's own runs with sequence parallelism only where Transformer Engine is installed. ``heads``: queries (or
    keys) of all heads are normalised together, as OLMoE has it, over tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, heads: int | None = None, **_: object
    ) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        own = hidden_size if heads is None else heads * hidden_size // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        # With sequence parallelism each rank normalises a part of the sequence only, so its gradient is a partial sum:
        # Megatron all-reduces those of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel and heads is None  # type: ignore[attr-defined]
        self.eps, self.width = eps, None if heads is None else heads * hidden_size

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., dim); or (s, b, heads, dim), this rank's heads."""
        wide = hidden.float()
        if self.width is None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return self.weight * wide.to(hidden.dtype)
        wide = wide.flatten(-2)
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        # Each rank uses the sum for its own heads: the gradient is summed over ranks as well.
        wide = wide * torch.rsqrt(copy_to_tensor_model_parallel_region(squares) / self.width + self.eps)
        return (self.weight * wide.to(hidden.dtype)).view(hidden.shape)


class RotaryAngles(nn.Module):
    """Angles of rotary embeddings at this rank's positions: with context parallelism, a contiguous chunk of them."""

    # Megatron gets a length here and calls `forward` with it; a flat run of tokens passes its positions instead.

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        # Not a buffer: it stays float32 when the model is cast.
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(
        self,
        inference_context: None,
        decoder: TransformerBlock,
        hidden: Tensor | None,
        config: TransformerConfig,
        arrangement: Arrangement | None,
    ) -> int | Tensor:
        """The whole sequence's length, from this rank's part of the hidden states; or this rank's positions."""
        assert inference_context is None
        if arrangement is not None and arrangement.position_ids is not None:
            return arrangement.position_ids
        first = hidden if decoder.input_tensor is None else decoder.input_tensor
        assert first is not None
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return first.shape[0] * ranks * config.context_parallel_size

    def forward(self, length: int | Tensor, **_: object) -> Tensor:
        """float32 (length / context ranks, 1, 1, head_dim)."""
        if isinstance(length, Tensor):
            positions = length
        else:
            chunk = length // parallel_state.get_context_parallel_world_size()
            start = parallel_state.get_context_parallel_rank() * chunk
            positions = torch.arange(start, start + chunk, device=self.inverse_frequencies.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def block(config: TransformerConfig, hf: PretrainedConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    layers = [_layer(config, hf, is_sparse) for is_sparse in sparse_layers(hf)[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer(config: TransformerConfig, hf: PretrainedConfig, is_sparse: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_sparse else None,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.linear_qkv, attention.linear_proj = AdaptedColumnLinear, AdaptedRowLinear
    if is_sparse:
        layer.module = RoutedLayer
        moe = parts.mlp.submodules
        moe.router = Router
        experts = MLPSubmodules(linear_fc1=ExpertColumnLinear, linear_fc2=ExpertRowLinear)
        moe.experts = ModuleSpec(AdaptedExperts, submodules=experts)
        shared = MLPSubmodules(linear_fc1=AdaptedColumnLinear, linear_fc2=AdaptedRowLinear)
        moe.shared_experts.submodules = shared
    else:
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = AdaptedColumnLinear, AdaptedRowLinear
    if hf.model_type == "olmoe":
        attention.q_layernorm = ModuleSpec(RMSNorm, {"heads": hf.num_attention_heads})
        attention.k_layernorm = ModuleSpec(RMSNorm, {"heads": hf.num_key_value_heads})
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


class CausalAttention(MegatronModule):
    """The ``core_attention`` of a layer: (s, b, heads, dim) queries, keys and values to (s, b, heads * dim).

    Right padding needs no mask: no real token sees what comes after it.  In a flat run of tokens (b = 1) the
    arrangement says who sees whom.  With context parallelism s is the length of this rank's chunk.
    """

    attend: Attend | None = None

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
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
        **_: object,
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
            attention_pattern=None if pattern is None else Uncopied(pattern),
            context_group=self.context_group if self.context_group.size() > 1 else None,
            attend=self.attend,
        )
        # Contiguous, or the product that follows is summed in another order where weights need a gradient.
        return output.transpose(0, 1).flatten(2).contiguous()


def make_invariant(chunk: nn.Module, config: TransformerConfig) -> None:
    """Compute linear layers, whose matrices are whole on this rank, attention and activations of a dense chunk with the
    operations of :mod:`roll.models.invariant`, in place; norms and rotary angles are invariant as they are."""
    config.activation_func = partial(filled, config.activation_func)
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl, module.is_invariant = _product, True
        elif isinstance(module, CausalAttention):
            module.attend = in_layout


def _product(input: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> Tensor:
    return linear(input, weight, bias)


class RoutedLayer(TransformerLayer):
    """A transformer layer with experts."""

    def forward(self, *args: object, **kwargs: Any) -> Any:
        router, arrangement = self.mlp.router, kwargs["packed_seq_params"]
        router._share, routes = arrangement.share, arrangement.routes
        assert arrangement.is_padding is not None
        # Nothing is masked in a micro-batch of padding alone: a mean over no tokens would be 0 / 0 (its share is 0).
        router._is_padding = router._own(arrangement.is_padding) if arrangement.share else None
        if routes is not None:
            routes = router._own(routes)[:, :, router.index].flatten(0, 1)
        note = partial(router._note, arrangement) if router.records else None
        router.router_replay = None if routes is None and note is None else Choices(routes, note)
        return super().forward(*args, **kwargs)


@dataclass(eq=False)
class Choices:
    """The choice of experts in one pass of a router: replayed where routes are known, and recorded on request.

    Megatron calls an object of this form and uses the scores of the experts it returns: weights are always live.
    """

    routes: Tensor | None
    note: Callable[[Tensor], None] | None
    counts: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices (T, k)."""
        best, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is not None:
            known = (self.routes >= 0).all(-1, keepdim=True)
            live, chosen = chosen, torch.where(known, self.routes, chosen)
            best = scores.gather(1, chosen)
            changed = (chosen.sort(-1).values != live.sort(-1).values).any(-1)
            self.counts = torch.stack([known.sum(), (self.routes == MISSING).any(-1).sum(), changed.sum()])
        if self.note is not None:
            self.note(chosen)
        return best, chosen


class Router(TopKRouter):
    """Top-k routing. The balance loss of a micro-batch counts as much as every other's, whatever its tokens."""

    index = 0
    """Index of the layer among the whole model's layers with experts."""
    records = False
    router_replay: Choices | None
    counts: Tensor | None = None
    """int64 (3,) of the passes since it was None: tokens replayed, missing and changed."""

    def _note(self, arrangement: Arrangement, chosen: Tensor) -> None:
        assert arrangement.sources is not None
        arrangement.recorded[self.index] = (self._own(arrangement.sources).flatten(), chosen)

    def _own(self, tokens: Tensor) -> Tensor:
        """With sequence parallelism, this rank's part along the first dimension."""
        if not self.config.sequence_parallel:
            return tokens
        group = parallel_state.get_tensor_model_parallel_group()
        return tokens.chunk(group.size())[group.rank()]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's layers have no mask to give: rows are right-padded, and attention needs none."""
        routed: tuple[Tensor, Tensor] = super().forward(input, self._is_padding)
        if self.router_replay is not None and self.router_replay.counts is not None:
            own = self.router_replay.counts
            self.counts = own if self.counts is None else self.counts + own
        return routed

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *_: object, **__: object
    ) -> Tensor:
        """Attach the loss without Megatron's factor: the number of tokens, by which it would divide all gradients."""
        # Each of the ranks that share the tokens (tensor and context) computes its share of the same loss.
        scaled: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self._share)
        return scaled
