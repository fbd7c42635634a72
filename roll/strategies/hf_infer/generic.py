"""Any transformers causal language model as a decoder, through its own forward pass; and the choice of a decoder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from roll.strategies.hf_infer.cache import CacheShape, DecodeSlots
from roll.strategies.hf_infer.decoder import Decoder, FusedDecoder, PromptStates, is_fusable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class GenericDecoder(Decoder):
    """Calls ``model(...)`` with a transformers ``Cache`` that reads and writes the engine's rows.

    Raises:
        ValueError: the model's layers keep tensors of different shapes, or no keys and values at all.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._shape = self._probe_shape()
        self._layers = [_RowsLayer(index) for index in range(self._shape.num_layers)]
        self._cache = Cache(layers=list(self._layers))

    @property
    def cache_shape(self) -> CacheShape:
        return self._shape

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PromptStates:
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        # Padding stands behind the prompt, where causal attention does not see it: no mask is needed.
        wanted, which = torch.unique(lengths - 1, return_inverse=True)
        cache = DynamicCache()
        logits = self.model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=self.device).expand_as(tokens),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=wanted,
        ).logits
        keys_values = torch.stack([torch.stack(pair) for pair in _written(cache)])
        return PromptStates(keys_values, logits[torch.arange(len(prompts), device=self.device), which])

    def extend(self, keys_values: torch.Tensor, known: Sequence[int], prompts: Sequence[Sequence[int]]) -> PromptStates:
        logits = [
            self._extend(keys_values[:, :, row, :, : len(prompt)], count, prompt)
            for row, (count, prompt) in enumerate(zip(known, prompts, strict=True))
        ]
        return PromptStates(keys_values, torch.cat(logits))

    def _extend(self, keys_values: torch.Tensor, known: int, prompt: Sequence[int]) -> torch.Tensor:
        """Logits (1, vocab_size) behind one prompt; keys_values (num_layers, 2, num_kv_heads, length, head_dim)."""
        return self.model(
            input_ids=torch.tensor([prompt[known:]], device=self.device),
            position_ids=torch.arange(known, len(prompt), device=self.device)[None],
            past_key_values=Cache(layers=[_PromptLayer(part, known) for part in keys_values]),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def decode(self, tokens: torch.Tensor, slots: DecodeSlots) -> torch.Tensor:
        bias = slots.bias()
        if bias is None:
            bias = torch.zeros(slots.size, slots.end, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            layer.slots = slots
        return self.model(
            input_ids=tokens[:, None],
            position_ids=slots.positions[:, None],
            attention_mask=bias[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    @torch.no_grad()
    def _probe_shape(self) -> CacheShape:
        """Shape of what the model really writes into a cache, found by computing one token."""
        cache = DynamicCache()
        self.model(torch.zeros(1, 1, dtype=torch.int64, device=self.device), past_key_values=cache, use_cache=True)
        written = _written(cache)
        shapes = {tuple(tensor.shape) for pair in written for tensor in pair}
        if len(shapes) != 1:
            raise ValueError(
                f"hf_infer: the layers of {type(self.model).__name__} keep tensors of shapes {sorted(shapes)}; the "
                "engine needs keys and values of one shape in every layer"
            )
        _, num_kv_heads, _, head_dim = shapes.pop()
        return CacheShape(len(written), num_kv_heads, head_dim)


def _written(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, (batch, num_kv_heads, length, head_dim)."""
    return [(layer.keys, layer.values) for layer in cache.layers]


class _EngineLayer(CacheLayerMixin):
    """One layer of a cache in tensors that the engine has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to allocate."""

    def get_max_length(self) -> int:
        return -1


class _PromptLayer(_EngineLayer):
    """One prompt of which ``known`` tokens are there: ``keys_values`` (2, num_kv_heads, length, head_dim)."""

    def __init__(self, keys_values: torch.Tensor, known: int) -> None:
        super().__init__()
        self._keys_values = keys_values
        self._known = known

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys_values
        keys[:, self._known :], values[:, self._known :] = key_states[0], value_states[0]
        return keys[None], values[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._keys_values.shape[2], 0

    def get_seq_length(self) -> int:
        return self._known


class _RowsLayer(_EngineLayer):
    """The engine's rows during a decoding step."""

    slots: DecodeSlots

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots.append(self._index, key_states[:, :, 0], value_states[:, :, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.end, 0

    def get_seq_length(self) -> int:
        return self.slots.end - 1


def create_decoder(model: PreTrainedModel, max_model_len: int) -> Decoder:
    """The fused decoder where the model's family allows it, the generic one elsewhere.

    Raises:
        ValueError: a model with layers other than full causal attention.
    """
    _refuse_partial_attention(model, max_model_len)
    model.requires_grad_(False).eval()
    decoder = FusedDecoder(model, max_model_len) if is_fusable(model) else GenericDecoder(model)
    logger.info("hf_infer: %s is computed by %s", type(model).__name__, type(decoder).__name__)
    return decoder


def _refuse_partial_attention(model: PreTrainedModel, max_model_len: int) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention"} and window and not getattr(config, "layer_types", None):
        kinds = {"sliding_attention"}
    if window and max_model_len <= window:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ValueError(
            f"hf_infer: {type(model).__name__} has layers of type {', '.join(sorted(kinds))}; the engine's cache holds "
            f"full attention only. With a sliding window, set strategy_config.max_model_len to at most {window}"
        )
