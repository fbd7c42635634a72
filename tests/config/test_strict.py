"""``strict_on_policy``: what it cannot do is refused by the key, before anything starts; what follows for the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.names import INVARIANT_ATTENTION
from roll.config.reading.errors import ConfigError
from roll.pipelines.strict_checks import check_strict_host
from tests.config.good import changed, load, mistakes

STRICT = {"strict_on_policy": True}


@pytest.mark.parametrize(
    ("changes", "key", "works"),
    [
        ({"actor_infer.strategy_args.strategy_name": "vllm"}, "actor_infer.strategy_args.strategy_name", "hf_infer"),
        ({"actor_infer.strategy_args.strategy_name": "sglang"}, "actor_infer.strategy_args.strategy_name", "hf_infer"),
        (
            {"actor_train.strategy_args": {"strategy_name": "megatron_train"}},
            "actor_train.strategy_args.strategy_name",
            "fsdp2_train",
        ),
        (
            {"actor_train.model_args.lora_target": "all-linear", "weight_sync.lora": "adapter"},
            "weight_sync.lora",
            "merged",
        ),
        ({"actor_infer.strategy_args.strategy_config": {"in_flight_update": "keep"}}, "", "recompute"),
        ({"actor_infer.generating_args.top_p": 0.9}, "actor_infer.generating_args.top_p", 1.0),
        ({"actor_infer.generating_args.top_k": 20}, "actor_infer.generating_args.top_k", 0),
        ({"actor_infer.generating_args.min_p": 0.1}, "actor_infer.generating_args.min_p", 0),
        (
            {"actor_infer.generating_args.repetition_penalty": 1.1},
            "actor_infer.generating_args.repetition_penalty",
            1.0,
        ),
        ({"actor_infer.generating_args.min_new_tokens": 4}, "actor_infer.generating_args.min_new_tokens", 0),
        ({"train_infer_correction": "tis"}, "train_infer_correction", "~"),
    ],
)
def test_refused_by_its_key(tmp_path: Path, changes: dict[str, Any], key: str, works: Any) -> None:
    assert mistakes(tmp_path, changed(STRICT)) == ()
    (problem,) = (one for one in mistakes(tmp_path, changed(STRICT | changes)) if "strict_on_policy" in one.rule)
    assert problem.key.endswith(key) and problem.example == works


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}, "experts"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_attention"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "capped logits"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}, "image_token_id": 5}, "vision"),
    ],
)
def test_models_of_other_layers(tmp_path: Path, model: dict[str, Any], why: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4} | model))
    problems = mistakes(tmp_path, changed(STRICT | {"pretrain": str(folder)}))
    (problem,) = (one for one in problems if "strict_on_policy" in one.rule)
    assert problem.key == "pretrain" and why in problem.rule


def test_the_plan_has_no_pass_before_the_update(tmp_path: Path) -> None:
    plan: Any = load(tmp_path, changed(STRICT | {"ppo_epochs": 2})).plan
    assert plan.engine_log_probs_as_old and not plan.needs_old_log_probs
    chosen = {name: role.section.model_args.attn_implementation for name, role in plan.roles.items()}
    assert chosen["actor_train"] == chosen["actor_infer"] == INVARIANT_ATTENTION
    plain: Any = load(tmp_path, changed({"ppo_epochs": 2})).plan
    assert plain.needs_old_log_probs and plain.roles["actor_train"].section.model_args.attn_implementation is None


def test_a_family_whose_attention_cannot_be_replaced(tmp_path: Path) -> None:
    from transformers import GPTNeoConfig

    folder = tmp_path / "model"
    GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=4).save_pretrained(folder)
    loaded = load(tmp_path, changed(STRICT | {"pretrain": str(folder)}))
    with pytest.raises(ConfigError, match="strict_on_policy = true: does not work here"):
        check_strict_host(loaded)
