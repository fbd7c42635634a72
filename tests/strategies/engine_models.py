"""Tiny models that every engine computes on a CPU, and ways to change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.strategies.hf_infer import helpers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMMON: dict[str, Any] = {
    **helpers._COMMON,
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,  # vLLM has no kernel for smaller heads
}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**{**COMMON, "num_key_value_heads": 2}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**{**COMMON, "num_key_value_heads": 1}, tie_word_embeddings=False),
}


def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = helpers.make_tokenizer()
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    jolt(model, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "fp32") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval().requires_grad_(False)


def jolt(model: Any, seed: int) -> None:
    """Move every weight, so that no tensor is constant and none stays what it was."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
