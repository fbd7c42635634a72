"""Models of a translated run: what their names say of families that are not supported, and adapters."""

from __future__ import annotations

import re

from roll.translation.draft import Draft
from roll.translation.rules import EXPERTS, MULTIMODAL

OF_EXPERTS = re.compile(
    r"(?i)(?<![a-z])moe(?![a-z])|-a\d+(?:\.\d+)?b\b|mixtral|671b|moonlight|gpt-oss|deepseek-(?:v[23]|r1$|r1-0528$|moe)"
    r"|glm-4\.[5-9]|kimi-k|minimax-m|llama-4|qwen3-next|olmoe|dbrx"
)
"""Names of mixtures of experts."""
OF_IMAGES = re.compile(
    r"(?i)(?<![a-z])vl(?:a|m)?(?![a-z])|[\d.]vl(?![a-z])|vision|minicpm-?[ov]|omni(?![a-z])|llava|internvl|openvla|pixtral"
    r"|glm-?4\.?\d?v|kimi-vl|paligemma|idefics|smolvlm"
)
"""Names of models that see or hear."""
PARTS = 2
"""Parts of a path that name the model; folders above them say nothing."""


def put_models(draft: Draft) -> None:
    put_family(draft)
    put_adapters(draft)


def put_family(draft: Draft) -> None:
    """Refuse families that are not supported, where the name tells."""
    for fact in ("model", "rm_path"):
        name = "/".join(str(draft.facts.get(fact, "")).rstrip("/").split("/")[-PARTS:])
        for pattern, reason in ((OF_IMAGES, MULTIMODAL), (OF_EXPERTS, EXPERTS)):
            if pattern.search(name) and draft.states(fact):
                draft.problems.add(draft.names.get(fact, "model"), draft.facts[fact], reason)
                break


def put_adapters(draft: Draft) -> None:
    """LoRA of the policy and of the critic."""
    for suffix, section in (("", "actor_train"), (".critic", "critic")):
        rank_fact, alpha_fact, target_fact = (f"lora_{part}{suffix}" for part in ("rank", "alpha", "target"))
        rank, arguments = draft.get(rank_fact, default=0), f"{section}.model_args"
        if draft.get(f"lora_path{suffix}") is not None:
            draft.put(f"{arguments}.adapter_name_or_path", str(draft.facts[f"lora_path{suffix}"]), f"lora_path{suffix}")
        elif draft.states(rank_fact) and rank > 0:
            draft.put(f"{arguments}.lora_rank", rank, rank_fact)
            draft.put(f"{arguments}.lora_target", draft.get(target_fact, default="all-linear"), rank_fact, target_fact)
            draft.put(f"{arguments}.lora_alpha", draft.get(alpha_fact, default=16), alpha_fact, rank_fact)
