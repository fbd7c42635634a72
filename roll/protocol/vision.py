"""Images of a prompt on their way from the data layer to engines and trainers.

What travels is the image as it was encoded (a PNG or JPEG of some kilobytes), once for all samples of a prompt: the
rows of a group hold the same :class:`VisionInputs`, and pickle writes an object that is met twice once. Resizing and
cutting into patches happens where the pixels are needed, by one code and once for each image of a process, so that
engine and trainer compute with the same numbers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = "images"
"""Object column of a batch: for each row its :class:`VisionInputs`, or None for a row of text."""
PATCH_CACHE_BYTES = 512 * 2**20
"""Of patches that a process keeps for images that it meets again."""
MAX_ASPECT_RATIO = 200
"""Of the longer side to the shorter one, as the image processors of Qwen have it."""


class ImageError(ValueError):
    """An image that cannot be read or used."""


@dataclass(frozen=True)
class ImageProcessing:
    """Way of an image to patches: the settings of an image processor of the Qwen-VL kind."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch: channels, frames and pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: multiples of ``patch_size * merge_size`` with the aspect ratio kept as far
        as that goes, and between ``min_pixels`` and ``max_pixels`` in all.

        Raises:
            ImageError: a strip that is hundreds of times as long as wide.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ImageError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other")
        factor = self.patch_size * self.merge_size
        high, wide = (round(side / factor) * factor for side in (height, width))
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return high, wide

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(frames, rows, columns) of the patches of an image of this size; see :meth:`resized`."""
        high, wide = self.resized(height, width)
        return 1, high // self.patch_size, wide // self.patch_size

    def tokens(self, grid: Sequence[int]) -> int:
        """Placeholder tokens of an image with this grid."""
        return math.prod(grid) // self.merge_size**2


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image as a file has it."""

    data: np.ndarray
    """uint8 (bytes,); an array, because arrays travel out of band."""
    digest: str
    """Of ``data``: equal images are one."""

    @classmethod
    def of(cls, data: bytes) -> EncodedImage:
        return cls(np.frombuffer(data, dtype=np.uint8), hashlib.blake2b(data, digest_size=16).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedImage) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"image {self.digest}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, by the file's beginning.

        Raises:
            ImageError: not an image.
        """
        return self._header()[0]

    @property
    def format(self) -> str:
        """``png``, ``jpeg`` ..."""
        return self._header()[1]

    @property
    def file_name(self) -> str:
        """By its content, for files of a run that speak of it."""
        return f"{self.digest}.{self.format}"

    def _header(self) -> tuple[tuple[int, int], str]:
        from PIL import Image as PilImage

        try:
            with PilImage.open(io.BytesIO(self.data.tobytes())) as image:
                return image.size, str(image.format).lower()
        except (OSError, ValueError, SyntaxError, PilImage.DecompressionBombError) as error:
            raise ImageError(f"{type(error).__name__}: {error}") from error

    def thumbnail(self, side: int) -> bytes:
        """A PNG of the image, shrunk to ``side`` pixels where it is longer or wider.

        Raises:
            ImageError: see :meth:`decode`.
        """
        small = self.decode()
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "PNG")
        return file.getvalue()

    def decode(self) -> Image:
        """The image in RGB; what is transparent lies on white.

        Raises:
            ImageError: not an image, one that ends early, or one of more pixels than a decoder should accept.
        """
        from PIL import Image as PilImage

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", PilImage.DecompressionBombWarning)
                image = PilImage.open(io.BytesIO(self.data.tobytes()))
                image.load()
                if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                    layer = image.convert("RGBA")
                    ground = PilImage.new("RGB", layer.size, (255, 255, 255))
                    ground.paste(layer, mask=layer.getchannel("A"))
                    return ground
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, PilImage.DecompressionBombError, Warning) as error:
            raise ImageError(f"{type(error).__name__}: {error}") from error


def encoded_image(value: Any) -> EncodedImage:
    """An image of a program: bytes of a file, a ``data:`` URI, an image of PIL, or uint8 pixels (height, width, 3).

    Raises:
        ImageError: none of these.
    """
    if isinstance(value, EncodedImage):
        return value
    if isinstance(value, bytes):
        return EncodedImage.of(value)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return EncodedImage.of(base64.b64decode(value.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise ImageError(f"not base64: {error}") from error
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in (3, 4):
        from PIL import Image as PilImage

        value = PilImage.fromarray(np.ascontiguousarray(value))
    if hasattr(value, "save") and hasattr(value, "mode"):
        file = io.BytesIO()
        value.save(file, "PNG")
        return EncodedImage.of(file.getvalue())
    shape = f" {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else ""
    raise ImageError(
        f"expected bytes, a data: URI, an image of PIL or uint8 pixels (height, width, 3), "
        f"found {type(value).__name__}{shape}"
    )


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """The images of one prompt, in the order of their placeholders. All rows of a group hold the same object."""

    images: tuple[EncodedImage, ...]
    processing: ImageProcessing
    image_grid_thw: np.ndarray
    """int64 (images, 3): frames, rows and columns of patches."""

    @property
    def num_patches(self) -> int:
        return int(self.image_grid_thw.prod(-1).sum())

    @property
    def num_tokens(self) -> list[int]:
        """Placeholder tokens of each image."""
        return [self.processing.tokens(grid) for grid in self.image_grid_thw.tolist()]

    @property
    def image_keys(self) -> list[str]:
        """A name for each image and its processing, in hexadecimal: images of equal keys have equal patches."""
        texts = (f"{image.digest} {self.processing}" for image in self.images)
        return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]

    @property
    def file_names(self) -> list[str]:
        """Of each image, by its content, for files of a run that speak of it."""
        return [image.file_name for image in self.images]

    def grids(self) -> torch.Tensor:
        """``image_grid_thw`` as a tensor of its own, int64 (images, 3)."""
        return torch.from_numpy(np.array(self.image_grid_thw))

    def pixel_values(self) -> torch.Tensor:
        """Patches of all images, float32 (num_patches, patch_dim), as the model's processor would make them. Do not
        write to them: they may be the cache's.

        Raises:
            ImageError: an image that cannot be decoded.
        """
        parts = [patches_of(image, self.processing) for image in self.images]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def resized_images(self) -> list[Image]:
        """The images in the size that they have as patches, for engines that cut them themselves: their processor
        finds nothing left to resize."""
        return [resize(image.decode(), self.processing) for image in self.images]

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for files."""
        images = [image.data.tobytes() for image in self.images]
        return {"images": images, "processing": dict(vars(self.processing)), "grids": self.image_grid_thw.tolist()}

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> VisionInputs:
        """Undo :meth:`to_plain`."""
        processing: dict[str, Any] = dict(value["processing"])
        processing |= {key: tuple(processing[key]) for key in ("mean", "std")}
        images = tuple(EncodedImage.of(data) for data in value["images"])
        return cls(images, ImageProcessing(**processing), np.array(value["grids"], dtype=np.int64))


def vision_inputs(images: Sequence[EncodedImage], processing: ImageProcessing, whole: bool = True) -> VisionInputs:
    """The images of one prompt.

    Args:
        whole: decode each once to see that it can be; False: only its size is read.

    Raises:
        ImageError: an image that cannot be decoded, or a strip.
    """
    sizes = [image.decode().size if whole else image.size for image in images]
    grids = [processing.grid(height, width) for width, height in sizes]
    return VisionInputs(tuple(images), processing, np.array(grids, dtype=np.int64).reshape(-1, 3))


def vision_token_ids(config: Any) -> tuple[int, ...]:
    """Token ids that stand for images and videos in a vision-language model's configuration: the placeholders, and what
    opens and closes them. None for a model of text.

    A policy must not sample them: a placeholder without an image ends the forward pass. Engines leave them out of the
    distribution that they draw from, and trainers out of the one that log-probs are taken of.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if getattr(config, "vision_config", None) is None:
        return ()
    found = (getattr(config, name, None) for name in names)
    return tuple(sorted({int(token) for token in found if token is not None}))


def token_types(input_ids: torch.Tensor, config: Any) -> torch.Tensor:
    """``mm_token_type_ids`` int64, of the shape of ``input_ids``: 1 on the placeholders of images, 0 elsewhere."""
    return (input_ids == config.image_token_id).long()


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


class _PatchCache:
    """Patches by image and processing, the least recently used leave first. Safe between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: OrderedDict[tuple[str, ImageProcessing], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.num_processed = 0
        """Images that were cut into patches, since the process began."""

    def get(self, image: EncodedImage, processing: ImageProcessing) -> torch.Tensor:
        key = (image.digest, processing)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        resized = resize(image.decode(), processing)
        patches: torch.Tensor = _processor(processing)(images=[resized], return_tensors="pt")["pixel_values"]
        with self._lock:
            self.num_processed += 1
            if key not in self._held:
                self._held[key] = patches
                self._bytes += patches.nbytes
            while self._bytes > self._max_bytes and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= dropped.nbytes
        return patches


_PATCHES = _PatchCache(PATCH_CACHE_BYTES)


def patches_of(image: EncodedImage, processing: ImageProcessing) -> torch.Tensor:
    """Patches of one image, float32 (patches, patch_dim); not to be written to.

    Raises:
        ImageError: an image that cannot be decoded.
    """
    return _PATCHES.get(image, processing)


def num_processed() -> int:
    """Images that this process has cut into patches."""
    return _PATCHES.num_processed
