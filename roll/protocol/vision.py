"""Images and videos of a prompt on their way from the data layer to engines and trainers.

What travels is the image as it was encoded (a PNG or JPEG of some kilobytes), once for all samples of a prompt: the
rows of a group hold the same :class:`VisionInputs`, and pickle writes an object that is met twice once. Resizing and
cutting into patches happens where the pixels are needed, by one code and once for each image of a process, so that
engine and trainer compute with the same numbers. A video is the list of its frames, each an encoded image.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.protocol.images import EncodedImage, EncodedVideo, ImageProcessing, Seen, decoded_frame

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

IMAGES = "images"  # object column of a batch: for each row its :class:`VisionInputs`, or None for a row of text
PATCH_CACHE_BYTES = 512 * 2**20  # size of a process's cache of patches, for images that come again


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """The images and videos of one prompt, in the order of their placeholders. All rows of a group hold the same
    object."""

    images: tuple[Seen, ...]  # videos too
    processing: ImageProcessing
    grid_thw: np.ndarray
    """int64 (images, 3): frames (of a video: grids of patches in time), rows and columns of patches."""

    @property
    def num_tokens(self) -> list[int]:
        """Placeholder tokens of each image or video."""
        return [self.processing.tokens(grid) for grid in self.grid_thw.tolist()]

    @property
    def runs(self) -> list[tuple[bool, int]]:
        """The runs of placeholders in a prompt, in order: (belongs to a video, number of placeholders).

        One for each image, and one for a video or, where the prompt says times, for each of its grids.
        """
        found: list[tuple[bool, int]] = []
        for one, count, grid in zip(self.images, self.num_tokens, self.grid_thw.tolist(), strict=True):
            is_video = isinstance(one, EncodedVideo)
            parts = grid[0] if isinstance(one, EncodedVideo) and one.timed else 1
            found += [(is_video, count // parts)] * parts
        return found

    @property
    def videos(self) -> list[EncodedVideo]:
        """The videos alone."""
        return [one for one in self.images if isinstance(one, EncodedVideo)]

    @property
    def pictures(self) -> list[EncodedImage]:
        """The images, and the frames of videos."""
        return [picture for one in self.images for picture in (one.frames if isinstance(one, EncodedVideo) else (one,))]

    @property
    def image_keys(self) -> list[str]:
        """A name for each image and its processing, in hexadecimal: images of equal keys have equal patches."""
        texts = (f"{image.digest} {self.processing}" for image in self.images)
        return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]

    @property
    def file_names(self) -> list[str]:
        """Names of the pictures in files of a run."""
        return [picture.file_name for picture in self.pictures]

    def grids(self) -> torch.Tensor:
        """A copy of ``grid_thw`` as a tensor, int64 (images, 3)."""
        return torch.from_numpy(np.array(self.grid_thw))

    def pixel_values(self) -> torch.Tensor:
        """Patches of all images, float32 (num_patches, patch_dim), as the model's processor would make them. Do not
        write to them: they may be the cache's. Raises ``ImageError``: an image that cannot be decoded."""
        parts = [patches_of(image, self.processing) for image in self.images]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def resized_images(self) -> list[Image]:
        """The images in the size that they have as patches, for engines that cut them themselves: their processor
        finds nothing left to resize."""
        return [resize(one.decode(), self.processing) for one in self.images if isinstance(one, EncodedImage)]

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for files."""
        images = [
            {field.name: getattr(one, field.name) for field in fields(one)}
            | {"frames": [frame.data.tobytes() for frame in one.frames]}
            if isinstance(one, EncodedVideo)
            else one.data.tobytes()
            for one in self.images
        ]
        return {"images": images, "processing": dict(vars(self.processing)), "grids": self.grid_thw.tolist()}

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> VisionInputs:
        """Undo :meth:`to_plain`."""
        processing: dict[str, Any] = dict(value["processing"])
        processing |= {key: tuple(processing[key]) for key in ("mean", "std")}
        images = tuple(
            EncodedImage.of(one)
            if isinstance(one, bytes)
            else EncodedVideo(
                **one
                | {"frames": tuple(EncodedImage.of(data) for data in one["frames"]), "indices": tuple(one["indices"])}
            )
            for one in value["images"]
        )
        return cls(images, ImageProcessing(**processing), np.array(value["grids"], dtype=np.int64))


def vision_inputs(images: Sequence[Seen], processing: ImageProcessing, whole: bool = True) -> VisionInputs:
    """The images and videos of one prompt.

    Args:
        whole: decode each once to see that it can be; False: only its size is read.

    Raises:
        ImageError: an image that cannot be decoded, or a strip.
        VideoError: a frame that cannot be decoded.
    """
    grids = []
    for one in images:
        if isinstance(one, EncodedVideo):
            if whole:
                for number, frame in enumerate(one.frames):
                    decoded_frame(frame, number)
            grids.append(one.grid(processing))
        else:
            width, height = one.decode().size if whole else one.size
            grids.append(processing.grid(height, width))
    return VisionInputs(tuple(images), processing, np.array(grids, dtype=np.int64).reshape(-1, 3))


def vision_token_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Token ids of the placeholders of images and videos in a vision-language model's configuration, and of what opens
    and closes them. None for a model of text.

    A policy must not sample them: a placeholder without an image ends the forward pass. Engines leave them out of the
    distribution that they draw from, and trainers out of the one that log-probs are taken of.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if getattr(config, "vision_config", None) is None:
        return ()
    found = (getattr(config, name, None) for name in names)
    return tuple(sorted({int(token) for token in found if token is not None}))


def check_images(name: str, token_ids: Sequence[int], vision: VisionInputs | None, config: PretrainedConfig) -> None:
    """
    Args:
        name: of the request, for messages.

    Raises:
        ValueError: images for a model of text, or that do not go with the placeholders of a prompt.
    """
    if getattr(config, "vision_config", None) is None:
        if vision is not None:
            raise ValueError(
                f"{name}: has {len(vision.images)} images, and a {config.model_type} model takes text only"
            )
        return
    image, video = config.image_token_id, config.video_token_id
    runs = vision.runs if vision is not None else []
    expected = [video if is_video else image for is_video, count in runs for _ in range(count)]
    found = [token for token in token_ids if token in (image, video)]
    if found == expected:
        return
    num_videos = len(vision.videos) if vision is not None else 0
    num_images = (len(vision.images) if vision is not None else 0) - num_videos
    raise ValueError(
        f"{name}: the prompt has {found.count(image)} placeholders of images, and its {num_images} images have "
        f"{expected.count(image)}; it has {found.count(video)} of videos, and its {num_videos} videos have "
        f"{expected.count(video)}; they must be as many, and in the same order"
    )


def token_types(input_ids: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """``mm_token_type_ids`` int64, of the shape of ``input_ids``: 1 on placeholders of images, 2 on those of videos,
    0 elsewhere."""
    return (input_ids == config.image_token_id).long() + 2 * (input_ids == config.video_token_id).long()


def resize(image: Image, processing: ImageProcessing) -> Image:
    """The image in the size of its patches, bicubic on 8 bits as the processors do it; itself where nothing changes."""
    from PIL import Image as PilImage

    height, width = processing.resized(image.height, image.width)
    if (width, height) == image.size:
        return image
    return image.resize((width, height), PilImage.Resampling.BICUBIC)


@lru_cache
def _processor(processing: ImageProcessing) -> Any:
    # The backend of PIL: that of torchvision gives other pixels where an image is resized.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=processing.patch_size,
        temporal_patch_size=processing.temporal_patch_size,
        merge_size=processing.merge_size,
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        image_mean=list(processing.mean),
        image_std=list(processing.std),
    )


def _cut(image: Seen, processing: ImageProcessing) -> torch.Tensor:
    """Patches, float32 (patches, patch_dim)."""
    if isinstance(image, EncodedImage):
        resized = resize(image.decode(), processing)
        whole: torch.Tensor = _processor(processing)(images=[resized], return_tensors="pt")["pixel_values"]
        return whole
    pictures = image.resized()
    patches = _processor(processing)(images=pictures, do_resize=False, return_tensors="pt")["pixel_values"]
    # The processor repeats an image in time to make patches of it: one copy of each frame is taken instead.
    depth, area = processing.temporal_patch_size, processing.patch_size**2
    single = patches.view(len(pictures), -1, 3, depth, area)[:, :, :, 0]
    single = torch.cat([single, single[-1:].expand(-len(pictures) % depth, -1, -1, -1)])
    in_time = single.view(-1, depth, *single.shape[1:]).permute(0, 2, 3, 1, 4)
    return in_time.reshape(-1, processing.patch_dim)


class _PatchCache:
    """Patches by image and processing, the least recently used leave first. Safe between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: OrderedDict[tuple[str, ImageProcessing], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.num_processed = 0  # images and videos that were cut into patches, since the process began

    def get(self, image: Seen, processing: ImageProcessing) -> torch.Tensor:
        key = (image.digest, processing)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        # Outside the lock: two threads may cut the same image, but none waits while another one decodes.
        patches = _cut(image, processing)
        with self._lock:
            self.num_processed += 1
            if key not in self._held:
                self._held[key] = patches
                self._bytes += patches.nbytes
            # One entry always stays: an image larger than the cache is still cut once for the rows that share it.
            while self._bytes > self._max_bytes and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= dropped.nbytes
        return patches


_PATCHES = _PatchCache(PATCH_CACHE_BYTES)


def patches_of(image: Seen, processing: ImageProcessing) -> torch.Tensor:
    """Patches of one image or video, float32 (patches, patch_dim); not to be written to. Raises ``ImageError``: an
    image that cannot be decoded."""
    return _PATCHES.get(image, processing)
