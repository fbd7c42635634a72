"""LoRA adapters that vLLM computes with itself: A and B alone, against the merged model."""

from __future__ import annotations

import pytest

from tests.strategies.engine_checks import check_adapters
from tests.strategies.vllm import adapter_cases
from tests.support.engines import whole_engines

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEY = "model.layers.0.self_attn.q_proj.weight#lora_A"
DOWN = "model.layers.0.mlp.down_proj.weight"


def test_adapters(in_engine_process, folders):
    found = in_engine_process(adapter_cases.adapters, folders["qwen2"])
    check_adapters(found)
    assert found["in flight"] == (10, True)
    on_the_way, not_set, plain, packed, right = found["faults"]
    assert on_the_way.endswith(f"({KEY})")
    assert "#lora_A, " in not_set and "down_proj" in not_set and "q_proj" not in not_set
    assert plain.endswith("(model.norm.weight)")
    assert packed.endswith(f"({DOWN})")
    assert right == ""


@whole_engines
@pytest.mark.timeout(900)
def test_adapters_on_two_ranks(in_engine_process, folders):
    found = in_engine_process(adapter_cases.adapters, folders["qwen3"], tensor_parallel_size=2)
    check_adapters(found)
    assert found["in flight"] == (10, True)
    assert found["faults"][0].endswith(f"({KEY})")
