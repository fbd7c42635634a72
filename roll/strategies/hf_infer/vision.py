"""Vision-language models of the Qwen-VL kind as decoders."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from roll.protocol.images import EncodedVideo
from roll.protocol.vision import VisionInputs, check_images, patches_of, token_types, vision_token_ids
from roll.strategies.hf_infer.decoder import Images
from roll.strategies.hf_infer.generic import GenericDecoder
from roll.strategies.hf_infer.rows import DecodeSlots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
