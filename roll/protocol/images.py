"""Images and videos in transit: encoded as PNG or JPEG, some kilobytes each, with their sizes in patches.

A video is the list of its frames, each an encoded image. What models make of them is in :mod:`roll.protocol.vision`.

A model sees some frames of a video, in a size that two families choose differently. Qwen2.5-VL limits the pixels of a
frame, and its positions count time; Qwen3-VL limits those of all frames together, and its prompts say the time in words
(Bai et al., 2025, "Qwen2.5-VL Technical Report", arXiv:2502.13923; "Qwen3-VL Technical Report", arXiv:2511.21631). The
rules are those of transformers' video processors.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

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


# Frames of a video that a model sees


LEAST_FRAMES = 2  # A single frame is an image


@dataclass(frozen=True)
class VideoProcessing:
    """Settings of a video processor of the Qwen-VL kind, which chooses and resizes the frames that the model sees."""

    timed: bool  # Qwen3-VL's way; false: Qwen2.5-VL's
    min_pixels: int  # fewest pixels of a frame; of all frames together where ``timed``
    max_pixels: int
    fps: float = 2.0  # frames taken from a second
    min_frames: int = 4
    max_frames: int = 768
    frame_min_pixels: int | None = None  # fewest pixels of a frame in either family, instead of ``min_pixels``
    frame_max_pixels: int | None = None
    total_pixels: int | None = None  # most of all frames together

    def encoded(self, frames: Sequence[EncodedImage], fps: float | None, processing: ImageProcessing) -> EncodedVideo:
        """The frames of a whole video as the model sees them.

        Args:
            fps: frames in a second; None: they were taken with ``self.fps``.

        Raises:
            VideoError: too few frames, of different sizes, no images, or strips.
        """
        if len(frames) < LEAST_FRAMES:
            raise VideoError(f"{len(frames)} frames; a video has {LEAST_FRAMES} or more, a single frame is an image")
        sizes = []
        for number, frame in enumerate(frames):
            try:
                sizes.append(frame.size)
            except ImageError as error:
                raise VideoError(f"frame {number + 1}: {error}") from error
            if sizes[number] != sizes[0]:
                raise VideoError(f"frame {number + 1} has {sizes[number]} pixels (width, height), frame 1 {sizes[0]}")
        rate = self.fps if fps is None else fps
        indices = self.chosen(len(frames), rate, processing.temporal_patch_size)
        width, height = sizes[0]
        try:
            height, width = self.resized(len(indices), height, width, processing)
        except ImageError as error:
            raise VideoError(str(error)) from error
        return EncodedVideo(
            tuple(frames[index] for index in indices), tuple(indices), len(frames), rate, height, width, self.timed
        )

    def chosen(self, count: int, fps: float, temporal_patch_size: int = 2) -> list[int]:
        """Indices of the frames that are taken of ``count``: all, unless these are more in a second than ``self.fps``,
        or more than ``max_frames``; then evenly spread ones."""
        if fps <= self.fps and count <= self.max_frames:
            return list(range(count))
        wanted = count / fps * self.fps
        if self.timed:
            number = min(max(int(wanted), self.min_frames), self.max_frames, count)
            return [int(index) for index in np.linspace(0, count - 1, number).round()]
        most = min(self.max_frames, count) // temporal_patch_size * temporal_patch_size
        number = math.floor(min(max(wanted, self.min_frames), most) / temporal_patch_size) * temporal_patch_size
        return [int(index) for index in torch.arange(0, count, count / number).int()]

    def resized(self, count: int, height: int, width: int, processing: ImageProcessing) -> tuple[int, int]:
        """Height and width of ``count`` frames after resizing. Raises ``ImageError``: strips."""
        depth = processing.temporal_patch_size
        if not self.timed:
            low = self.frame_min_pixels or self.min_pixels
            high = self.frame_max_pixels or self.max_pixels
            if self.total_pixels is not None:
                # 5% above the minimum at least, as in qwen_vl_utils (fetch_video): the resizing needs room between the
                # two.
                high = max(min(high, self.total_pixels * depth // count), int(low * 1.05))
            return replace(processing, min_pixels=min(low, high), max_pixels=high).resized(height, width)
        factor = processing.patch_size * processing.merge_size
        low = self.min_pixels if self.frame_min_pixels is None else self.frame_min_pixels * count
        high = self.max_pixels if self.total_pixels is None else self.total_pixels
        if self.frame_max_pixels is not None:
            high = min(high, self.frame_max_pixels * count)
        low = min(low, high)
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        # Without limits: multiples of the factor, and the refusal of strips.
        high_side, wide_side = replace(processing, min_pixels=0, max_pixels=2**62).resized(height, width)
        volume = round(count / depth) * depth * high_side * wide_side
        if volume > high:
            shrink = math.sqrt(count * height * width / high)
            high_side, wide_side = (
                max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
            )
        elif volume < low:
            grow = math.sqrt(low / (count * height * width))
            high_side, wide_side = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return high_side, wide_side


@dataclass(frozen=True)
class EngineTime:
    """Positions of Qwen2.5-VL's videos in vLLM, where they count the seconds, next to those of transformers."""

    tokens_per_second: float
    dtype: str  # the engine's dtype by torch's name: vLLM rounds the seconds of a grid to it

    def difference(self, video: EncodedVideo, processing: ImageProcessing) -> str | None:
        """Text of what differs from the positions that a trainer computes with; None: nothing."""
        times, high, wide = video.grid(processing)
        seconds = video.seconds_per_grid(processing)
        rounded = torch.tensor(seconds, dtype=getattr(torch, self.dtype)).item()
        # In float32 here and in float64 there.
        ours = (torch.arange(times) * (self.tokens_per_second * seconds)).long().tolist()
        theirs = [int(time * (rounded * self.tokens_per_second)) for time in range(times)]
        if ours != theirs:
            return (
                f"vllm rounds its {seconds} seconds from one grid to the next to {self.dtype} ({rounded}), and places "
                f"its last grid at position {theirs[-1]}; the trainer's is {ours[-1]}"
            )
        sides = max(high, wide) // processing.merge_size
        if ours[-1] < sides:
            return None
        rows, columns = high // processing.merge_size, wide // processing.merge_size
        return (
            f"its seconds reach to position {ours[-1]}, its {rows} rows and {columns} columns to {sides - 1}: the text "
            f"behind it is {ours[-1] + 1 - sides} positions further in vllm than in the trainer"
        )
