"""Families of models by their names, for models whose ``config.json`` is not on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PARTS = 2  # parts of a path that name the model; folders above them say nothing
_EXPERTS: dict[str, Any] = {"num_experts": 2}
_SEES: dict[str, Any] = {"vision_config": {}}
# Patterns of names, the first that fits, and as much of a `config.json` as says what the family needs.
NAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"qwen2[.-]?5-vl", {"model_type": "qwen2_5_vl", **_SEES}),
    (r"qwen3-vl-\d+b-a\d+b", {"model_type": "qwen3_vl_moe", **_SEES, **_EXPERTS}),
    (r"qwen3-vl", {"model_type": "qwen3_vl", **_SEES}),
    (r"qwen3-omni|qwen2[.-]?5-omni", {"model_type": "qwen_omni", "thinker_config": {"hidden_size": 1}}),
    (r"qwen3-next", {"model_type": "qwen3_next", **_EXPERTS}),
    (r"qwen3\.[5-9]-\d+b-a\d+b", {"model_type": "qwen3_5_moe", **_SEES, **_EXPERTS}),
    (r"qwen3\.[5-9]", {"model_type": "qwen3_5", **_SEES}),
    (r"qwen3-(?:\w+-)?\d+b-(?:a\d+b|moe)|qwen3-?moe", {"model_type": "qwen3_moe", **_EXPERTS}),
    (r"qwen2-57b-a14b|qwen1\.5-moe", {"model_type": "qwen2_moe", **_EXPERTS}),
    (r"mixtral", {"model_type": "mixtral", **_EXPERTS}),
    (r"olmoe", {"model_type": "olmoe", **_EXPERTS}),
    (r"moonlight|671b|deepseek-(?:v3|r1$|r1-0528$)|(?<![a-z])dsv3", {"model_type": "deepseek_v3", **_EXPERTS}),
    (r"deepseek-(?:v2|moe)", {"model_type": "deepseek_v2", **_EXPERTS}),
    (r"glm-4\.7-flash", {"model_type": "glm4_moe_lite", **_EXPERTS}),
    (r"glm-4\.[5-9]v", {"model_type": "glm4v_moe", **_SEES, **_EXPERTS}),
    (r"glm-4\.[5-9]", {"model_type": "glm4_moe", **_EXPERTS}),
    (r"glm-?5", {"model_type": "glm_moe_dsa", **_EXPERTS}),
    (r"gpt-oss", {"model_type": "gpt_oss", **_EXPERTS}),
    (
        r"(?<![a-z])vl(?:a|m)?(?![a-z])|[\d.]vl(?![a-z])|vision|minicpm-?[ov]|omni(?![a-z])|llava|internvl|openvla|pixtral"
        r"|glm-?4\.?\d?v|kimi-vl|paligemma|idefics|smolvlm",
        {"model_type": "", **_SEES},
    ),
    (r"(?<![a-z])moe(?![a-z])|-a\d+(?:\.\d+)?b\b|kimi-k|minimax-m|llama-4|dbrx", {"model_type": "", **_EXPERTS}),
    (
        r"mamba|rwkv|jamba|recurrentgemma|falcon-h1|(?<![a-z])lfm|nemotron-(?:h|nano|3(?:\.\d)?-[a-z])",
        {"model_type": "falcon_h1"},
    ),
    (r"(?<![a-z])(?:flan-)?t5(?![a-z])|(?<![a-z])bart|whisper", {"model_type": "t5", "is_encoder_decoder": True}),
    (r"qwen|llama|mistral|ministral|smollm|olmo|gemma|phi-?\d|granite|deepseek|internlm|yi-|glm|gpt2|pythia|opt-", {}),
)


def family_of(name: str) -> Mapping[str, Any] | None:
    """Entries of the model's ``config.json`` that its name tells (none for a dense language model); None: the name
    says nothing."""
    last = "/".join(name.rstrip("/").split("/")[-PARTS:]).lower()
    return next((config for pattern, config in NAMES if re.search(pattern, last)), None)
