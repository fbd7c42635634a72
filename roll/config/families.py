"""What a model's ``config.json`` says that it needs, and which strategies have it.

One table, :data:`SUPPORT`: a family becomes available by an entry there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VISION, AUDIO, EXPERTS, RECURRENT, ENCODER = "vision", "audio", "experts", "recurrent", "encoder"
NEEDS = {
    VISION: "a vision-language model",
    AUDIO: "a model that hears or speaks",
    EXPERTS: "a mixture-of-experts model",
    RECURRENT: "a model with linear-attention or state-space layers",
    ENCODER: "an encoder-decoder model",
}
"""What each capability is for, in words."""
SUPPORT: dict[str, tuple[str, ...]] = {
    VISION: (),
    AUDIO: (),
    EXPERTS: (),
    RECURRENT: (),
    ENCODER: (),
}
"""By capability: the strategies (by the beginning of their name) under which it is tested."""

RECURRENT_TYPES = frozenset(
    (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "plamo2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    )
)
"""Values of ``model_type`` of models whose layers keep a state."""
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_AUDIO_KEYS = ("audio_config", "thinker_config", "talker_config", "speech_config")
_VISION_KEYS = ("vision_config", "vision_tower", "visual", "image_token_id", "image_token_index")


def needed(config: Mapping[str, Any]) -> list[str]:
    """The capabilities that a model needs beyond those of a dense language model with attention layers."""
    sections = list(_sections(config))
    types = {str(section.get("model_type", "")) for section in sections}
    found = {
        AUDIO: any(section.get(key) for section in sections for key in _AUDIO_KEYS),
        VISION: any(section.get(key) is not None for section in sections for key in _VISION_KEYS),
        EXPERTS: any(_count(section.get(key)) > 1 for section in sections for key in _EXPERT_KEYS),
        RECURRENT: bool(types & RECURRENT_TYPES) or any(map(_has_state_layers, sections)),
        ENCODER: bool(config.get("is_encoder_decoder")),
    }
    return [name for name, holds in found.items() if holds]


def missing(config: Mapping[str, Any], strategy: str) -> list[str]:
    """The capabilities that ``strategy`` does not have."""
    return [name for name in needed(config) if not strategy.startswith(SUPPORT[name] or ("-",))]


def describe(config: Mapping[str, Any], capabilities: list[str]) -> str:
    """``model_type qwen3_moe: a mixture-of-experts model``."""
    kinds = " and ".join(NEEDS[name] for name in capabilities)
    return f"model_type {config.get('model_type', '?')}: {kinds}"


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration and those of its parts (``text_config`` and the like)."""
    yield config
    for key, value in config.items():
        if str(key).endswith("_config") and isinstance(value, Mapping):
            yield value


def _count(value: Any) -> int:
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _has_state_layers(config: Mapping[str, Any]) -> bool:
    layers = config.get("layer_types") or config.get("layers_block_type") or ()
    return isinstance(layers, list) and any(
        isinstance(kind, str) and ("linear" in kind or "mamba" in kind or "recurrent" in kind) for kind in layers
    )
