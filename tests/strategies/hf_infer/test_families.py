"""Families whose layers keep something else than keys and values of all tokens, of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.config.roles import ModelArguments
from roll.models.build import build_model
from roll.strategies.engines.requests import GenerationRequest, SamplingParams, interrupted
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.generic import GenericDecoder
from roll.strategies.hf_infer.strategy import create_decoder
from tests.strategies.hf_infer.helpers import random_prompts, run, run_out
from tests.strategies.moe_models import write_moe
from tests.strategies.samples import VOCABULARY

WINDOW = 7
FAMILIES = {
    "glm4_moe": {},
    "deepseek_v3": {},  # values shorter than keys
    "gpt_oss": {"sliding_window": WINDOW},  # sinks; every second layer has a window
    "qwen3_next": {},  # three of four layers keep a state
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "mistral": {},  # a window in every layer
    "gemma2": {},  # soft caps; every second layer has a window
}
LINEAR = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")
LENGTH = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root: Path = tmp_path_factory.mktemp("families")
    made: dict[str, Any] = {}

    def model(family: str) -> Any:
        folder = root / family
        if family not in made and family in ("mistral", "gemma2"):
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
            caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 8}
            config = AutoConfig.for_model(
                family,
                vocab_size=VOCABULARY,
                num_key_value_heads=2,
                sliding_window=WINDOW,
                initializer_range=0.2,
                eos_token_id=1,
                **sizes | (caps if family == "gemma2" else {}),
            )
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        elif family not in made:
            write_moe(folder, family, **FAMILIES[family])
        if family not in made:
            made[family] = build_model(ModelArguments(model_name_or_path=str(folder)), "causal_lm")
            made[family].eval().requires_grad_(False)
        return made[family]

    return model


def engine_of(model: Any, prefix_cache_tokens: int = 0, ends: tuple[int, ...] = ()) -> GenerationEngine:
    decoder = create_decoder(model, LENGTH)
    assert isinstance(decoder, GenericDecoder)
    return GenerationEngine(decoder, str, ends, 4, LENGTH, prefix_cache_tokens=prefix_cache_tokens)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    return [[2 + token % (VOCABULARY - 2) for token in prompt] for prompt in random_prompts(lengths, seed)]


def assert_log_probs(model: Any, prompt: list[int], output: Any) -> None:
    """They are those of one plain pass over prompt and response.

    Linear attention amplifies rounding at single tokens: embeddings that differ by one unit in the last place move a
    log-prob of these models by 2e-5, and transformers' pass in chunks and its own steps token by token differ by up to
    1e-4. All but a few tokens are as close as in other families.
    """
    logits = model(torch.tensor([prompt + output.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    difference = (torch.tensor(output.log_probs) - wanted).abs()
    assert difference.median() < 1e-5
    assert difference.max() < (2e-4 if model.config.model_type in LINEAR else 1e-5)


@pytest.mark.default_rows("deepseek_v3")
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prompts_groups_and_refill(models, family):
    """Rows of all lengths, more samples than rows: rows come, go and move, and groups are split."""
    model, prompts, limits = models(family), prompts_of([1, 17, 30, 17, 5]), [12, 3, 9, 20, 6]
    params = [SamplingParams(limit, seed=i) for i, limit in enumerate(limits)]
    requests = [GenerationRequest(str(i), prompt, params[i], 3) for i, prompt in enumerate(prompts)]
    for (name, _), output in run(engine_of(model), requests).items():
        assert_log_probs(model, prompts[int(name)], output)


@pytest.mark.default_rows("gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_and_its_next_turn(models, family):
    """Behind what the prefix cache has; a state is of no use to a shorter prefix, so such models hold none."""
    model, (prompt, further) = models(family), prompts_of([20, 6])
    params = SamplingParams(10, seed=3)
    engine = engine_of(model, prefix_cache_tokens=1000)
    first = run(engine, [GenerationRequest("1", prompt, params, 2)])
    turns = [prompt + first["1", i].token_ids + further for i in range(2)] + [prompt[:18] + further]
    outputs = run(engine, [GenerationRequest(str(i), turn, params, 2) for i, turn in enumerate(turns)])
    assert (engine.counts["reused_tokens"] == 0) == (family in LINEAR)
    for (name, _), output in outputs.items():
        assert_log_probs(model, turns[int(name)], output)


@pytest.mark.long
@pytest.mark.default_rows("qwen3_next", "gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
def test_interrupted_samples_and_recomputed_rows(models, family):
    """Samples go on in another engine, and in this one from keys, values and states computed anew."""
    model, prompts = models(family), prompts_of([4, 13])
    requests = [GenerationRequest(str(i), prompt, SamplingParams(14, seed=i), 2) for i, prompt in enumerate(prompts)]
    engine = engine_of(model)
    engine.add_requests(requests)
    for _ in range(5):
        engine.step()
    for tensor in (engine._cache.data, *engine._cache.states):
        tensor.fill_(3.0)
    engine.recompute_running()
    engine.step()
    aborted = engine.abort()
    other = engine_of(model)
    own = [[output for output in aborted if output.request_id == request.request_id] for request in requests]
    other.add_requests([interrupted(request, found, []) for request, found in zip(requests, own, strict=True)])
    outputs = run_out(other)
    assert len(outputs) == 4 and all(len(output.token_ids) == 14 for output in outputs)
    for output in outputs:
        assert_log_probs(model, prompts[int(output.request_id)], output)


def test_other_layers_are_refused(models):
    model = models("gpt_oss")
    kinds = list(model.config.layer_types)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    try:
        with pytest.raises(ValueError, match=r"layers of type chunked_attention; the engine computes full_attention"):
            create_decoder(model, LENGTH)
    finally:
        model.config.layer_types = kinds
