"""Any transformers causal language model as a decoder, through its own forward pass; and the choice of a decoder."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from roll.models.routes import encoded
from roll.protocol.vision import EncodedImage, VisionInputs, patches_of, token_types, vision_token_ids
from roll.strategies.hf_infer.cache import CacheShape, DecodeSlots
from roll.strategies.hf_infer.decoder import Decoder, FusedDecoder, Images, PromptStates, is_fusable

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

    def prefill(self, prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        # Padding stands behind the prompt, where causal attention does not see it: no mask is needed.
        wanted, which = torch.unique(lengths - 1, return_inverse=True)
        cache = DynamicCache()
        inputs, offsets = self._inputs(tokens, [len(prompt) for prompt in prompts], images)
        logits = self._run(input_ids=tokens, **inputs, past_key_values=cache, logits_to_keep=wanted)
        keys_values = torch.stack([torch.stack(pair) for pair in _written(cache)])
        routes = None if self.chosen is None else self.chosen.reshape(*tokens.shape, *self.chosen.shape[1:])
        first = logits[torch.arange(len(prompts), device=self.device), which]
        return PromptStates(keys_values, first, offsets, routes)

    def _run(self, **inputs: Any) -> torch.Tensor:
        """Logits; the experts of all tokens too, where they are recorded."""
        if self.routing is None:
            return self.model(use_cache=True, **inputs).logits
        with self.routing.recording() as recorded:
            logits: torch.Tensor = self.model(use_cache=True, **inputs).logits
        chosen = torch.stack([choices for _, choices in recorded], 1)
        self.chosen = encoded(chosen, self.routing.layers[0].num_experts).cpu().numpy()
        return logits

    def extend(
        self,
        keys_values: torch.Tensor,
        known: Sequence[int],
        prompts: Sequence[Sequence[int]],
        images: Images | None = None,
    ) -> PromptStates:
        parts = [
            self._extend(keys_values[:, :, row, :, : len(prompt)], count, prompt, vision)
            for row, (count, prompt, vision) in enumerate(
                zip(known, prompts, images or [None] * len(prompts), strict=True)
            )
        ]
        logits = torch.cat([part for part, _ in parts])
        return PromptStates(keys_values, logits, [offset for _, offsets in parts for offset in offsets])

    def _extend(
        self, keys_values: torch.Tensor, known: int, prompt: Sequence[int], vision: VisionInputs | None
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Logits (1, vocab_size) and offsets behind one prompt.

        Args:
            keys_values: (num_layers, 2, num_kv_heads, length of the prompt, head_dim).
        """
        tokens = torch.tensor([prompt], device=self.device)
        inputs, offsets = self._inputs(tokens, [len(prompt)], None if vision is None else [vision], known)
        assert self.routing is None, "what is known of a prompt has no routes"
        logits = self._run(
            input_ids=tokens[:, known:],
            **inputs,
            past_key_values=Cache(layers=[_PromptLayer(part, known) for part in keys_values]),
            logits_to_keep=1,
        )
        return logits[:, -1], offsets

    def _inputs(
        self, tokens: torch.Tensor, lengths: Sequence[int], images: Images | None, known: int = 0
    ) -> tuple[dict[str, Any], Sequence[int]]:
        """Inputs of the model's forward pass besides the tokens, and the offsets of :class:`PromptStates`.

        Args:
            tokens: int64 (prompts, longest), padded behind their ends.
            known: tokens of the (only) prompt that are not computed.
        """
        positions = torch.arange(known, tokens.shape[1], device=self.device)
        return {"position_ids": positions.expand(len(tokens), -1)}, ()

    def _rotary_positions(self, slots: DecodeSlots) -> torch.Tensor:
        """Of the next token of each row, as the model's forward pass takes them."""
        return slots.rotary_positions[:, None]

    def decode(self, tokens: torch.Tensor, slots: DecodeSlots) -> torch.Tensor:
        bias = slots.bias()
        if bias is None:
            bias = torch.zeros(slots.size, slots.end, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            layer.slots = slots
        return self._run(
            input_ids=tokens[:, None],
            position_ids=self._rotary_positions(slots),
            attention_mask=bias[:, None, None],
            past_key_values=self._cache,
        )[:, -1]

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


FEATURE_CACHE_TOKENS = 16384
"""Placeholders of images whose features an engine keeps."""


class VisionDecoder(GenericDecoder):
    """A vision-language model of the Qwen-VL kind: images come before the tokens, positions have three dimensions.

    The vision tower sees each image once for the weights that it has, however many prompts and samples have it.

    Raises:
        ValueError: a family whose forward pass does not take the tower's outputs.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._body = model.model
        if not hasattr(self._body, "get_rope_index") or not hasattr(self._body, "visual"):
            raise ValueError(
                f"hf_infer: {type(model).__name__} is not a vision-language model that it computes; those are "
                "Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE"
            )
        self._config = model.config
        self.masked_token_ids = vision_token_ids(model.config)
        self._features: OrderedDict[str, _ImageFeatures] = OrderedDict()
        self.num_towers = 0
        """Images that the tower has seen, since the decoder was made."""

    def check_images(self, name: str, prompt: Sequence[int], vision: VisionInputs | None) -> None:
        config = self._config
        found = sum(token == config.image_token_id for token in prompt)
        expected = sum(vision.num_tokens) if vision is not None else 0
        if found != expected or config.video_token_id in prompt:
            images = len(vision.images) if vision is not None else 0
            raise ValueError(
                f"{name}: the prompt has {found} placeholders of images, and its {images} images have {expected}; they "
                "must be as many, and none of a video"
            )
        if vision is not None and vision.processing.patch_dim != self._patch_dim:
            raise ValueError(
                f"{name}: patches of {vision.processing.patch_dim} numbers, and the model's have {self._patch_dim}"
            )

    def prefix_key(self, token_ids: Sequence[int], vision: VisionInputs | None) -> Sequence[int]:
        """Where an image stands, a negative number made of the image."""
        if vision is None:
            return token_ids
        keys = (-(int(key[:14], 16) + 1) for key in vision.image_keys)
        names = (name for name, count in zip(keys, vision.num_tokens, strict=True) for _ in range(count))
        return [next(names) if token == self._config.image_token_id else token for token in token_ids]

    def forget_weights(self) -> None:
        self._features.clear()

    @property
    def _patch_dim(self) -> int:
        vision = self._config.vision_config
        return 3 * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2

    def _inputs(
        self, tokens: torch.Tensor, lengths: Sequence[int], images: Images | None, known: int = 0
    ) -> tuple[dict[str, Any], Sequence[int]]:
        if images is None:
            # Three equal positions a token, spelled out: the model would remember those of an earlier call.
            positions = torch.arange(known, tokens.shape[1], device=self.device).expand(3, len(tokens), -1)
            return {"position_ids": positions}, ()
        behind = torch.arange(tokens.shape[1], device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        grids = [vision.grids() for vision in images if vision is not None]
        positions, deltas = self._body.get_rope_index(
            tokens,
            mm_token_type_ids=token_types(tokens, self._config),
            image_grid_thw=torch.cat(grids).to(self.device) if grids else None,
            attention_mask=behind.long(),
        )
        inputs: dict[str, Any] = {"position_ids": positions[..., known:]}
        placeholders = int((tokens[:, known:] == self._config.image_token_id).sum())
        if placeholders:
            inputs["mm_encoder_outputs"] = {"image": self._images_of(images, placeholders)}
        return inputs, deltas.flatten().tolist()

    def _rotary_positions(self, slots: DecodeSlots) -> torch.Tensor:
        return slots.rotary_positions[None, :, None].expand(3, -1, -1)

    def _images_of(self, images: Images, placeholders: int) -> SimpleNamespace:
        """What the tower gives for the last ``placeholders`` image tokens of the prompts."""
        given = [vision for vision in images if vision is not None]
        missing = {
            key: (image, grid, vision)
            for vision in given
            for key, image, grid in zip(vision.image_keys, vision.images, vision.grids(), strict=True)
            if key not in self._features
        }
        if missing:
            self._run_tower(missing)
        found = []
        for key in (key for vision in given for key in vision.image_keys):
            self._features.move_to_end(key)
            found.append(self._features[key])
        while len(self._features) > len(missing) and self._held_tokens() > FEATURE_CACHE_TOKENS:
            self._features.popitem(last=False)
        pooled = torch.cat([one.pooled for one in found])[-placeholders:]
        layers = zip(*(one.deepstack for one in found), strict=True)
        deepstack = [(torch.cat(layer)[-placeholders:],) for layer in layers]
        return SimpleNamespace(pooler_output=(pooled,), deepstack_features=deepstack)

    def _run_tower(self, missing: Mapping[str, tuple[EncodedImage, torch.Tensor, VisionInputs]]) -> None:
        pixels = [patches_of(image, vision.processing) for image, _, vision in missing.values()]
        grids = torch.stack([grid for _, grid, _ in missing.values()])
        outputs = self._body.get_image_features(
            torch.cat(pixels).to(self.device), grids.to(self.device), return_dict=True
        )
        layers = getattr(outputs, "deepstack_features", None) or []
        for index, key in enumerate(missing):
            deepstack = [layer[index] for layer in layers]
            self._features[key] = _ImageFeatures(outputs.pooler_output[index], deepstack)
        self.num_towers += len(missing)

    def _held_tokens(self) -> int:
        return sum(len(one.pooled) for one in self._features.values())


@dataclass(frozen=True)
class _ImageFeatures:
    """What the vision tower gives for an image: (tokens, hidden size), and the same for some layers of the text."""

    pooled: torch.Tensor
    deepstack: list[torch.Tensor]


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
    decoder: Decoder
    if getattr(model.config, "vision_config", None) is not None:
        decoder = VisionDecoder(model)
    else:
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
