"""Any transformers causal language model as a decoder, through its own forward pass; with images those of the Qwen-VL
kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer

from roll.models.experts import encoded
from roll.models.layout_setup import FULL, SLIDING
from roll.protocol.images import EncodedVideo
from roll.protocol.vision import VisionInputs, check_images, patches_of, token_types, vision_token_ids
from roll.strategies.hf_infer.decoder import Decoder, Images, PromptStates
from roll.strategies.hf_infer.rows import CacheShape, DecodeSlots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR = "linear_attention"
"""A kind of layers, as configurations name them."""


class GenericDecoder(Decoder):
    """Calls ``model(...)`` with a transformers ``Cache`` that reads and writes the engine's rows. Layers may attend to
    all tokens, to a window of them, or linearly, by a state. Raises ValueError: the model's layers have different
    numbers of heads, or no keys and values at all."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config = model.config.get_text_config()
        self._kinds: tuple[str, ...] = tuple(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        # One token, for the shapes that the model really writes into a cache.
        probe, token = self._new_cache(), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            self.model(token, past_key_values=probe, use_cache=True)
        written = _written(probe)
        self._widths = [(keys.shape[-1], values.shape[-1]) for keys, values in written]
        heads = {tensor.shape[1] for pair in written for tensor in pair}
        if len(heads) != 1:
            raise ValueError(
                f"hf_infer: the layers of {type(self.model).__name__} keep keys and values of {sorted(heads)} heads; "
                "the engine needs one number of heads in every layer"
            )
        states = tuple((state.shape[1:], state.dtype) for state in _states(probe.layers))
        self.cache_shape = CacheShape(len(written), heads.pop(), max(max(pair) for pair in self._widths), states)
        self._layers = [_RowsLayer(index, widths) for index, widths in enumerate(self._widths)]
        self._linear = [LinearAttentionLayer() for layer in probe.layers if isinstance(layer, LinearAttentionLayer)]
        # In the order of the model's layers.
        linear, rows = iter(self._linear), iter(self._layers)
        in_order: list[Any] = [next(linear if isinstance(x, LinearAttentionLayer) else rows) for x in probe.layers]
        self._cache = Cache(layers=in_order)

    def prefill(self, prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        if not self.cache_shape.states or len({len(prompt) for prompt in prompts}) == 1:
            return self._prefill(prompts, images)
        # A recurrent state would be changed by the padding after a shorter prompt: only equal lengths go together.
        assert images is None
        by_length: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(row)
        parts = [(rows, self._prefill([prompts[row] for row in rows])) for rows in by_length.values()]
        count, longest, first = len(prompts), max(by_length), parts[0][1]
        shape = list(first.keys_values.shape)
        shape[2], shape[4] = count, longest
        keys_values, logits = first.keys_values.new_zeros(shape), first.logits.new_empty(count, first.logits.shape[1])
        states = [state.new_empty(count, *state.shape[1:]) for state in first.states]
        routes = None
        if first.routes is not None:
            routes = np.zeros((count, longest, *first.routes.shape[2:]), first.routes.dtype)
        for rows, part in parts:
            length = part.keys_values.shape[4]
            keys_values[:, :, rows, :, :length] = part.keys_values
            logits[rows] = part.logits
            for state, own in zip(states, part.states, strict=True):
                state[rows] = own
            if routes is not None:
                routes[rows, :length] = part.routes
        return PromptStates(keys_values, logits, (), routes, states)

    def _prefill(self, prompts: Sequence[Sequence[int]], images: Images | None = None) -> PromptStates:
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        # Padding comes after the prompt, where causal attention does not see it: no mask is needed.
        wanted, which = torch.unique(lengths - 1, return_inverse=True)
        cache = self._new_cache()
        inputs, offsets = self._inputs(tokens, [len(prompt) for prompt in prompts], images)
        logits = self._run(input_ids=tokens, **inputs, past_key_values=cache, logits_to_keep=wanted)
        width = self.cache_shape.head_dim
        keys_values = torch.stack([torch.stack([_padded(part, width) for part in pair]) for pair in _written(cache)])
        routes = None if self.chosen is None else self.chosen.reshape(*tokens.shape, *self.chosen.shape[1:])
        first = logits[torch.arange(len(prompts), device=self.device), which]
        return PromptStates(keys_values, first, offsets, routes, _states(cache.layers))

    def _run(self, **inputs: object) -> torch.Tensor:
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
        all_logits, all_offsets = [], []
        for row, (count, prompt, vision) in enumerate(
            zip(known, prompts, images or [None] * len(prompts), strict=True)
        ):
            assert self.routing is None, "what is known of a prompt has no routes"
            tokens = torch.tensor([prompt], device=self.device)
            inputs, offsets = self._inputs(tokens, [len(prompt)], None if vision is None else [vision], count)
            parts = zip(keys_values[:, :, row, :, : len(prompt)], self._widths, strict=True)
            cache = Cache(layers=[_PromptLayer(part, count, widths) for part, widths in parts])
            logits = self._run(input_ids=tokens[:, count:], **inputs, past_key_values=cache, logits_to_keep=1)
            all_logits.append(logits[:, -1])
            # A prompt of text, which may be among prompts with images, has none.
            all_offsets.append(offsets[0] if offsets else 0)
        return PromptStates(keys_values, torch.cat(all_logits), all_offsets)

    def _inputs(
        self, tokens: torch.Tensor, lengths: Sequence[int], images: Images | None, known: int = 0
    ) -> tuple[dict[str, Any], Sequence[int]]:
        """Inputs of the model's forward pass besides the tokens (prompts, longest), padded on the right, and offsets of
        :class:`PromptStates`; ``known`` tokens of the (only) prompt are not computed."""
        positions = torch.arange(known, tokens.shape[1], device=self.device)
        return {"position_ids": positions.expand(len(tokens), -1)}, ()

    def _rotary_positions(self, slots: DecodeSlots) -> torch.Tensor:
        """Position of each row's next token, as the model's forward pass takes them."""
        return slots.rotary_positions[:, None]

    def decode(self, tokens: torch.Tensor, slots: DecodeSlots) -> torch.Tensor:
        for layer in self._layers:
            layer.slots, layer.num_known = slots, slots.end - 1
        states = [state[: slots.size].clone() for state in slots.states]
        for linear, conv, recurrent in zip(self._linear, states[::2], states[1::2], strict=True):
            # These layer objects never ran a prefill, so transformers' flags are set as after one: without them a step
            # would start from zero states.
            linear.conv_states[0], linear.recurrent_states[0] = conv, recurrent
            linear.conv_kernel_size[0] = conv.shape[-1]
            linear.is_conv_states_initialized[0] = linear.is_recurrent_states_initialized[0] = True
            linear.has_previous_state[0] = True
        # Bias of the attention scores, (size, 1, 1, end): for all layers, or for each kind of them.
        windows = {FULL: None if self._kinds else self._window}
        if SLIDING in self._kinds:
            windows[SLIDING] = self._window
        masks: dict[str, torch.Tensor | None] = {LINEAR: None}
        for kind, window in windows.items():
            bias = slots.bias(window)
            if bias is None:
                bias = torch.zeros(slots.size, slots.end, dtype=self.dtype, device=self.device)
            masks[kind] = bias[:, None, None]
        logits = self._run(
            input_ids=tokens[:, None],
            position_ids=self._rotary_positions(slots),
            attention_mask=masks if set(self._kinds) - {FULL} else masks[FULL],
            past_key_values=self._cache,
        )[:, -1]
        # Of the decoded rows only: the rows after them, used to fill up the batch, may belong to samples that were
        # admitted in this step.
        for held, new in zip(slots.states, _states(self._linear), strict=True):
            held[: slots.count] = new[: slots.count]
        return logits

    def _new_cache(self) -> Cache:
        # It keeps all tokens, also in layers with a window: the engine's rows hold whole prompts.
        if LINEAR not in self._kinds:
            return DynamicCache()
        return Cache(layers=[LinearAttentionLayer() if kind == LINEAR else DynamicLayer() for kind in self._kinds])


def _written(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer that has any, (batch, num_kv_heads, length, head_dim)."""
    layers: Sequence[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers if not isinstance(layer, LinearAttentionLayer)]


def _states(layers: Sequence[Any]) -> list[torch.Tensor]:
    """Two states of each layer of linear attention, (batch, ...): of its convolution and of its recurrence."""
    linear: list[Any] = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    return [state for layer in linear for state in (layer.conv_states[0], layer.recurrent_states[0])]


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last dimension with zeros: keys and values may be of different length (DeepSeek-V3)."""
    return tensor if tensor.shape[-1] == width else torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


class _EngineLayer(CacheLayerMixin):
    """One layer of a cache in tensors that the engine has allocated, of which ``num_known`` tokens are there."""

    keys = values = None
    is_initialized = True
    num_known = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to allocate."""

    def get_max_length(self) -> int:
        return -1  # no maximum, for transformers

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_known + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_known


class _PromptLayer(_EngineLayer):
    """One prompt: ``keys_values`` (2, num_kv_heads, length, head_dim)."""

    def __init__(self, keys_values: torch.Tensor, known: int, widths: tuple[int, int]) -> None:
        self._keys_values = [part[..., :width] for part, width in zip(keys_values, widths, strict=True)]
        self.num_known = known

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys_values
        keys[:, self.num_known :], values[:, self.num_known :] = key_states[0], value_states[0]
        return keys[None], values[None]


class _RowsLayer(_EngineLayer):
    """The engine's rows during a decoding step."""

    slots: DecodeSlots

    def __init__(self, index: int, widths: tuple[int, int]) -> None:
        self._index, self._widths = index, widths

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(self._widths)
        new = (_padded(states[:, :, 0], width) for states in (key_states, value_states))
        keys, values = self.slots.append(self._index, *new)
        return keys[..., : self._widths[0]], values[..., : self._widths[1]]


FEATURE_CACHE_TOKENS = 16384  # placeholders of images whose features an engine keeps


class VisionDecoder(GenericDecoder):
    """A vision-language model of the Qwen-VL kind: images come before the tokens, positions have three dimensions.

    The vision tower sees each image once for the weights that it has, however many prompts and samples have it. Raises
    ValueError: a family whose forward pass does not take the tower's outputs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body: Any = model.model
        if not hasattr(self._body, "get_rope_index") or not hasattr(self._body, "visual"):
            raise ValueError(
                f"hf_infer: {type(model).__name__} is not a vision-language model that it computes; those are "
                "Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE"
            )
        self._config, tower = model.config, model.config.vision_config
        self._patch_dim = 3 * int(tower.temporal_patch_size) * int(tower.patch_size) ** 2
        self.masked_token_ids = vision_token_ids(model.config)
        self.num_towers = 0  # images that the tower has seen, since the decoder was made

    def check_images(self, name: str, prompt: Sequence[int], vision: VisionInputs | None) -> None:
        check_images(name, prompt, vision, self._config)
        if vision is not None and vision.processing.patch_dim != self._patch_dim:
            raise ValueError(
                f"{name}: patches of {vision.processing.patch_dim} numbers, and the model's have {self._patch_dim}"
            )

    def prefix_key(self, token_ids: Sequence[int], vision: VisionInputs | None) -> Sequence[int]:
        """Ids with a negative number, made of its content, in place of an image's or video's tokens."""
        if vision is None:
            return token_ids
        # 56 bits of the key, since the cache stores int64; plus 1, since -0 would be the id of token 0.
        keys = (-(int(key[:14], 16) + 1) for key in vision.image_keys)
        names = (name for name, count in zip(keys, vision.num_tokens, strict=True) for _ in range(count))
        placeholders = (self._config.image_token_id, self._config.video_token_id)
        return [next(names) if token in placeholders else token for token in token_ids]

    def _inputs(
        self, tokens: torch.Tensor, lengths: Sequence[int], images: Images | None, known: int = 0
    ) -> tuple[dict[str, Any], Sequence[int]]:
        if images is None:
            # Three equal positions for each token, always passed: the model would otherwise reuse the rope deltas that
            # it stored in an earlier call.
            positions = torch.arange(known, tokens.shape[1], device=self.device).expand(3, len(tokens), -1)
            return {"position_ids": positions}, ()
        real = torch.arange(tokens.shape[1], device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        types = token_types(tokens, self._config)
        present = [vision for vision in images if vision is not None]
        grids: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # of images, of videos
        seconds = []
        for vision in present:
            for one, grid in zip(vision.images, vision.grids(), strict=True):
                grids[isinstance(one, EncodedVideo)].append(grid)
                if isinstance(one, EncodedVideo):
                    seconds.append(one.seconds_per_grid(vision.processing))
        positions, _ = self._body.get_rope_index(
            tokens,
            mm_token_type_ids=types,
            image_grid_thw=torch.stack(grids[0]).to(self.device) if grids[0] else None,
            video_grid_thw=torch.stack(grids[1]).to(self.device) if grids[1] else None,
            second_per_grid_ts=seconds or None,
            attention_mask=real.long(),
        )
        # One after the last token, as in training. The model's own deltas count from the largest position, which
        # the times of a long video can be beyond.
        ends = torch.tensor(lengths, device=self.device)
        last = positions.amax(0).gather(1, ends[:, None] - 1)[:, 0]
        inputs: dict[str, Any] = {"position_ids": positions[..., known:]}
        new = types[:, known:]
        outputs = {
            name: self._features_of(present, count, kind == 2)
            for kind, name in ((1, "image"), (2, "video"))
            if (count := int((new == kind).sum()))
        }
        if outputs:
            inputs["mm_encoder_outputs"] = outputs
        return inputs, (last + 1 - ends).tolist()

    def _rotary_positions(self, slots: DecodeSlots) -> torch.Tensor:
        return slots.rotary_positions[None, :, None].expand(3, -1, -1)

    def _features_of(self, given: Sequence[VisionInputs], placeholders: int, of_videos: bool) -> SimpleNamespace:
        """The tower's features of the last ``placeholders`` tokens of images, or of videos, of the prompts."""
        missing = {
            key: (image, grid, vision)
            for vision in given
            for key, image, grid in zip(vision.image_keys, vision.images, vision.grids(), strict=True)
            if key not in self.features
        }
        if missing:
            pixels = [patches_of(image, vision.processing) for image, _, vision in missing.values()]
            grids = torch.stack([grid for _, grid, _ in missing.values()])
            outputs = self._body.get_image_features(
                torch.cat(pixels).to(self.device), grids.to(self.device), return_dict=True
            )
            layers = getattr(outputs, "deepstack_features", None) or []
            for index, key in enumerate(missing):
                self.features[key] = outputs.pooler_output[index], [layer[index] for layer in layers]
            self.num_towers += len(missing)
        found = []
        for vision in given:
            for key, image in zip(vision.image_keys, vision.images, strict=True):
                self.features.move_to_end(key)
                if isinstance(image, EncodedVideo) == of_videos:
                    found.append(self.features[key])
        held = sum(len(pooled) for pooled, _ in self.features.values())
        while len(self.features) > len(missing) and held > FEATURE_CACHE_TOKENS:
            held -= len(self.features.popitem(last=False)[1][0])
        pooled = torch.cat([pooled for pooled, _ in found])[-placeholders:]
        layers = zip(*(deepstack for _, deepstack in found), strict=True)
        deepstack = [(torch.cat(layer)[-placeholders:],) for layer in layers]
        return SimpleNamespace(pooler_output=(pooled,), deepstack_features=deepstack)
