"""Prompts that begin with what the engine has computed before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.cache import CachedSequence, PrefixCache
from roll.strategies.hf_infer.engine import GenerationEngine
from tests.strategies.hf_infer.helpers import (
    EOS,
    MAX_MODEL_LEN,
    build_engine,
    build_model,
    greedy,
    random_prompts,
    reference_log_probs,
    run,
    run_out,
)


def keeping(engine: GenerationEngine, tokens: int = 1000) -> GenerationEngine:
    engine._prefixes = PrefixCache(tokens)
    return engine


def watch_prefills(engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that are computed from their start, from now on."""
    lengths: list[int] = []
    prefill = engine._decoder.prefill

    def watched(prompts: Any, images: None) -> Any:
        lengths.extend(len(prompt) for prompt in prompts)
        return prefill(prompts, images)

    monkeypatch.setattr(engine._decoder, "prefill", watched)
    return lengths


@pytest.mark.default_rows("qwen2-generic", "llama-fused")
@pytest.mark.parametrize("kind", ["fused", "generic"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_turns_of_a_conversation(name, kind, monkeypatch):
    model, params = build_model(name), SamplingParams(15, min_new_tokens=15, seed=2)
    engine, plain = keeping(build_engine(model, kind)), build_engine(model, kind)
    prompt, further = random_prompts([20, 7])
    first = run(engine, [GenerationRequest("1", prompt, params, 2)])
    prefills = watch_prefills(engine, monkeypatch)
    # One conversation goes on from each sample; a third prompt has the first one's beginning only.
    turns = [prompt + first["1", i].token_ids + further for i in range(2)] + [prompt[:18] + further]
    requests = [GenerationRequest(str(i), turn, params, 3) for i, turn in enumerate(turns)]
    outputs, expected = run(engine, requests), run(plain, requests)
    assert prefills == [], "nothing was computed from its start"
    assert engine._prefixes.num_reused >= 34 + 34 + 18
    assert engine.counts == {
        "prompt_tokens": 20 + sum(map(len, turns)),
        "reused_tokens": engine._prefixes.num_reused,
    }
    for key, output in outputs.items():
        assert output.token_ids == expected[key].token_ids
        want = reference_log_probs(model, turns[int(key[0])], output.token_ids, params)
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(want), atol=1e-5, rtol=0)


def test_groups_that_find_rows_bit_by_bit():
    model, params = build_model("qwen2"), SamplingParams(12, min_new_tokens=5, seed=4)
    engine, plain = keeping(build_engine(model, max_num_seqs=3)), build_engine(model, max_num_seqs=3)
    (prompt,) = random_prompts([25])
    run(engine, [GenerationRequest("0", prompt, params)])
    requests = [GenerationRequest(str(i), [*prompt, 5 + i], params, 4) for i in range(3)]
    requests.insert(1, GenerationRequest("other", random_prompts([9], seed=8)[0], params, 4))
    outputs, expected = run(engine, requests), run(plain, requests)
    assert {key: o.token_ids for key, o in outputs.items()} == {key: o.token_ids for key, o in expected.items()}


def test_an_aborted_sample_goes_on_where_it_was(monkeypatch):
    engine, params = keeping(build_engine(build_model("qwen2"))), greedy(30, min_new_tokens=30)
    (prompt,) = random_prompts([20])
    engine.add_requests([GenerationRequest("r", prompt, params)])
    for _ in range(10):
        engine.step()
    (begun,) = engine.abort()
    prefills = watch_prefills(engine, monkeypatch)
    rest = greedy(20, min_new_tokens=20)
    output = run(engine, [GenerationRequest("r", prompt + begun.token_ids, rest)])["r", 0]
    whole = run(build_engine(build_model("qwen2")), [GenerationRequest("r", prompt, params)])["r", 0]
    assert begun.token_ids + output.token_ids == whole.token_ids
    assert prefills == []


@pytest.mark.parametrize("recompute", [True, False])
def test_nothing_survives_a_weight_update(recompute, monkeypatch):
    old, new, params = build_model("qwen2"), build_model("qwen2", seed=1), greedy(12, min_new_tokens=12)
    engine = keeping(build_engine(old, max_num_seqs=2))
    done, running = random_prompts([20, 22])
    run(engine, [GenerationRequest("done", done, params)])
    engine.add_requests([GenerationRequest("running", running, params)])
    engine.step()
    for name, tensor in new.state_dict().items():
        engine._decoder.weights[name].copy_(tensor)
    engine.set_version(1)
    assert engine._prefixes.num_tokens == 0
    if recompute:
        engine.recompute_running()
    outputs = run_out(engine)
    prefills = watch_prefills(engine, monkeypatch)
    prompts = [[*done, 7], running + outputs[0].token_ids + [7]]
    again = run(engine, [GenerationRequest(str(i), p, params) for i, p in enumerate(prompts)])
    assert prefills == ([21] if recompute else [21, 35]), "what old weights left in a running sample is not held"
    for i, prompt in enumerate(prompts):
        want = reference_log_probs(new, prompt, again[str(i), 0].token_ids, params)
        torch.testing.assert_close(torch.tensor(again[str(i), 0].log_probs), torch.tensor(want), atol=1e-5, rtol=0)


def sequence(*tokens: int) -> tuple[list[int], torch.Tensor]:
    ids = [token for token in tokens for _ in range(10)]
    return ids, values(ids)


def known(cache: PrefixCache, tokens: list[int]) -> list[float]:
    """The cache's part of a prompt's keys."""
    found = cache.find(tokens)
    return [] if found is None else found[0].keys_values[0, 0, 0, : found[1], 0].tolist()


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    cache = PrefixCache(60)
    cache.put(*sequence(1, 2))
    cache.put(*sequence(1, 2, 3))
    assert cache.num_tokens == 30, "the first is a beginning of the second"
    cache.put(*sequence(4, 5))
    assert known(cache, [1] * 10 + [2] * 10 + [9]) == [1.0] * 10 + [2.0] * 10
    cache.put(*sequence(6, 7))
    assert cache.num_tokens == 50, "4 5 was used longest ago"
    assert known(cache, [4] * 10 + [5] * 10) == []
    assert known(cache, [6] * 10 + [9] * 10) == [], "ten tokens are not worth the copy"
    assert len(known(cache, sequence(6, 7)[0])) == 19, "the last token is to be computed"
    cache.put(*sequence(1, 2))
    assert cache.num_tokens == 50, "it is there already"
    assert 60 in cache.lengths and 61 not in cache.lengths and 10 not in cache.lengths
    assert 16 not in PrefixCache(0).lengths
    cache.clear()
    assert cache.num_tokens == 0 and known(cache, sequence(6, 7)[0]) == []


def test_a_growing_conversation_is_held_once():
    cache, turn = PrefixCache(2000), [7] * 20
    cache.put(turn, values(turn))
    for number in range(1, 50):
        prompt = turn + [number] * 10
        found = cache.find(prompt)
        assert found is not None and found[1] == len(turn)
        assert known(cache, prompt) == [float(token) for token in turn]
        turn = prompt + [100 + number] * 10
        cache.put(turn, values(turn))
    assert cache.num_tokens == len(turn)
    # Another conversation that begins alike leaves the first as it is.
    other = [*turn[:100], *[9] * 20]
    cache.put(other, values(other))
    assert known(cache, [*turn, 5]) == [float(token) for token in turn]
    assert known(cache, [*other, 5]) == [float(token) for token in other]


def test_many_conversations_cost_no_more_than_their_length():
    """Look-ups and insertions among many sequences compare tokens with one of them."""
    cache, rng = PrefixCache(100_000), random.Random(0)
    turns = [[rng.randrange(50) for _ in range(40)] for _ in range(300)]
    for turn in turns:
        cache.put(turn, values(turn))
    compared = []
    common = CachedSequence.common

    def counted(self: CachedSequence, token_ids: Any) -> int:
        compared.append(len(token_ids))
        return common(self, token_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedSequence, "common", counted)
        for turn in turns:
            assert known(cache, [*turn, 1]) == turn
            cache.put([*turn, 1, 2], values([*turn, 1, 2]))
    assert len(compared) == 2 * len(turns)


def values(tokens: list[int]) -> torch.Tensor:
    """Keys and values that say which token they are of."""
    return torch.tensor(tokens, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(3, 2, 2, -1, 4)


def test_the_longest_prompt_still_fits():
    engine = keeping(build_engine(build_model("qwen2")))
    (prompt,) = random_prompts([MAX_MODEL_LEN - 2])
    run(engine, [GenerationRequest("a", prompt, greedy(9, stop_token_ids=(EOS,)))])
    output = run(engine, [GenerationRequest("b", [*prompt, 5], greedy(9))])["b", 0]
    assert len(output.token_ids) == 1
