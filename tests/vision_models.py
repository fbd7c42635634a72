"""Tiny vision-language models and prompts with images, from the scripts of ``examples/tiny_vl``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_vl"))

import shapes
import tiny_vl_model

from roll.protocol.vision import EncodedImage, ImageProcessing, VisionInputs, vision_inputs

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


def _enlarged(png: bytes, size: tuple[int, int]) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(png)).resize(size).save(file, "PNG")
    return file.getvalue()
