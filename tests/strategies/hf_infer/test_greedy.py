"""Greedy tokens equal ``model.generate``, whatever the batch looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.strategies.engines.requests import GenerationRequest
from roll.strategies.hf_infer.decoder import FusedDecoder, PromptStates
from roll.strategies.hf_infer.generic import GenericDecoder, create_decoder
from tests.strategies.hf_infer.helpers import (
    CONFIGS,
    MAX_MODEL_LEN,
    build_engine,
    build_model,
    generate_greedy,
    greedy,
    random_prompts,
    run,
)
from tests.strategies.moe_models import write_moe

CASES = [(name, kind) for name in CONFIGS for kind in ("fused", "generic") if (name, kind) != ("gpt2", "fused")]


@pytest.mark.default_rows("qwen2-fused", "qwen3-generic", "llama-fused", "gpt2-generic")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_generate_with_ragged_prompts_groups_and_refill(name: str, kind: str) -> None:
    model = build_model(name)
    prompts = random_prompts([1, 3, 17, 9, 30, 5])
    limits = [25, 7, 40, 1, 12, 33]
    expected = [generate_greedy(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    engine = build_engine(model, kind, max_num_seqs=4)  # 18 samples: rows are refilled and groups are split
    outputs = run(
        engine, [GenerationRequest(str(i), p, greedy(limits[i]), num_samples=3) for i, p in enumerate(prompts)]
    )
    for (request_id, _), output in outputs.items():
        tokens = expected[int(request_id)]
        assert output.token_ids == tokens
        assert output.finish_reason == ("stop" if tokens[-1] == 1 else "length")
        assert len(output.log_probs) == len(tokens)
    assert {len(tokens) for tokens in expected} != {len(expected[0])}, "lengths must differ to say anything"


@pytest.mark.long
def test_a_family_with_shared_experts_and_a_bias_equals_generate(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_moe(tmp_path, "glm4_moe")).eval().requires_grad_(False)
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in random_prompts([1, 17, 30])]
    engine = build_engine(model, "generic", max_num_seqs=4)
    outputs = run(engine, [GenerationRequest(str(i), p, greedy(12), num_samples=2) for i, p in enumerate(prompts)])
    for (request_id, _), output in outputs.items():
        prompt = prompts[int(request_id)]
        assert output.token_ids == generate_greedy(model, prompt, 12)
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), wanted, rtol=0, atol=1e-5)


def test_families_whose_layers_keep_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM keep tensors of shapes .*one shape in every layer"):
        GenericDecoder(AutoModelForCausalLM.from_pretrained(write_moe(tmp_path, "deepseek_v3")))


def test_equals_generate_in_a_large_batch() -> None:
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


def test_weights_loaded_into_a_fused_model_are_the_ones_it_computes_with() -> None:
    model, other = build_model("qwen3"), build_model("qwen3", seed=1)
    engine_model = build_model("qwen3")
    decoder = FusedDecoder(engine_model, MAX_MODEL_LEN)
    assert decoder.weights.keys() == model.state_dict().keys()
    prompt = random_prompts([11])
    before = decoder.prefill(prompt).logits
    torch.testing.assert_close(before, model(torch.tensor(prompt)).logits[:, -1], rtol=1e-5, atol=1e-5)
    for name, tensor in other.state_dict().items():
        decoder.weights[name].copy_(tensor)
    after = decoder.prefill(prompt).logits
    torch.testing.assert_close(after, other(torch.tensor(prompt)).logits[:, -1], rtol=1e-5, atol=1e-5)
    assert (after - before).abs().max() > 0.1


def test_prompt_is_computed_once_for_a_split_group() -> None:
    engine = build_engine(build_model("qwen2"), max_num_seqs=3)
    computed: list[Any] = []
    prefill = engine._decoder.prefill

    def counting(prompts: Any) -> PromptStates:
        computed.extend(prompts)
        return prefill(prompts)

    engine._decoder.prefill = counting  # type: ignore[method-assign]
    prompts = random_prompts([4, 6])
    outputs = run(engine, [GenerationRequest(str(i), p, greedy(5 + i), num_samples=8) for i, p in enumerate(prompts)])
    assert len(outputs) == 16
    assert computed == prompts


def test_choice_of_decoder() -> None:
    assert isinstance(create_decoder(build_model("llama"), MAX_MODEL_LEN), FusedDecoder)
    assert isinstance(create_decoder(build_model("gpt2"), MAX_MODEL_LEN), GenericDecoder)


def test_sliding_window_is_refused_unless_no_sequence_reaches_it() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    with pytest.raises(ValueError, match="max_model_len to at most 16"):
        create_decoder(MistralForCausalLM(config), 17)
    model = MistralForCausalLM(config).eval()
    decoder = create_decoder(model, 16)
    prompt = random_prompts([12])
    torch.testing.assert_close(decoder.prefill(prompt).logits, model(torch.tensor(prompt)).logits[:, -1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_on_an_accelerator(kind: str) -> None:
    model = build_model("qwen2")
    prompts = random_prompts([3, 17, 9])
    expected = [generate_greedy(model, p, 20) for p in prompts]
    engine = build_engine(model.cuda(), kind, max_num_seqs=4)
    outputs = run(engine, [GenerationRequest(str(i), p, greedy(20), 2) for i, p in enumerate(prompts)])
    assert all(output.token_ids == expected[int(key[0])] for key, output in outputs.items())
