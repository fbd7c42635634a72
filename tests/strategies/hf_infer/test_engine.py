"""Stopping, limits, abort, weight versions, refusals."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from tests.strategies.hf_infer.helpers import (
    EOS,
    MAX_MODEL_LEN,
    build_engine,
    build_model,
    generate_greedy,
    greedy,
    random_prompts,
    run,
    run_out,
)


def longest_greedy(model: Any, max_new_tokens: int = 40) -> tuple[list[int], list[int]]:
    """A prompt and its greedy continuation that goes on for a while without repeating its first tokens."""
    for prompt in random_prompts([6] * 20, seed=5):
        tokens = generate_greedy(model, prompt, max_new_tokens)
        if len(tokens) == max_new_tokens and tokens[9] not in tokens[:9]:
            return prompt, tokens
    raise AssertionError("no such prompt")


def test_stop_token_ids_end_a_sample_and_are_its_last_token():
    model = build_model("qwen2")
    prompt, tokens = longest_greedy(model)
    output = run(build_engine(model), [GenerationRequest("r", prompt, greedy(40, stop_token_ids=(tokens[9], 3)))])
    assert output["r", 0].token_ids == tokens[:10]
    assert output["r", 0].finish_reason == "stop"


def test_length_ends_at_max_new_tokens_or_at_the_end_of_the_cache():
    model = build_model("qwen2")
    prompts = random_prompts([10, MAX_MODEL_LEN - 3, MAX_MODEL_LEN - 1])
    params = SamplingParams(50, min_new_tokens=50)
    outputs = run(build_engine(model), [GenerationRequest(str(i), p, params) for i, p in enumerate(prompts)])
    assert [len(outputs[str(i), 0].token_ids) for i in range(3)] == [50, 3, 1]
    assert all(output.finish_reason == "length" for output in outputs.values())
    for i, prompt in enumerate(prompts):
        greedy_output = run(build_engine(model), [GenerationRequest("r", prompt, greedy(50, min_new_tokens=50))])
        expected = generate_greedy(model, prompt, [50, 3, 1][i], min_new_tokens=[50, 3, 1][i])
        assert greedy_output["r", 0].token_ids == expected


def test_abort_returns_partial_samples_and_leaves_the_others_alone():
    model = build_model("qwen2")
    prompts = random_prompts([5, 8, 6])
    requests = [GenerationRequest(str(i), p, greedy(30, min_new_tokens=30), 3) for i, p in enumerate(prompts)]
    whole = run(build_engine(model), requests)
    engine = build_engine(model, max_num_seqs=5)
    engine.add_requests(requests)
    for _ in range(10):
        assert engine.step() == []
    aborted = engine.abort(["1", "unknown"])
    lengths = [("1", 0, 10), ("1", 1, 10), ("1", 2, 0)]
    assert sorted((o.request_id, o.sample_index, len(o.token_ids)) for o in aborted) == lengths
    assert all(o.finish_reason == "abort" and len(o.log_probs) == len(o.token_ids) for o in aborted)
    assert all(o.token_ids == whole["1", o.sample_index].token_ids[: len(o.token_ids)] for o in aborted)
    assert engine.num_unfinished == 6
    rest = run_out(engine)
    assert {(o.request_id, o.sample_index): o.token_ids for o in rest} == {
        key: output.token_ids for key, output in whole.items() if key[0] != "1"
    }
    # All of them: the engine is free for the same ids.
    engine.add_requests(requests)
    engine.step()
    assert len(engine.abort()) == 9 and engine.num_unfinished == 0 and engine.step() == []
    assert len(run(engine, requests)) == 9


def test_weight_versions_are_spans_over_the_tokens_of_requests_in_their_order():
    engine = build_engine(build_model("qwen2"), max_num_seqs=2)
    prompts = random_prompts([5, 6])
    params = greedy(10, min_new_tokens=10)
    engine.add_requests([GenerationRequest(str(i), p, params, num_samples=2) for i, p in enumerate(prompts)])
    outputs = []
    for step in range(20):
        if step in (0, 4, 10):
            engine.set_version(step + 1)
        outputs += engine.step()
    found = [(output.request_id, output.weight_versions) for output in outputs]
    assert found == [("0", [(1, 0, 4), (5, 4, 10)])] * 2 + [("1", [(11, 0, 10)])] * 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("r", [5] * MAX_MODEL_LEN, SamplingParams(4)), "prompt has 96 tokens, must have 1 to 95"),
        (GenerationRequest("r", [], SamplingParams(4)), "prompt has 0 tokens"),
        (GenerationRequest("r", [5, 100], SamplingParams(4)), r"run from 5 to 100, must be in \[0, 100\)"),
        (GenerationRequest("r", [5, -1], SamplingParams(4)), "run from -1 to 5"),
        (GenerationRequest("r", [5], SamplingParams(4), num_samples=0), "num_samples is 0"),
        (GenerationRequest("r", [5], SamplingParams(0)), "max_new_tokens is 0, must be at least 1"),
        (GenerationRequest("r", [5], SamplingParams(4, 5)), "min_new_tokens is 5"),
        (GenerationRequest("r", [5], SamplingParams(4, temperature=-0.1)), "temperature is -0.1"),
        (GenerationRequest("r", [5], SamplingParams(4, temperature=float("nan"))), "temperature is nan"),
        (GenerationRequest("r", [5], SamplingParams(4, top_p=0)), "top_p is 0, must be in"),
        (GenerationRequest("r", [5], SamplingParams(4, min_p=1.5)), "min_p is 1.5"),
        (GenerationRequest("r", [5], SamplingParams(4, repetition_penalty=0)), "repetition_penalty is 0"),
        (GenerationRequest("r", [5], SamplingParams(4, stop_strings=("a", ""))), "stop_strings"),
        (GenerationRequest("r", [5], SamplingParams(4, stop_token_ids=(EOS, -2))), "stop_token_ids"),
    ],
)
def test_impossible_requests_are_refused_and_nothing_is_queued(request_, message):
    engine = build_engine(build_model("qwen2"))
    with pytest.raises(ValueError, match=message):
        engine.add_requests([GenerationRequest("fine", [5], SamplingParams(4)), request_])
    assert engine.num_unfinished == 0


def test_an_id_is_refused_while_it_is_unfinished():
    engine = build_engine(build_model("qwen2"))
    request = GenerationRequest("r", [5], SamplingParams(4))
    engine.add_requests([request])
    with pytest.raises(ValueError, match="unfinished"):
        engine.add_requests([request])
    with pytest.raises(ValueError, match=r"'twice': a request of this id"):
        twice = GenerationRequest("twice", [5], SamplingParams(4))
        engine.add_requests([twice, twice])


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_a_failed_request_leaves_nothing_in_its_row(kind):
    """Its keys and values are not finite: read behind the end of the next sample in that row, they would spread."""
    model = build_model("llama")
    model.model.embed_tokens.weight[7] = torch.nan
    short, long = ([token if token != 7 else 8 for token in prompt] for prompt in random_prompts([5, 30]))
    params = SamplingParams(20, min_new_tokens=20, seed=3, stop_token_ids=(7,))
    expected = run(build_engine(model, kind), [GenerationRequest("short", short, params)])["short", 0]
    engine = build_engine(model, kind)
    engine.add_requests([GenerationRequest("failing", [7] * 40, params)])
    assert engine.step() == [] and list(engine.take_failures()) == ["failing"]
    engine.add_requests([GenerationRequest("short", short, params)])
    engine.step()
    outputs = run(engine, [GenerationRequest("long", long, params)], started=1)
    assert engine.take_failures() == {}
    assert outputs["short", 0].token_ids == expected.token_ids


def test_an_error_while_tokens_are_recorded_loses_none_that_were_reported():
    engine = build_engine(build_model("qwen2"))
    engine.add_requests([GenerationRequest("r", [5, 6, 7], greedy(20, min_new_tokens=20), 2)])
    for _ in range(3):
        engine.step()
    grammar = mock.Mock(**{"compute_logit_bias.return_value": b"\1" * 100, "consume_token.side_effect": RuntimeError})
    engine._rows.samples[0].grammar = grammar
    with pytest.raises(RuntimeError):
        engine.step()
    assert [len(output.token_ids) for output in engine.recover()] == [3, 3]
