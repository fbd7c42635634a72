"""The strategy on model files: loading, weight updates, options."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer import HfInferStrategy
from roll.weight_sync.encoding import tensor_checksum
from tests.strategies import engine_cases
from tests.strategies.adapter_cases import Policy, World, adapters_alone, in_flight
from tests.strategies.engine_cases import steps
from tests.strategies.engine_checks import (
    check_adapters,
    check_cut_to_fit,
    check_faulty_updates,
    check_in_flight,
    check_interrupted,
    check_refusals,
)
from tests.strategies.engine_models import jolt, load
from tests.strategies.hf_infer.helpers import generate_greedy, greedy, random_prompts, run


def start(folder: Path, dtype: str = "fp32", **options: Any) -> HfInferStrategy:
    started = engine_cases.start(folder, "hf_infer", dtype, **{"max_model_len": 64, **options})
    assert isinstance(started, HfInferStrategy)
    return started


def changed(folder: Path, dtype: str = "fp32") -> Any:
    model = load(folder, dtype)
    jolt(model, 3)
    return model


def push(strategy: HfInferStrategy, weights: dict[str, torch.Tensor], version: int = 1) -> dict[str, int]:
    strategy.start_weight_update(version)
    for name, tensor in weights.items():
        strategy.update_weights({name: tensor})
    return strategy.finish_weight_update()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weight_update_changes_outputs_and_returns_checksums_of_what_is_held(model_folder, dtype):
    new, (prompt,) = changed(model_folder, dtype), random_prompts([6])
    strategy = start(model_folder, dtype)
    request = GenerationRequest("r", prompt, SamplingParams(20, seed=1))
    before = run(strategy, [request])["r", 0]
    weights = dict(new.named_parameters())
    assert "lm_head.weight" not in weights, "the model must be tied to say anything"
    checksums = push(strategy, weights, version=7)
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    after = run(strategy, [request])["r", 0]
    assert after.token_ids != before.token_ids
    assert after.weight_versions == [(7, 0, len(after.token_ids))]
    new.save_pretrained(model_folder / f"new-{dtype}")
    (model_folder / f"new-{dtype}" / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    fresh = run(start(model_folder / f"new-{dtype}", dtype), [request])["r", 0]
    assert after.token_ids == fresh.token_ids
    assert after.log_probs == fresh.log_probs


def test_tied_output_matrix_is_known_under_both_names(model_folder):
    strategy, new = start(model_folder), changed(model_folder)
    weights = new.state_dict()
    assert "lm_head.weight" in weights
    checksums = push(strategy, weights)
    assert checksums["lm_head.weight"] == checksums["model.embed_tokens.weight"]
    (prompt,) = random_prompts([6])
    outputs = run(strategy, [GenerationRequest("r", prompt, greedy(20))])
    assert outputs["r", 0].token_ids == generate_greedy(new, prompt, 20)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_running_samples_continue_over_an_update(folders, mode):
    old, new = load(folders["qwen3"]), changed(folders["qwen3"])
    with engine_cases.engine(folders["qwen3"], "hf_infer", in_flight_update=mode) as started:
        check_in_flight(engine_cases.update_in_flight(started, steps(12), old, new, 5), mode)


@pytest.mark.long
def test_what_is_asked_of_every_engine(folders):
    folder = folders["qwen3"]
    with engine_cases.engine(folder, "hf_infer") as started:
        check_interrupted(engine_cases.interrupted_samples(started, folder, SamplingParams(30, seed=9), 3))
        check_cut_to_fit(engine_cases.cut_to_fit(started))
        check_refusals(engine_cases.refusals(started))
        world = World(started, Policy(folder), folder)
        check_adapters(adapters_alone(world, folder) | {"in flight": in_flight(world, steps(10))})
        world.engines.close()
        check_faulty_updates(engine_cases.faulty_updates(started, load(folder), first=11))


def test_updates_that_do_not_fit_are_refused(model_folder):
    strategy = start(model_folder)
    name = "model.norm.weight"
    strategy.start_weight_update(1)
    with pytest.raises(RuntimeError, match="version 1 is not finished"):
        strategy.start_weight_update(2)
    with pytest.raises(ValueError, match=r"no tensor 'model.norm'"):
        strategy.update_weights({"model.norm": torch.ones(64)})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(63,\), the engine's is \(64,\)"):
        strategy.update_weights({name: torch.ones(63)})
    with pytest.raises(RuntimeError, match="between start_weight_update and finish_weight_update"):
        strategy.step()
    assert strategy.finish_weight_update() == {}


def test_stop_strings_use_the_model_s_tokenizer(model_folder, tokenizer):
    strategy, (prompt,) = start(model_folder), random_prompts([6])
    free = run(strategy, [GenerationRequest("r", prompt, SamplingParams(30, seed=1))])["r", 0]
    texts = [tokenizer.decode(free.token_ids[: i + 1]) for i in range(len(free.token_ids))]
    # Two plain characters with a token border between them (a random model writes many broken ones).
    pairs = [texts[i + 1][len(texts[i]) - 1 : len(texts[i]) + 1] for i in range(len(texts) - 1)]
    stop = next(pair for pair in pairs if len(pair) == 2 and pair.isascii())
    end = next(i for i, text in enumerate(texts) if stop in text)
    request = GenerationRequest("r", prompt, SamplingParams(30, seed=1, stop_strings=(stop,)))
    assert run(strategy, [request])["r", 0].token_ids == free.token_ids[: end + 1]


@pytest.mark.long
def test_stops_at_the_end_tokens_of_model_and_tokenizer(model_folder, tokenizer, tmp_path):
    model = load(model_folder)
    assert tokenizer.eos_token_id not in (20, 21)
    model.generation_config.eos_token_id = [20, 21]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    request = GenerationRequest("r", [5, 6, 7], SamplingParams(40, temperature=2.0, seed=1), num_samples=100)
    outputs = run(start(tmp_path), [request]).values()
    last = {output.token_ids[-1] for output in outputs if output.finish_reason == "stop"}
    assert last == {20, 21, tokenizer.eos_token_id}


FIELDS = {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "maximum": 9, "minimum": 0}}
SCHEMA = json.dumps({"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False})


def test_responses_follow_a_json_schema(model_folder, tokenizer):
    """An untrained model writes it; its neighbours draw what they draw alone, and begun texts go on."""
    strategy = start(model_folder)
    held = SamplingParams(40, seed=3, json_schema=SCHEMA, top_log_probs=2)
    plain = GenerationRequest("plain", [5, 6, 7], SamplingParams(20, seed=3))
    alone = run(strategy, [plain])
    outputs = run(strategy, [GenerationRequest("held", [5, 6, 7], held, 3), plain])
    assert outputs["plain", 0].token_ids == alone["plain", 0].token_ids
    for index in range(3):
        whole = outputs["held", index]
        text = tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        found = json.loads(text)
        assert text == json.dumps(found) and found["a"] in ("x", "yy") and found["b"] in range(10)
        assert whole.finish_reason == "stop"
        assert all(math.isfinite(value) and value <= 0 for value in whole.log_probs)
        first = {name: getattr(whole, name)[:4] for name in ("token_ids", "log_probs", "top_log_probs")}
        cut = replace(whole, finish_reason="abort", weight_versions=[(0, 0, 4)], **first)
        again = run(strategy, [GenerationRequest("held", [5, 6, 7], held, 3, partial={index: cut})])
        assert again["held", index].token_ids == whole.token_ids
    greedy_text = run(strategy, [GenerationRequest("greedy", [5], replace(held, temperature=0.0))])["greedy", 0]
    assert json.loads(tokenizer.decode(greedy_text.token_ids, skip_special_tokens=True))["a"] in ("x", "yy")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"json_schema": '{"type": "nothing"}'}, "response_format: not a JSON schema .*nothing"),
        ({"json_schema": '{"minItems": 1000000000}'}, "response_format: .* needs more than 2 s or 1 GiB to compile"),
        ({"json_schema": '{"multipleOf": 123456789}'}, "response_format: .* needs more than 2 s or 1 GiB to compile"),
        ({"json_schema": "{}", "min_new_tokens": 2}, "min_new_tokens is 2, must be 0 with response_format"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(model_folder, changes, rule):
    strategy = start(model_folder)
    with pytest.raises(ValueError, match=rule):
        strategy.add_requests([GenerationRequest("bad", [5], replace(SamplingParams(8), **changes))])
    assert not strategy.num_unfinished


def test_longest_sequence_comes_from_the_model_unless_given(model_folder):
    request = GenerationRequest("r", [5] * 100, greedy(100, min_new_tokens=100))
    with pytest.raises(ValueError, match="prompt has 100 tokens, must have 1 to 63"):
        start(model_folder).add_requests([request])
    output = run(start(model_folder, max_model_len=None), [request])["r", 0]
    assert len(output.token_ids) == 28  # the model has 128 positions
    with pytest.raises(ValueError, match="max_model_len: 129 is more than the 128 positions"):
        start(model_folder, max_model_len=129)


def test_dummy_weights_wait_for_the_trainer(model_folder):
    strategy, model, (prompt,) = start(model_folder, load_format="dummy"), load(model_folder), random_prompts([6])
    request = GenerationRequest("r", prompt, greedy(20))
    expected = generate_greedy(model, prompt, 20)
    assert run(strategy, [request])["r", 0].token_ids != expected
    push(strategy, dict(model.named_parameters()))
    assert run(strategy, [request])["r", 0].token_ids == expected


def test_sleep_frees_the_cache_and_wake_restores_the_engine(model_folder):
    strategy, (prompt,) = start(model_folder), random_prompts([6])
    request = GenerationRequest("r", prompt, greedy(20))
    expected = run(strategy, [request])["r", 0].token_ids
    strategy.add_requests([request])
    with pytest.raises(RuntimeError, match="sleep with 1 unfinished"):
        strategy.sleep()
    strategy.abort()
    strategy.sleep()
    assert not strategy._cache.data.numel() and not strategy._cache.states
    strategy.wake()
    assert run(strategy, [replace(request)])["r", 0].token_ids == expected
