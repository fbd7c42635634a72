"""Tiny models whose folders hold a language model and a vision tower, as Qwen3.5 is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.strategies.moe_models import moe_config

TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
PUBLISHED = ("qwen3_5", "qwen3_5_moe")
"""Values of ``model_type``; the first is without experts, and its output matrix is the embeddings'."""
EXTRA_LAYER = "mtp.fc.weight"
"""A tensor of the layers that predict several tokens, which transformers has no class for."""


def write_published(folder: Path, family: str, **changes: Any) -> Path:
    """A model of ``family`` in its published form: all weights random, in bf16's numbers.

    Args:
        changes: keys of the language model's configuration.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tied = family == PUBLISHED[0]
    text = moe_config(f"{family}_text", **{"tie_word_embeddings": tied, **changes}).to_dict()
    config = AutoConfig.for_model(family, text_config=text, vision_config=TOWER, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
            if ".gate.weight" in name:
                tensor.normal_(std=0.5)  # far enough from a tie that rounding never changes the choice
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[EXTRA_LAYER] = torch.randn(4, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_apart(name: str) -> bool:
    """A tensor of a folder that the language model does not have."""
    return name.startswith(("model.visual.", "mtp."))
