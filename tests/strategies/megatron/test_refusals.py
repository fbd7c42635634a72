"""Configurations that cannot work are refused with the key, the value and a way out."""

from __future__ import annotations

import pytest

from tests.strategies import jobs


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"pp": 2, "vpp": 4}, {}, "x virtual_pipeline_model_parallel_size 4 must divide the model's 4 layers"),
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
def test_refused(run, sizes, options, message):
    assert message in run(jobs.refused, 2, "megatron_infer", "qwen2", config=sizes, batch=None, **options)[0]


def test_sizes_that_do_not_fit(run):
    answer = run(jobs.refused, 4, "megatron_infer", "qwen2", config={"tp": 4}, batch=None)[0]
    assert "tensor_model_parallel_size: 4 must divide the model's 2 key-value heads; use e.g. 2" in answer
    answer = run(jobs.refused, 2, "megatron_infer", "qwen2", config={"tp": 4}, batch=None)[0]
    assert "must divide the role's 2 ranks" in answer


def test_other_families_are_named(run, tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8).save_pretrained(tmp_path)
    (answer,) = run(jobs.refused, 1, "megatron_infer", tmp_path, batch=None)
    assert "has model_type gpt2" in answer and "use a Qwen2, Qwen2.5, Qwen3, Llama, Mixtral or OLMoE model" in answer
