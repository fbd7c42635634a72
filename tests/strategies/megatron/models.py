"""Small models of every translated family, and what a plain model computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.models.stored import StoredLayout
from tests.strategies import moe_models
from tests.strategies.samples import TensorBatch, plain_model, plain_outputs, policy_loss, value_loss

VOCABULARY = 97
"""Odd: with two tensor-parallel ranks the vocabulary is padded."""


def write_family(folder: Path, family: str, value: bool = False) -> Path:
    """Four layers, so that there can be two chunks on each of two stages. ``value``: with a random scalar head."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    if family in moe_models.FAMILIES:
        return moe_models.write_moe(folder, family, vocab_size=VOCABULARY, num_hidden_layers=4)
    options: dict[str, Any] = {
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
        "llama": {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    }[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        rms_norm_eps=1e-6,
        **options,
    )
    config.num_labels = 1
    build = AutoModelForTokenClassification if value else AutoModelForCausalLM
    model = build.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def plain_results(folder: Path, batch: TensorBatch) -> dict[str, Any]:
    """Outputs, gradients and their norm by the plain model on the whole batch."""
    model = plain_model(folder)
    outputs = plain_outputs(model, batch)
    policy_loss(outputs, batch)[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "outputs": {name: values.detach() for name, values in outputs.items()},
        "gradients": gradients,
        "stored_gradients": StoredLayout(model).views(gradients),
        "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
    }


def plain_value_results(folder: Path, batch: TensorBatch) -> dict[str, Any]:
    """Values, gradients and their norm by the plain value model: a token's value is that of the tokens before it."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1, 0]
    values = torch.nn.functional.pad(scores, (1, 0)) * batch["response_mask"]
    value_loss({"values": values}, batch)[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    return {"values": values.detach(), "gradients": gradients, "norm": norm}
