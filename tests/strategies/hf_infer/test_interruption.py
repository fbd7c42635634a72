"""Samples that are stopped and continued, on the same weights and on others, and prompts that come half answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams, interrupted
from tests.strategies.hf_infer.helpers import (
    MAX_MODEL_LEN,
    build_engine,
    build_model,
    greedy,
    random_prompts,
    reference_log_probs,
    run,
    run_out,
)

Outputs = dict[tuple[str, int], GenerationOutput]


def run_in_pieces(make_engine: Any, requests: list[GenerationRequest], steps: int) -> Outputs:
    """Every ``steps`` steps everything is stopped and given to a new engine."""
    done: Outputs = {}
    while requests:
        engine = make_engine()
        engine.add_requests(requests)
        for _ in range(steps):
            done |= {(output.request_id, output.sample_index): output for output in engine.step()}
        told = engine.running(request.request_id for request in requests)
        aborted = engine.abort()
        assert engine.num_unfinished == 0 and told == aborted, "also of samples that wait for a free row"
        left = {output.request_id for output in aborted}
        requests = [
            interrupted(
                request,
                [output for output in aborted if output.request_id == request.request_id],
                [output for key, output in done.items() if key[0] == request.request_id],
            )
            for request in requests
            if request.request_id in left
        ]
    return done


SETTINGS = {
    "plain": SamplingParams(40, seed=3),
    "all": SamplingParams(
        40, 25, temperature=0.8, top_p=0.9, top_k=30, min_p=0.02, repetition_penalty=1.3, stop_token_ids=(7,), seed=5
    ),
    "greedy": greedy(40, repetition_penalty=1.2, top_log_probs=3),
    # In these tests a token's text is its number and a comma: a string that begins in one token and ends in another.
    "stop string": SamplingParams(40, stop_strings=("1,2", "9,1", "3,4"), seed=4),
}


@pytest.mark.default_rows("plain-generic", "all-fused", "greedy-generic", "stop string-fused")
@pytest.mark.parametrize("kind", ["fused", "generic"])
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_interrupted_samples_become_what_they_would_have_become(params, kind):
    model = build_model("qwen3")
    prompts = random_prompts([5, 17, 9], seed=3)

    def make_engine() -> Any:
        decode = lambda ids: "".join(f"{token}," for token in ids)  # noqa: E731
        return build_engine(model, kind, max_num_seqs=5, decode_text=decode)

    requests = [GenerationRequest(str(i), p, params, 3) for i, p in enumerate(prompts)]
    whole, pieces = run(make_engine(), requests), run_in_pieces(make_engine, requests, steps=7)
    assert whole.keys() == pieces.keys()
    assert any(7 < len(output.token_ids) < 40 for output in whole.values()) or params.temperature == 0
    for key, output in whole.items():
        assert pieces[key].token_ids == output.token_ids
        assert pieces[key].finish_reason == output.finish_reason
        tops = [[[token for token, _ in top] for top in one.top_log_probs] for one in (output, pieces[key])]
        assert tops[0] == tops[1] and len(tops[0]) in (0, len(output.token_ids))
        assert pieces[key].weight_versions == output.weight_versions == [(0, 0, len(output.token_ids))]
        torch.testing.assert_close(
            torch.tensor(pieces[key].log_probs), torch.tensor(output.log_probs), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_after_a_swap_running_samples_go_on_as_from_the_start_with_the_new_weights(kind):
    old, new = build_model("qwen3"), build_model("qwen3", seed=1)
    prompts, params = random_prompts([5, 17, 30], seed=3), greedy(30, min_new_tokens=30)
    engine = build_engine(build_model("qwen3"), kind, max_num_seqs=4)
    engine.add_requests([GenerationRequest(str(i), p, params, 2) for i, p in enumerate(prompts)])
    outputs = [output for _ in range(11) for output in engine.step()]
    assert not outputs
    with torch.no_grad():
        for name, tensor in new.state_dict().items():
            engine._decoder.weights[name].copy_(tensor)
    engine.set_version(4)
    engine.recompute_running()
    outputs += run_out(engine)
    swapped = {(output.request_id, output.sample_index): output for output in outputs}
    for i, prompt in enumerate(prompts):
        output = swapped[str(i), 1]
        begun = output.token_ids[: output.weight_versions[0][2]] if i < 2 else []
        assert output.weight_versions == ([(0, 0, 11), (4, 11, 30)] if i < 2 else [(4, 0, 30)])
        left = greedy(30 - len(begun), min_new_tokens=30 - len(begun))
        rest = run(build_engine(new, kind), [GenerationRequest("r", prompt + begun, left)])["r", 0]
        assert output.token_ids == begun + rest.token_ids
        want = reference_log_probs(old, prompt, begun, params) if begun else []
        want += reference_log_probs(new, prompt + begun, output.token_ids[len(begun) :], greedy(30, min_new_tokens=30))
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(want), atol=1e-5, rtol=0)


def test_many_long_samples_are_computed_again_in_several_parts(monkeypatch):
    monkeypatch.setattr("roll.strategies.hf_infer.engine.MAX_PREFILL_TOKENS", 50)
    model, params = build_model("qwen2"), SamplingParams(20, min_new_tokens=20, seed=1)
    requests = [GenerationRequest(str(i), p, params, 2) for i, p in enumerate(random_prompts([30, 3, 12, 60]))]
    whole = run(build_engine(model), requests)
    engine = build_engine(model)
    engine.add_requests(requests)
    for _ in range(6):
        engine.step()
    engine._cache.data.fill_(3.0)
    engine.recompute_running()
    outputs = run_out(engine)
    assert {(o.request_id, o.sample_index): o.token_ids for o in outputs} == {k: o.token_ids for k, o in whole.items()}


def test_what_waits_half_answered_is_given_back_whole():
    engine = build_engine(build_model("qwen2"), max_num_seqs=1)
    begun = GenerationOutput("r", 1, [5, 6, 8], [-1.0, -2.0, -3.0], "abort", [(2, 0, 1), (3, 1, 3)])
    request = GenerationRequest("r", [5, 6], greedy(9), 3, partial={1: begun}, finished=(_finished("r", 2),))
    engine.add_requests([request])
    assert engine.num_unfinished == 2
    waiting = engine.abort()
    assert [(o.sample_index, o.token_ids, o.log_probs) for o in waiting] == [
        (0, [], []),
        (1, [5, 6, 8], [-1.0, -2.0, -3.0]),
    ]
    again = interrupted(request, waiting, request.finished)
    assert (again.partial[1].token_ids, again.finished) == ([5, 6, 8], request.finished)
    assert again.partial.keys() == {1}
    assert again.unfinished_samples == [0, 1]
    outputs = run_unfinished(engine, again)
    assert outputs[1].token_ids[:3] == [5, 6, 8]
    assert outputs[1].log_probs[:3] == [-1.0, -2.0, -3.0]
    assert outputs[1].weight_versions == [(2, 0, 1), (3, 1, 3), (0, 3, len(outputs[1].token_ids))]


def run_unfinished(engine: Any, request: GenerationRequest) -> dict[int, GenerationOutput]:
    engine.add_requests([request])
    outputs = {}
    while engine.num_unfinished:
        outputs |= {output.sample_index: output for output in engine.step()}
    assert sorted(outputs) == request.unfinished_samples
    return outputs


def _finished(name: str, index: int) -> GenerationOutput:
    return GenerationOutput(name, index, [9], [-0.5], "stop", [(0, 0, 1)])


def _begun(length: int) -> GenerationOutput:
    return GenerationOutput("r", 0, [5] * length, [-1.0] * length, "abort", [(0, 0, length)])


@pytest.mark.parametrize("length", [0, 4])
def test_a_beginning_that_leaves_nothing_to_generate_is_refused(length):
    engine = build_engine(build_model("qwen2"))
    with pytest.raises(ValueError, match=f"partial sample 0 has {length} tokens, must have 1 to 3"):
        engine.add_requests([GenerationRequest("r", [5], SamplingParams(4), 2, partial={0: _begun(length)})])
    assert engine.num_unfinished == 0


def test_a_partial_sample_must_leave_room_in_the_cache():
    engine = build_engine(build_model("qwen2"))
    prompt = [5] * (MAX_MODEL_LEN - 3)
    with pytest.raises(ValueError, match="has 3 tokens, must have 1 to 2"):
        engine.add_requests([GenerationRequest("r", prompt, SamplingParams(40), 1, partial={0: _begun(3)})])
    request = GenerationRequest("r", prompt, SamplingParams(40, min_new_tokens=40), 1, partial={0: _begun(2)})
    assert len(run_unfinished(engine, request)[0].token_ids) == 3
