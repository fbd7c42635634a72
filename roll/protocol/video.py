"""Frames of a video that a model sees: which of them, and of how many pixels.

The two families differ. Qwen2.5-VL limits the pixels of a frame, and its positions count time; Qwen3-VL limits those of
all frames together, and its prompts say the time in words (Bai et al., 2025, "Qwen2.5-VL Technical Report",
arXiv:2502.13923; "Qwen3-VL Technical Report", arXiv:2511.21631). The rules are those of transformers' video processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from roll.protocol.images import EncodedImage, EncodedVideo, ImageError, ImageProcessing, VideoError

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
