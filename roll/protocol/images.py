"""Images and videos in transit: encoded as PNG or JPEG, some kilobytes each, with their sizes in patches.

A video is the list of its frames, each an encoded image. What models make of them is in :mod:`roll.protocol.vision`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT_RATIO = 200  # largest ratio of the longer side to the shorter one, as in Qwen's image processors


class ImageError(ValueError):
    """An image that cannot be read or used."""


class VideoError(ImageError):
    """A video that cannot be used, or one of whose frames cannot be read."""


@dataclass(frozen=True)
class ImageProcessing:
    """Settings of an image processor of the Qwen-VL kind."""

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
        as that goes, and between ``min_pixels`` and ``max_pixels`` in all. Raises ``ImageError``: a strip that is
        hundreds of times as long as wide."""
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


@dataclass(frozen=True)
class EncodedImage:
    """One image as a file has it."""

    data: np.ndarray = field(compare=False)  # uint8 (bytes,); an array, because arrays travel out of band
    digest: str  # hash of ``data``, by which images are compared

    @classmethod
    def of(cls, data: bytes) -> EncodedImage:
        return cls(np.frombuffer(data, dtype=np.uint8), hashlib.blake2b(data, digest_size=16).hexdigest())

    def __repr__(self) -> str:
        return f"image {self.digest}"

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, by the file's beginning. Raises ``ImageError``: not an image."""
        return self._header()[0]

    @property
    def file_name(self) -> str:
        """``DIGEST.FORMAT`` (``png``, ``jpeg`` ...): the name of the image in files of a run."""
        return f"{self.digest}.{self._header()[1]}"

    def _header(self) -> tuple[tuple[int, int], str]:
        from PIL import Image as PilImage

        try:
            with PilImage.open(io.BytesIO(self.data.tobytes())) as image:
                return image.size, str(image.format).lower()
        except (OSError, ValueError, SyntaxError, PilImage.DecompressionBombError) as error:
            raise ImageError(f"{type(error).__name__}: {error}") from error

    def thumbnail(self, side: int) -> bytes:
        """A PNG of the image, shrunk to ``side`` pixels where it is longer or wider. Raises ``ImageError``: see
        :meth:`decode`."""
        small = self.decode()
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "PNG")
        return file.getvalue()

    def decode(self) -> Image:
        """Decode to RGB; transparent pixels are blended with white. Raises ``ImageError``: not an image, one that ends
        early, or one of more pixels than a decoder should accept."""
        from PIL import Image as PilImage

        try:
            image = PilImage.open(io.BytesIO(self.data.tobytes()))
            # Pillow only warns up to twice its limit, and filters that make errors of warnings are not safe in threads.
            if image.width * image.height > (limit := PilImage.MAX_IMAGE_PIXELS or math.inf):
                raise ImageError(f"{image.width} x {image.height} pixels are more than the limit of {limit}")
            image.load()
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                layer = image.convert("RGBA")
                ground = PilImage.new("RGB", layer.size, (255, 255, 255))
                ground.paste(layer, mask=layer.getchannel("A"))
                return ground
            return image.convert("RGB")
        except ImageError:
            raise
        except (OSError, ValueError, SyntaxError, PilImage.DecompressionBombError, Warning) as error:
            raise ImageError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class EncodedVideo:
    """The frames of one video that the model sees."""

    frames: tuple[EncodedImage, ...]
    indices: tuple[int, ...]  # index of each frame in the whole video, ascending
    num_frames: int  # frames of the whole video
    fps: float  # frames of the whole video in a second
    height: int  # pixels that every frame is resized to
    width: int
    timed: bool
    """The prompt says the second of every grid of patches (Qwen3-VL), rather than their positions (Qwen2.5-VL)."""

    @cached_property
    def digest(self) -> str:
        """Hash of all fields, by which videos are compared."""
        rest = (self.indices, self.num_frames, self.fps, self.height, self.width, self.timed)
        text = f"{[frame.digest for frame in self.frames]} {rest}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"video {self.digest}"

    def seconds_per_grid(self, processing: ImageProcessing) -> float:
        """Seconds from one grid of patches to the next (``second_per_grid_ts``), in float32 as models get them."""
        return float(np.float32(processing.temporal_patch_size / (len(self.indices) / self.num_frames * self.fps)))

    def timestamps(self, processing: ImageProcessing) -> list[float]:
        """The second of each grid: the middle of its first and last frame."""
        size = processing.temporal_patch_size
        indices = [*self.indices, *[self.indices[-1]] * (-len(self.indices) % size)]
        times = [index / self.fps for index in indices]
        return [(times[start] + times[start + size - 1]) / 2 for start in range(0, len(times), size)]

    def grid(self, processing: ImageProcessing) -> tuple[int, int, int]:
        """(times, rows, columns) of the patches; the last frame is repeated where frames are missing to a patch."""
        times = -(-len(self.frames) // processing.temporal_patch_size)
        return times, self.height // processing.patch_size, self.width // processing.patch_size

    def resized(self) -> list[Image]:
        """The frames in the size that they have as patches. Raises ``VideoError``: a frame that cannot be decoded."""
        from PIL import Image as PilImage

        size = (self.width, self.height)
        images = [decoded_frame(frame, number) for number, frame in enumerate(self.frames)]
        return [one if one.size == size else one.resize(size, PilImage.Resampling.BICUBIC) for one in images]


Seen = EncodedImage | EncodedVideo  # an input that the vision tower sees as one


def decoded_frame(frame: EncodedImage, number: int) -> Image:
    """A frame of a video, counted from 0, in RGB. Raises ``VideoError``: see :meth:`EncodedImage.decode`."""
    try:
        return frame.decode()
    except ImageError as error:
        raise VideoError(f"frame {number + 1}: {error}") from error


def encoded_image(value: object) -> EncodedImage:
    """An image of a program: bytes of a file, a ``data:`` URI, an image of PIL, or uint8 pixels (height, width, 3).
    Raises ``ImageError``: none of these."""
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
