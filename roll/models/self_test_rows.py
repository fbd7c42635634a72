"""The rows that self-tests compute, of text and with images, and the layouts that they are computed in."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.models.layouts import TokenLayout, packed_layout, row_layout, tree_layout
from roll.models.small import ORIGINAL_LENGTH, original_length
from roll.models.vision import PROMPT_KEYS, reads_images, with_images
from roll.protocol.images import EncodedImage, ImageProcessing
from roll.protocol.vision import IMAGES, VisionInputs, token_types, vision_inputs, vision_token_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_PROMPTS = (4, 4, 3)
_RESPONSES = (9, 3, 5)
# Where the configuration has an original length.
_BEYOND = (9, 3, ORIGINAL_LENGTH + 1)

Layouts = Mapping[str, Callable[[Tensor, Tensor, Tensor | None], TokenLayout]]
PADDED = "padded rows"
LAYOUTS: Layouts = {
    PADDED: lambda ids, mask, keys: row_layout(ids, mask, 2 * ORIGINAL_LENGTH),
    "packed rows": lambda ids, mask, keys: packed_layout(ids, mask),
    "shared prompts": lambda ids, mask, keys: tree_layout(ids, mask, prompt_keys=keys),
}
"""Functions of ids, response mask and (if rows have images) keys that distinguish prompts, each (B, T)."""


@dataclass(frozen=True)
class Rows:
    """Three rows; the first two share a prompt, and their lengths differ."""

    ids: Tensor
    """int64 (3, T)."""
    mask: Tensor
    """bool (3, T), of response tokens."""
    images: np.ndarray | None = None
    """For each row its :class:`~roll.protocol.vision.VisionInputs` or None; None: no row has an image."""

    def layout(self, name: str, config: PretrainedConfig) -> TokenLayout:
        """One of :data:`LAYOUTS`, with the images where there are any."""
        columns: dict[str, Any] = {"input_ids": self.ids, "response_mask": self.mask, "attention_mask": self.attended}
        pool = None
        if self.images is not None:
            columns, pool = with_images(columns | {IMAGES: self.images}, config)
        layout = LAYOUTS[name](self.ids, self.mask, columns.get(PROMPT_KEYS))
        return layout if pool is None else pool.attach(layout, columns)

    @property
    def attended(self) -> Tensor:
        """bool (3, T): prompts and responses."""
        last = self.mask.int().cumsum(1).argmax(1, keepdim=True)
        return torch.arange(self.mask.shape[1]) <= last

    def keywords(self, row: int, config: PretrainedConfig) -> dict[str, Any]:
        """Return the keywords of the plain model's forward pass over one row."""
        ids = self.ids[row : row + 1, : int(self.attended[row].sum())]
        seen = None if self.images is None else self.images[row]
        if seen is None:
            return {"input_ids": ids}
        return {
            "input_ids": ids,
            "mm_token_type_ids": token_types(ids, config),
            "pixel_values": seen.pixel_values(),
            "image_grid_thw": seen.grids(),
        }


def rows_of(model: PreTrainedModel) -> Rows:
    """Rows for a small copy, beyond the original length where it has one; the first two with an image where it sees."""
    config = model.config.get_text_config().to_dict()
    scaled = original_length(config) is not None or config.get("max_position_embeddings") == ORIGINAL_LENGTH
    seen = _image_for(model.config) if reads_images(model.config) else None
    marks: list[int] = []
    if seen is not None:
        own = model.config
        marks = [own.vision_start_token_id, *[own.image_token_id] * seen.num_tokens[0], own.vision_end_token_id]
    prompts = [_PROMPTS[0] + len(marks), _PROMPTS[1] + len(marks), _PROMPTS[2]]
    lengths = list(zip(prompts, _BEYOND if scaled else _RESPONSES, strict=True))
    width, random = max(map(sum, lengths)), torch.Generator().manual_seed(1)
    words = torch.tensor([token for token in range(2, 62) if token not in vision_token_ids(model.config)])
    ids = words[torch.randint(len(words), (len(lengths), width), generator=random)]
    mask = torch.zeros(len(lengths), width)
    ids[0, 1 : 1 + len(marks)] = torch.tensor(marks, dtype=ids.dtype)
    ids[1, : prompts[1]] = ids[0, : prompts[0]]
    for row, (prompt, response) in enumerate(lengths):
        ids[row, prompt + response :] = 0
        mask[row, prompt : prompt + response] = 1
    images = None
    if seen is not None:
        images = np.empty(len(lengths), dtype=object)
        images[:2] = seen
    return Rows(ids, mask.bool(), images)


def _image_for(config: PretrainedConfig) -> VisionInputs | None:
    """A picture of 2 x 5 features, wider than a window of a tower that has windows; None where it cannot be made."""
    tower = config.vision_config
    try:
        from PIL import Image

        side = tower.patch_size * tower.spatial_merge_size
        processing = ImageProcessing(
            patch_size=tower.patch_size,
            temporal_patch_size=tower.temporal_patch_size,
            merge_size=tower.spatial_merge_size,
            min_pixels=side * side,
        )
        pixels = torch.randint(0, 256, (2 * side, 5 * side, 3), generator=torch.Generator().manual_seed(3))
        file = io.BytesIO()
        Image.fromarray(pixels.byte().numpy()).save(file, "PNG")
        return vision_inputs([EncodedImage.of(file.getvalue())], processing)
    except (ImportError, AttributeError, ValueError) as error:
        logger.warning("self-test of a %s model: rows of text alone: %r", config.model_type, error)
        return None
