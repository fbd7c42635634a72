"""Images in the forward pass of a vision-language model: their features, and positions of three axes.

A batch has an object column of :class:`~roll.protocol.vision.VisionInputs`. :func:`with_images` replaces it, once
for all micro-batches, by columns of one number a token: the feature of an image that replaces the token, and its
place. From there on images need no special treatment: a layout takes those numbers along with its tokens, whether these
are padded, packed, after a shared prompt or in the chunk of a rank.

An image that several rows share (all samples of its prompt) is in a micro-batch once. The vision tower computes it
once, its features go to the tokens of all rows, and autograd sums what comes back from them.

Positions (M-RoPE, Wang et al., 2024, "Qwen2-VL", arXiv:2409.12191): a token of text is at the same place on all three
axes, one after the token before it; those of an image share a start, from which they count frames, rows and columns;
what follows counts on from the largest of these.

A video is one of the images of a batch: its features are next to each other, and its placeholders are in one run
(Qwen2.5-VL, whose positions count its seconds) or in one for each of its times, with words between them (Qwen3-VL,
whose positions begin anew after these words).

A micro-batch without images still runs the tower, on a blank image whose outputs are added times zero: with a sharded
tower the other ranks wait for this one's part of every parameter, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.config.model_files import VISION_FAMILIES
from roll.models.layouts import ImageTokens, TokenLayout
from roll.protocol.images import EncodedVideo, ImageProcessing, Seen
from roll.protocol.vision import IMAGES, VisionInputs, patches_of, token_types, vision_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig, PreTrainedModel

FEATURES = "image_features"
"""Column int64 (B, L): which feature of the batch's distinct images replaces a token; -1 for text."""
POSITIONS = "rope_positions"
"""Column int64 (B, L, 3): frame, row and column."""
PROMPT_KEYS = "prompt_keys"
"""Column int64 (B, L): token ids, but below 0 a different number for each feature: equal prompts have equal images."""


def reads_images(config: PretrainedConfig) -> bool:
    """True for a vision-language model.

    Raises:
        ValueError: one of a family that is not known here.
    """
    if getattr(config, "vision_config", None) is None:
        return False
    if config.model_type not in VISION_FAMILIES:
        raise ValueError(
            f"model_args.model_name_or_path: a {config.model_type} model reads images in a way that is not known; "
            f"vision-language models of type {', '.join(VISION_FAMILIES)} can be trained"
        )
    text = config.text_config
    if config.model_type == "qwen3_vl_moe" and text.moe_intermediate_size == text.hidden_size:
        # transformers distinguishes the two layouts of an expert's matrix by shape, which a square one has in both.
        raise ValueError(
            f"model_args.model_name_or_path: experts of moe_intermediate_size {text.moe_intermediate_size}, its "
            "hidden_size, would be transposed when they are written and not when they are read; any other size works"
        )
    return True


@dataclass(frozen=True)
class ImagePool:
    """The distinct images and videos of a batch, I in all. Their features are counted from the first one's to the last
    one's."""

    images: tuple[tuple[Seen, ImageProcessing], ...]
    grids: Tensor
    """int64 (I, 3)."""
    lengths: Tensor
    """int64 (I,): features of each."""

    def attach(self, layout: TokenLayout, columns: dict[str, Tensor]) -> TokenLayout:
        """A layout with its images and the positions of its tokens, from the columns of its rows."""
        real, sources = layout.sources >= 0, layout.sources.clamp(min=0)
        positions = columns[POSITIONS].flatten(0, 1)[sources].movedim(-1, 0)
        of_token = torch.where(real, columns[FEATURES].flatten()[sources], -1).flatten()
        tokens = (of_token >= 0).nonzero()[:, 0]
        images = None
        if len(tokens):
            features = of_token[tokens]
            ends = self.lengths.cumsum(0)
            used, image = torch.bucketize(features, ends, right=True).unique(return_inverse=True)
            lengths = self.lengths[used]
            shift = (ends - self.lengths)[used] - (lengths.cumsum(0) - lengths)
            images = ImageTokens(
                pixel_values=torch.cat([patches_of(*self.images[index]) for index in used.tolist()]),
                grids=self.grids[used],
                lengths=lengths,
                tokens=tokens,
                features=features - shift[image],
            )
        return replace(layout, position_ids=positions, images=images)


def with_images(batch: dict[str, Any], config: PretrainedConfig) -> tuple[dict[str, Tensor], ImagePool | None]:
    """The batch with columns of tensors in place of that of images, and the images; None where no row has one.

    Raises:
        ValueError: a row with more or fewer placeholders than its images have features, one with a response of
            vision tokens, or images for a model that reads none.
    """
    columns: dict[str, Tensor] = {name: column for name, column in batch.items() if name != IMAGES}
    excluded = vision_token_ids(config)
    if excluded:
        impossible = torch.isin(columns["input_ids"], torch.tensor(excluded)) & columns["response_mask"].bool()
        for row, column in impossible.nonzero()[:1].tolist():
            token = int(columns["input_ids"][row, column])
            raise ValueError(
                f"the response in row {row} of the batch has token {token}, a placeholder of an image or of its ends: "
                "its probability is 0, for no policy samples it; leave such tokens to prompts"
            )
    rows = [row if row is not None and row.images else None for row in batch.get(IMAGES, ())]
    if not any(rows):
        return columns, None
    if not reads_images(config):
        raise ValueError(
            f"the batch has images, but the {config.model_type} model reads none; `pretrain` of a vision-language "
            f"model ({', '.join(VISION_FAMILIES)}) or data without images would do"
        )
    pool, of_row = _distinct(rows)
    ids, mask = columns["input_ids"], columns["attention_mask"].bool()
    # Padding may have the id of a placeholder.
    types = token_types(ids, config) * mask
    placeholders = types > 0
    _check_counts(types, rows)
    features = torch.full_like(ids, -1)
    features[placeholders] = torch.cat(of_row)
    # Positions from one time of an image or video to the next; None: each time has a start of its own.
    per_second = getattr(config.vision_config, "tokens_per_second", 1)
    intervals: list[float | None] = []
    for image, processing in pool.images:
        if not isinstance(image, EncodedVideo):
            intervals.append(1.0)
        else:
            intervals.append(None if image.timed else per_second * image.seconds_per_grid(processing))
    merge_size = config.vision_config.spatial_merge_size
    columns[POSITIONS] = rope_positions(features, mask, pool.grids, merge_size, intervals)
    columns[PROMPT_KEYS] = torch.where(features >= 0, -1 - features, ids)
    # No result depends on a row without a response, so the tower need not compute its images.
    columns[FEATURES] = features.masked_fill(~columns["response_mask"].any(1)[:, None], -1)
    return columns, pool


def rope_positions(
    features: Tensor, mask: Tensor, grids: Tensor, merge_size: int, intervals: Sequence[float | None]
) -> Tensor:
    """int64 (B, L, 3): the position of each token, 0 outside ``mask``.

    Args:
        features: int64 (B, L), as the column :data:`FEATURES`; those of an image, or of a time of a video whose times
            have a start each, are next to each other.
        mask: bool (B, L).
        grids: int64 (I, 3), of the images whose features are counted.
        merge_size: patches along one side of a feature.
        intervals: positions from one time of each image to the next; None: each time has a start of its own.
    """
    within, steps = [], []
    sides = (grids // torch.tensor([1, merge_size, merge_size])).tolist()
    for (times, high, wide), between in zip(sides, intervals, strict=True):
        begins = (torch.arange(times) * (0.0 if between is None else between)).long()
        axes = torch.meshgrid(begins, torch.arange(high), torch.arange(wide), indexing="ij")
        within.append(torch.stack(axes, -1).reshape(-1, 3))
        step = torch.zeros(times, high * wide, dtype=torch.int64)
        step[-1 if between is not None else slice(None), -1] = max(high, wide)  # after the last of a shared start
        steps.append(step.flatten())
    is_image, index = features >= 0, features.clamp(min=0)
    step = torch.where(is_image, torch.cat(steps)[index], mask.long())
    start = step.cumsum(1) - step
    positions = start[..., None] + torch.where(is_image[..., None], torch.cat(within)[index], 0)
    return positions * mask[..., None]


def _distinct(rows: Sequence[VisionInputs | None]) -> tuple[ImagePool, list[Tensor]]:
    """The images of all rows, each once, and for each row the features of its images in their order."""
    found: dict[tuple[str, ImageProcessing], int] = {}
    images: list[tuple[Seen, ImageProcessing]] = []
    grids: list[Tensor] = []
    lengths: list[int] = []
    of_row: list[list[int]] = [[] for _ in rows]
    for row, places in zip(rows, of_row, strict=True):
        if row is None:
            continue
        for image, grid, length in zip(row.images, row.grids(), row.num_tokens, strict=True):
            key = (image.digest, row.processing)
            if key not in found:
                found[key] = len(images)
                images.append((image, row.processing))
                grids.append(grid)
                lengths.append(length)
            places.append(found[key])
    parts = torch.arange(sum(lengths)).split(lengths)
    nothing = torch.empty(0, dtype=torch.int64)
    features = [torch.cat([parts[index] for index in places]) if places else nothing for places in of_row]
    return ImagePool(tuple(images), torch.stack(grids), torch.tensor(lengths)), features


def _check_counts(types: Tensor, rows: Sequence[VisionInputs | None]) -> None:
    for row, (of_row, seen) in enumerate(zip(types, rows, strict=True)):
        runs = seen.runs if seen is not None else []
        expected = torch.tensor([1 + is_video for is_video, count in runs for _ in range(count)], dtype=torch.int64)
        found = of_row[of_row > 0]
        for kind, name in ((1, "image"), (2, "video")):
            counts = int((found == kind).sum()), int((expected == kind).sum())
            if counts[0] != counts[1]:
                raise ValueError(
                    f"row {row} of the batch has {counts[0]} {name} placeholders, but its {name}s have {counts[1]} "
                    f"features: a prompt was cut inside one, or a placeholder was sampled"
                )
        if not torch.equal(found, expected):
            raise ValueError(f"row {row} of the batch has its images and videos in another order than its placeholders")


def text_inputs(body: Any, layout: TokenLayout) -> dict[str, Any]:
    """The vision tower's part of a forward pass: keywords for the language model, for one micro-batch.

    Args:
        body: the model without its head: ``visual``, ``language_model``.
    """
    embeddings = body.get_input_embeddings()(layout.input_ids)
    images = layout.images
    if images is None:
        return {"inputs_embeds": embeddings + _nothing_seen(body, embeddings)}
    seen = body.get_image_features(images.pixel_values, images.grids, return_dict=True)
    flat = embeddings.flatten(0, 1)
    features = torch.cat(seen.pooler_output).to(flat.dtype)[images.features]
    inputs = {"inputs_embeds": flat.index_copy(0, images.tokens, features).view_as(embeddings)}
    deep = getattr(seen, "deepstack_features", None)
    if deep is not None:
        mask = torch.zeros(flat.shape[:1], dtype=torch.bool, device=flat.device)
        mask[images.tokens] = True
        inputs["visual_pos_masks"] = mask.view(embeddings.shape[:2])
        inputs["deepstack_visual_embeds"] = [torch.cat(feature)[images.features] for feature in deep]
    return inputs


def _nothing_seen(body: Any, like: Tensor) -> Tensor:
    """Return 0 in the dtype of ``like``, computed by the whole tower: through every output that an image would use, or
    some layers would get no gradient, and through no other (ZeRO-3 requires the same modules on all ranks)."""
    config: Any = body.config.vision_config
    side = config.spatial_merge_size
    channels = getattr(config, "in_channels", 3)
    patch_dim = channels * config.temporal_patch_size * config.patch_size**2
    blank = torch.zeros(side * side, patch_dim, device=like.device)
    seen = body.get_image_features(blank, torch.tensor([[1, side, side]], device=like.device), return_dict=True)
    outputs = [*seen.pooler_output]
    outputs += [part for feature in getattr(seen, "deepstack_features", None) or () for part in feature]
    return sum((output.sum() for output in outputs), start=torch.zeros((), device=like.device)).to(like.dtype) * 0.0


def vision_modules(language_model: PreTrainedModel) -> set[int]:
    """``id`` of the modules of the vision tower; empty for a model of text."""
    tower = getattr(language_model.base_model, "visual", None)
    return set() if tower is None else {id(module) for module in tower.modules()}
