"""Configurations that cannot work are refused with the key, the value and a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.samples import make_role

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"pp": 2, "vpp": 4}, {}, "8 stages for 4 layers; use at most 4"),
        ({"additional_configs": {"num_layer": 3}}, {}, "TransformerConfig has no num_layer"),
        ({}, {"model_args": {"freeze_module_prefix": "modle"}}, "no parameter starts with 'modle'"),
        (
            {},
            {"model_args": {"freeze_module_prefix": "model.layers.0.self_attn.q_proj"}},
            "which Megatron keeps as one; name the module above",
        ),
        ({}, {"model_args": {"model_config_kwargs": {"hidden_act": "gelu"}}}, "the activation gelu"),
    ],
)
def test_refused(
    run_case: Callable[..., list[Any]], sizes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    assert message in run_case(cases.refused, 2, sizes, strategy="megatron_infer", **options)[0]


def test_heads_that_do_not_divide(run_case: Callable[..., list[Any]]) -> None:
    answer = run_case(cases.refused, 4, {"tp": 4}, strategy="megatron_infer")[0]
    assert "tensor_model_parallel_size: 4 does not divide the model's num_key_value_heads 2" in answer


def test_sizes_that_do_not_fit_the_ranks(run_ranks: Callable[..., list[Any]], family: Callable[[str], Path]) -> None:
    role = make_role(family("qwen2"), "megatron_infer", config={"tensor_model_parallel_size": 4})
    assert "does not divide the role's 2 ranks" in run_ranks(2, cases.refused, role, {})[0]


def test_other_families_are_named(run_case: Callable[..., list[Any]], tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8).save_pretrained(tmp_path)
    answer = run_case(cases.refused, 1, {}, tmp_path, strategy="megatron_infer")[0]
    assert "has model_type gpt2" in answer and "use a Qwen2, Qwen2.5, Qwen3, Llama, Mixtral or OLMoE model" in answer
