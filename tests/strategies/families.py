"""Small models of several families, and how strategies are named and given rows in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.config.roles import WorkerConfig
from roll.config.strategies.registry import typed_strategy_config
from tests.strategies import moe_models
from tests.strategies.published_models import PUBLISHED, write_published
from tests.strategies.samples import TensorBatch, split_rows

VOCABULARY = 97
"""Odd: with two tensor-parallel ranks the vocabulary is padded."""


def write_family(folder: Path, family: str, value: bool = False) -> Path:
    """Four layers, so that there can be two chunks on each of two stages. ``value``: with a random scalar head."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    if family in PUBLISHED:
        return write_published(folder, family)
    if family in moe_models.FAMILIES | moe_models.DENSE:
        return moe_models.write_moe(folder, family, vocab_size=VOCABULARY, num_hidden_layers=4)
    options: dict[str, Any] = {
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
        "mistral": {"tie_word_embeddings": False, "sliding_window": 5},
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


SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dispatcher": "moe_token_dispatcher_type",
    "sp": "sequence_parallel",
    "dist_opt": "use_distributed_optimizer",
}
"""Of Megatron's options."""
SPLITS = {1: (12,), 2: (7, 5), 3: (5, 4, 3), 4: (5, 4, 3, 0)}
"""Rows by replica."""


def zero(stage: int, **config: Any) -> dict[str, Any]:
    """``strategy_config``. Under ZeRO-3 even the matrices of a tiny model are partitioned."""
    section = {"zero_optimization": {"stage3_param_persistence_threshold": 40}} if stage == 3 else {}
    return {"zero_stage": stage, **section, **config}


def strategy_of(short: str, config: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Name, ``strategy_config`` and package of ``fsdp2``, ``fsdp``, ``zero0`` to ``zero3`` and ``megatron``, each also
    with ``_infer`` at the end."""
    kind, _, ending = short.partition("_")
    ending = ending or "train"
    if kind.startswith("zero"):
        return f"deepspeed_{ending}", zero(int(kind[4:])) | config, "deepspeed"
    if kind == "megatron":
        return f"megatron_{ending}", {SHORT.get(key, key): value for key, value in config.items()}, "megatron.core"
    return f"{kind}_{ending}", config, "torch"


def rows_by_rank(
    world: int, role: WorkerConfig, batch: TensorBatch, split: tuple[int, ...] | None = None
) -> list[TensorBatch]:
    """All ranks of a replica get the same rows; replicas get different numbers of rows."""
    dims = typed_strategy_config(role.strategy_args).parallel_dims(role, world)
    parts = split_rows(batch, split or SPLITS[dims.dp])
    return [parts[dims.rank_info(rank).dp_rank] for rank in range(world)]
