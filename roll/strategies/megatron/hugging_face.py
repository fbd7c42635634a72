"""The Hugging Face side of a Megatron model: its configuration and the export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roll.config.roles import ModelArguments
from roll.models.build import has_tied_embeddings, load_config
from roll.strategies.base import ModelHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = ("qwen2", "qwen3", "llama")
"""Values of ``model_type`` whose layers are translated (Qwen2.5 is ``qwen2``)."""


def skeleton(args: ModelArguments, head: ModelHead) -> PreTrainedModel:
    """The Hugging Face model without weights: names, shapes, configuration, and the code that writes an export.

    Raises:
        ValueError: no path, or a model that is not translated.
        OSError: no such folder, or a folder without a model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    if not args.model_name_or_path:
        raise ValueError("model_args.model_name_or_path: empty; give a model folder, or set `pretrain` for all roles")
    config = load_config(args)
    _check_family(config, args.model_name_or_path)
    with torch.device("meta"):
        if head is ModelHead.VALUE:
            config.num_labels = 1
            return AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _check_family(config: PretrainedConfig, path: str) -> None:
    reasons = {
        f"model_type {config.model_type}": config.model_type not in FAMILIES,
        "sliding-window layers": set(getattr(config, "layer_types", None) or ()) - {"full_attention"},
        "biases in all linear layers": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "biases in MLP layers": getattr(config, "mlp_bias", False),
        f"the activation {getattr(config, 'hidden_act', '')}": getattr(config, "hidden_act", "silu") != "silu",
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"model_args.model_name_or_path: {path} has {' and '.join(found)}, which the Megatron backend does not "
            "compute; use a Qwen2, Qwen2.5, Qwen3 or Llama model, or strategy_name: fsdp2_train"
        )


def rotary_frequencies(model: PreTrainedModel) -> torch.Tensor:
    """float32 (head_dim / 2,): the inverse frequencies, with the model's own scaling (Llama 3, linear ...).

    Raises:
        ValueError: a kind of scaling that also depends on the length of the sequence, or rescales attention.
    """
    on_meta: Any = model.base_model.rotary_emb
    rotary = type(on_meta)(model.config)
    if "dynamic" in rotary.rope_type or rotary.rope_type == "longrope" or rotary.attention_scaling != 1.0:
        raise ValueError(
            f"model_args.model_config_kwargs: rotary embeddings of type {rotary.rope_type} are not supported by the "
            "Megatron backend; use default, linear or llama3"
        )
    frequencies: torch.Tensor = rotary.inv_freq.float()
    return frequencies


def write_export(model: PreTrainedModel, weights: dict[str, torch.Tensor], source: str, path: Path) -> None:
    """Write ``weights`` (tied ones once) with ``model``'s configuration and the source's generation configuration."""
    from transformers import GenerationConfig

    names = dict(model.named_parameters())
    assert weights.keys() == names.keys(), names.keys() ^ weights.keys()
    model.load_state_dict(weights, assign=True, strict=not has_tied_embeddings(model))
    model.tie_weights()
    if (Path(source) / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.config.dtype = next(iter(weights.values())).dtype
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)


GENERATION_CONFIG = "generation_config.json"
