"""Greedy tokens equal ``model.generate``, whatever the batch looks like."""

from __future__ import annotations

from typing import Any

import pytest

from roll.strategies.engines.requests import GenerationRequest
from roll.strategies.hf_infer.decoder import PromptStates
from tests.strategies.hf_infer.helpers import (
    CONFIGS,
    build_engine,
    build_model,
    generate_greedy,
    greedy,
    random_prompts,
    run,
)

CASES = [(name, kind) for name in CONFIGS for kind in ("fused", "generic") if (name, kind) != ("gpt2", "fused")]


@pytest.mark.default_rows("qwen2-fused", "qwen3-generic", "llama-fused", "gpt2-generic")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_generate_with_ragged_prompts_groups_and_refill(name, kind):
    model = build_model(name)
    prompts, limits = random_prompts([1, 3, 17, 9, 30, 5]), [25, 7, 40, 1, 12, 33]
    expected = [generate_greedy(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    engine = build_engine(model, kind, max_num_seqs=4)  # 18 samples: rows are refilled and groups are split
    requests = [GenerationRequest(str(i), p, greedy(limits[i]), num_samples=3) for i, p in enumerate(prompts)]
    outputs = run(engine, requests)
    for (request_id, _), output in outputs.items():
        tokens = expected[int(request_id)]
        assert output.token_ids == tokens
        assert output.finish_reason == ("stop" if tokens[-1] == 1 else "length")
        assert len(output.log_probs) == len(tokens)
    assert {len(tokens) for tokens in expected} != {len(expected[0])}, "lengths must differ to say anything"


@pytest.mark.long
def test_equals_generate_in_a_large_batch():
    """Enough rows for the kernels of large products, and row counts between the sizes that batches are filled up to."""
    model = build_model("llama")
    prompts = random_prompts([3 + i % 7 for i in range(20)])
    expected = [generate_greedy(model, prompt, 8 + i, min_new_tokens=8 + i) for i, prompt in enumerate(prompts)]
    requests = [
        GenerationRequest(str(i), prompt, greedy(8 + i, min_new_tokens=8 + i), num_samples=8)
        for i, prompt in enumerate(prompts)
    ]
    outputs = run(build_engine(model, max_num_seqs=157), requests)
    assert all(output.token_ids == expected[int(key[0])] for key, output in outputs.items())


def test_prompt_is_computed_once_for_a_split_group():
    engine = build_engine(build_model("qwen2"), max_num_seqs=3)
    computed: list[Any] = []
    prefill = engine._decoder.prefill

    def counting(prompts: Any, images: None) -> PromptStates:
        computed.extend(prompts)
        return prefill(prompts, images)

    engine._decoder.prefill = counting  # type: ignore[method-assign]
    prompts = random_prompts([4, 6])
    outputs = run(engine, [GenerationRequest(str(i), p, greedy(5 + i), num_samples=8) for i, p in enumerate(prompts)])
    assert len(outputs) == 16
    assert computed == prompts


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_on_an_accelerator(kind):
    model = build_model("qwen2")
    prompts = random_prompts([3, 17, 9])
    expected = [generate_greedy(model, p, 20) for p in prompts]
    engine = build_engine(model.cuda(), kind, max_num_seqs=4)
    outputs = run(engine, [GenerationRequest(str(i), p, greedy(20), 2) for i, p in enumerate(prompts)])
    assert all(output.token_ids == expected[int(key[0])] for key, output in outputs.items())
