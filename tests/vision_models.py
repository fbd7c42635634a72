"""Tiny vision-language models and prompts with images, from the scripts of ``examples/tiny_vl``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_vl"))

import make_clips
import shapes
import tiny_vl_model

from roll.protocol.images import EncodedImage, ImageProcessing, VideoProcessing
from roll.protocol.vision import VisionInputs, vision_inputs

KINDS: tuple[tiny_vl_model.Kind, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PROCESSING = ImageProcessing(
    patch_size=tiny_vl_model.PATCH,
    merge_size=tiny_vl_model.MERGE,
    min_pixels=16 * 16,
    max_pixels=96 * 96,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
"""Settings of the image processor that ``tiny_vl_model.save`` writes."""


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt with its images; without: a prompt of text."""

    token_ids: list[int]
    vision: VisionInputs | None


def video_processing(kind: tiny_vl_model.Kind) -> VideoProcessing:
    """Settings of the video processor that ``tiny_vl_model.save`` writes."""
    if kind == "qwen2_5_vl":
        return VideoProcessing(timed=False, min_pixels=16 * 16, max_pixels=96 * 96)
    return VideoProcessing(timed=True, min_pixels=2 * 16 * 16, max_pixels=16 * 96 * 96)


def draw_clips(count: int, seed: int) -> list[make_clips.Clip]:
    return make_clips.draw_clips(count, seed)


def tokenizer() -> Any:
    return tiny_vl_model.make_tokenizer(
        f"user\n{one.question}\nassistant\n{one.solution()}" for one in shapes.draw_pictures(200, 0)
    )


def model(tokenizer: Any, kind: tiny_vl_model.Kind, seed: int = 0, hidden: int = 64) -> Any:
    """In float32, in evaluation mode."""
    return tiny_vl_model.make_model(tokenizer, seed, kind, hidden, vision_hidden=48 if hidden == 64 else 64).eval()


def save(folder: Path, kind: tiny_vl_model.Kind, seed: int = 0, hidden: int = 64) -> Path:
    """A model folder: weights, tokenizer and image processor."""
    words = tokenizer()
    tiny_vl_model.save(model(words, kind, seed, hidden), words, folder)
    return folder


def prompt(tokenizer: Any, seed: int, num_images: int = 1, size: tuple[int, int] | None = None) -> VisionPrompt:
    """A prompt about ``num_images`` pictures (0: text only), 9 tokens each, or of ``size`` (width, height) pixels."""
    pictures = shapes.draw_pictures(max(num_images, 1), seed)
    placeholders = [{"type": "image"}] * num_images
    content = [*placeholders, {"type": "text", "text": pictures[0].question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not num_images:
        return VisionPrompt(ids, None)
    images = [EncodedImage.of(one.png() if size is None else _enlarged(one.png(), size)) for one in pictures]
    vision = vision_inputs(images, PROCESSING)
    counts = iter(vision.num_tokens)
    image_token = tokenizer.convert_tokens_to_ids(tiny_vl_model.IMAGE)
    expanded = [token for one in ids for token in ([one] * next(counts) if one == image_token else [one])]
    return VisionPrompt(expanded, vision)


def frames(seed: int, count: int, size: tuple[int, int] | None = None) -> list[EncodedImage]:
    """Pictures of 48 x 48 pixels, or of ``size`` (width, height)."""
    pictures = [one.png() for one in shapes.draw_pictures(count, seed)]
    return [EncodedImage.of(one if size is None else _enlarged(one, size)) for one in pictures]


def video_prompt(
    tokenizer: Any,
    kind: tiny_vl_model.Kind,
    seed: int,
    counts: tuple[int, ...] = (4,),
    fps: float = 2.0,
    image: int = 0,
) -> VisionPrompt:
    """A prompt about videos of ``counts`` frames, before the last of which ``image`` pictures stand.

    The videos alternate between 48 x 48 and 64 x 32 pixels.
    """
    start, video_token, end = tiny_vl_model.VISION_START, tiny_vl_model.VIDEO, tiny_vl_model.VISION_END
    seen: list[Any] = []
    text = "<|im_start|>user\n"
    for number, count in enumerate(counts):
        if number == len(counts) - 1:
            seen += frames(seed + 100, image)
            text += f"{start}{tiny_vl_model.IMAGE * 9}{end}" * image
        size = (64, 32) if number % 2 else None
        processing = video_processing(kind)
        video = processing.encoded(frames(seed + number, count, size), fps, PROCESSING)
        seen.append(video)
        times = video.timestamps(PROCESSING)
        tokens = 8 if number % 2 else 9
        if processing.timed:
            parts = "".join(f"<{time:.1f} seconds>{start}{video_token * tokens}{end}" for time in times)
            text += f"{start}{parts}{end}"
        else:
            text += f"{start}{video_token * tokens * len(times)}{end}"
    text += "How many shapes are there?<|im_end|>\n<|im_start|>assistant\n"
    return VisionPrompt(tokenizer(text, add_special_tokens=False)["input_ids"], vision_inputs(seen, PROCESSING))


def _enlarged(png: bytes, size: tuple[int, int]) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(png)).resize(size).save(file, "PNG")
    return file.getvalue()
