"""Drafts change how many passes a sample takes, and not what it says."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from roll.models.invariant import make_invariant
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from roll.strategies.hf_infer import drafts
from roll.strategies.hf_infer.drafts import Continuations, Drafter, most_frequent
from roll.strategies.hf_infer.engine import GenerationEngine
from tests.strategies import engine_cases
from tests.strategies.engine_cases import SETTINGS
from tests.strategies.hf_infer.helpers import EOS, VOCAB_SIZE, build_engine, build_model, random_prompts, run, run_out

pytestmark = pytest.mark.usefixtures("one_thread")


def with_drafts(engine: GenerationEngine, limit: int = 4, max_tokens: int = 64) -> GenerationEngine:
    engine._drafter = Drafter(limit, 0.1, max_tokens)
    return engine


def asked(epoch: int, params: list[SamplingParams]) -> list[GenerationRequest]:
    """Groups of three, which say the same in every epoch."""
    prompts = random_prompts([5, 30, 1, 17, 9, 22, 3, 11, 8])
    return [
        GenerationRequest(f"{epoch}.{i}", prompt, replace(one, stop_strings=("7, 7",)), 3)
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=False))
    ]


def facts(outputs: dict[tuple[str, int], GenerationOutput]) -> dict[tuple[str, int], Any]:
    return {key: (one.token_ids, one.log_probs, one.finish_reason, one.top_log_probs) for key, one in outputs.items()}


@pytest.mark.default_rows("qwen2-dtype1", "llama-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_with_strict_on_policy_samples_are_the_same_to_the_last_bit(name, dtype):
    """Of all settings, while rows come and go; a second epoch is drafted from the first."""
    model = build_model(name, dtype)
    make_invariant(model)
    found = []
    for engine in (build_engine(model, max_num_seqs=7), with_drafts(build_engine(model, max_num_seqs=7))):
        found.append([facts(run(engine, asked(epoch, SETTINGS))) for epoch in range(2)])
    assert found[0] == found[1]
    counts = engine.counts
    # All but the rows with a penalty or the most probable tokens, and the first three tokens of each.
    assert 200 < counts["accepted_tokens"] <= counts["drafted_tokens"] and counts["drafts"] > 60


def test_without_the_mode_log_probs_are_those_of_the_model():
    model = build_model("qwen3")
    engine, params = with_drafts(build_engine(model)), SamplingParams(40, temperature=0.8, seed=3)
    prompts = random_prompts([12, 25])
    for epoch in range(2):
        outputs = run(engine, [GenerationRequest(f"{epoch}{i}", one, params, 3) for i, one in enumerate(prompts)])
    assert engine.counts["accepted_tokens"] > 100
    for (name, _), output in outputs.items():
        prompt = prompts[int(name[1])]
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        wanted = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.log_probs), wanted, atol=1e-5)


def test_greedy_samples_take_fewer_passes():
    """Those of a group are the same, so the first one to begin drafts the others."""
    model, params = build_model("qwen2"), SamplingParams(40, temperature=0.0, min_new_tokens=40)
    (prompt,) = random_prompts([9])
    passes, found = [], []
    for engine in (build_engine(model), with_drafts(build_engine(model))):
        engine.add_requests([GenerationRequest("first", prompt, params)])
        for _ in range(20):
            engine.step()
        engine.add_requests([GenerationRequest("second", prompt, params)])
        outputs, count = [], 0
        while engine.num_unfinished:
            outputs += engine.step()
            count += 1
        passes.append(count)
        found.append([one.token_ids for one in sorted(outputs, key=lambda one: one.request_id)])
    assert found[0] == found[1] and found[0][0] == found[0][1]
    assert passes[1] < 25 < passes[0] == 40


def test_what_is_sampled_at_drafted_places_has_the_policys_distribution():
    """All sequences of three tokens where each is one of three, and the chi-square of 3,000 samples."""
    model = build_model("qwen2")
    (prompt,) = random_prompts([6])
    params = SamplingParams(3, temperature=1.5, top_k=3, min_new_tokens=3)
    engine = with_drafts(build_engine(model))
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, 3000, 1000):
        requests = [GenerationRequest(str(i), prompt, replace(params, seed=i)) for i in range(start, start + 1000)]
        seen.update(tuple(one.token_ids) for one in run(engine, requests).values())
    # The second token of each sample but the first ones: the third is the last, and needs no draft.
    assert engine.counts["drafts"] > 2500 and engine.counts["accepted_tokens"] > 500
    sequences: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in sequences.items():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].clone()
            logits[EOS] = -torch.inf  # the end, before three tokens are there
            best = (logits / 1.5).topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[*tokens, token] = probability * share
        sequences = longer
    assert set(seen) <= set(sequences)
    wanted = {tokens: 3000 * probability for tokens, probability in sequences.items()}
    assert min(wanted.values()) > 5
    # 26 degrees of freedom: by chance, one seed in 10,000 is above.
    assert sum((seen[tokens] - number) ** 2 / number for tokens, number in wanted.items()) < 60.1


def test_interrupted_and_updated_samples_go_on_as_without_drafts():
    model, other = build_model("llama"), build_model("llama", seed=1)
    for one in (model, other):
        make_invariant(one)
    params = SamplingParams(60, temperature=0.5, min_new_tokens=60, seed=5)
    requests = [GenerationRequest(str(i), prompt, params, 2) for i, prompt in enumerate(random_prompts([8, 20]))]
    found = []
    for drafted in (False, True):
        before, after = build_engine(copy.deepcopy(model)), build_engine(copy.deepcopy(other))
        if drafted:
            with_drafts(before, limit=1), with_drafts(after)
        run(before, [replace(request, request_id=f"e{request.request_id}") for request in requests])
        before.add_requests(requests)
        # Samples advance at different paces with drafts: interrupt them after the same number of tokens.
        begun: dict[tuple[str, int], GenerationOutput] = {}
        while len(begun) < 4:
            before.step()
            for output in before.running([request.request_id for request in requests]):
                key = output.request_id, output.sample_index
                if key not in begun and len(output.token_ids) >= 10:
                    begun[key] = replace(
                        output,
                        token_ids=output.token_ids[:10],
                        log_probs=output.log_probs[:10],
                        weight_versions=[(0, 0, 10)],
                    )
        resumed = [
            interrupted(request, [begun[request.request_id, index] for index in range(2)], ()) for request in requests
        ]
        after.set_version(1)
        found.append(facts(run(after, resumed)))
    assert found[0] == found[1]
    assert after.counts["accepted_tokens"] > 0


def test_an_error_while_several_tokens_are_recorded_loses_none_that_were_reported(monkeypatch):
    engine, params = with_drafts(build_engine(build_model("qwen2"))), SamplingParams(20, min_new_tokens=20, seed=1)
    run(engine, [GenerationRequest("earlier", [5, 6, 7], params, 2)])
    engine.add_requests([GenerationRequest("r", [5, 6, 7], params, 2)])
    for _ in range(3):
        engine.step()
    reported = [len(output.token_ids) for output in engine.running(["r"])]
    assert max(reported) > 3
    monkeypatch.setattr(engine, "_release", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [len(output.token_ids) for output in engine.recover()] == reported


def test_a_failed_sample_fails_its_request_alone():
    model = build_model("qwen3")
    engine, params = with_drafts(build_engine(model)), SamplingParams(30, temperature=0.7, min_new_tokens=30, seed=1)
    good = run(engine, [GenerationRequest("good", [5, 6, 7], params)])["good", 0]
    engine.add_requests([GenerationRequest("again", [5, 6, 7], params), GenerationRequest("bad", [8, 9], params)])
    engine.step()
    (row,) = [row for row, one in enumerate(engine._rows.samples) if one.request.request_id == "bad"]
    engine._cache.data[:, :, row] = torch.nan
    (output,) = run_out(engine)
    assert output.token_ids == good.token_ids and list(engine.take_failures()) == ["bad"]


def test_nothing_is_drafted_where_nothing_repeats_or_a_pass_is_full():
    tokens = list(range(2, VOCAB_SIZE))
    sample = (drafter := Drafter(4, 0.1, 16)).begin(tokens[:50], tokens[50:])
    assert drafter.propose([sample], np.array([10])) == [[]]
    drafter.extend(sample, [10, 11])
    assert drafter.propose([sample], np.array([10])) == [[12, 13, 14]]  # each seen once: a half, a quarter, an eighth
    assert drafter.propose([sample, None], np.array([2, 10])) == [[12, 13], []]
    assert drafter.propose([sample] * 14, np.full(14, 10)) == [[12]] * 2 + [[]] * 12
    assert drafter.propose([sample] * 16, np.full(16, 10)) == [[]] * 16
    assert drafter.counts == {"drafts": 4, "drafted_tokens": 7, "accepted_tokens": 0}


def test_a_draft_is_what_followed_most_often_after_the_most_tokens():
    known = Continuations()
    for text in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 6]):
        known.extended(text, len(text))

    def draft(tokens: list[int], least: float = 0.1) -> tuple[int, list[tuple[int, float]]]:
        agreed, places = known.after(tokens)
        return agreed, most_frequent(places, 4, least)

    assert draft([1, 2, 3]) == (3, [(4, 2 / 4)])
    assert draft([7, 9, 2, 3]) == (3, [(6, 1 / 2)])
    assert draft([9, 2, 3], 0.6) == (3, [])
    assert draft([2, 3]) == (2, [(4, 2 / 5)])
    assert draft([3, 4]) == draft([3]) == (0, [])


def test_other_prompts_draft_where_they_agree_in_more_tokens():
    drafter = Drafter(1, 0.1, 16)
    drafter.begin([10, 11, 12], [1, 2, 3, 4])
    own = drafter.begin([20, 21, 22], [2, 3, 5])
    drafter.extend(own, [6, 2, 3])
    assert drafter.propose([own], np.array([10])) == [[5]]
    drafter.extend(own, [6, 1, 2, 3])
    assert drafter.propose([own], np.array([10])) == [[4]]


def test_prompts_that_were_not_used_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(drafts, "_REMEMBERED", 100)
    drafter = Drafter(4, 0.1, 16)
    for number in range(20):
        sample = drafter.begin([number] * 10, [])
        drafter.begin([0] * 10, [])  # which is used again and again
        drafter.extend(sample, [50] * 4)
    held = drafter._prompts
    assert len(held) < 6 and np.array([0] * 10, np.int32).tobytes() in held
    assert drafter._all.num_tokens < 150


def test_an_engine_drafts_by_its_key(folders):
    with engine_cases.engine(folders["qwen2"], "hf_infer", speculative_config={"max_batch_tokens": 32}) as one:
        params = SamplingParams(20, temperature=0.5, seed=1)
        for epoch in range(2):
            run(one, [GenerationRequest(str(epoch), [5, 6, 7, 8], params, 4)])
        assert one.counts["accepted_tokens"] > 20


def test_other_decoders_are_refused_by_the_key(folders, tmp_path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    key = r"actor_infer\.strategy_args\.strategy_config\.speculative_config"
    with pytest.raises(ValueError, match=f"{key}: this Qwen2ForCausalLM has layers of other kinds"):
        engine_cases.start(folder, "hf_infer", speculative_config={})
