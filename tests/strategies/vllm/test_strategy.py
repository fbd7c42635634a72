"""Weight updates that go wrong are found; aborts, growing samples, refusals, lengths."""

from __future__ import annotations

import pytest

from tests.strategies.engine_checks import (
    check_aborted,
    check_adapters,
    check_cut_to_fit,
    check_faulty_updates,
    check_growing,
    check_not_finite_alone,
    check_refusals,
)
from tests.strategies.vllm import cases
from tests.support.engines import whole_engines

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ADAPTED = "model.layers.0.self_attn.q_proj.weight#lora_A"


def test_aborted_samples_keep_what_they_have(in_engine_process, folders):
    found = in_engine_process(cases.aborted, folders["qwen2"])
    check_aborted(found)
    assert found["tokens"][:2] == [5, 5], "a step is a token"


def test_what_is_said_of_growing_samples_is_how_they_begin(in_engine_process, folders):
    found = in_engine_process(cases.growing_samples, folders["qwen2"])
    check_growing(found)
    assert all(found["same"].values()), "asking disturbs nothing"
    lengths, begun = found["lengths"], found["begun"]
    assert lengths["seeded", 0] == lengths["seeded", 1] == list(range(30)), "every step is told of"
    assert lengths["begun", 0] == list(range(begun, 30)) and found["versions"] == [(-1, 0, begun), (0, begun, 29)]
    assert lengths["stop", 0] == list(range(len(lengths["stop", 0]))) and len(lengths["stop", 0]) < 30
    assert lengths["late", 0][:3] == [0, 0, 0] and lengths["late", 0][-1] == 11, "it waited for room"


def test_responses_follow_a_json_schema(in_engine_process, folders):
    """Of a model that knows nothing of JSON; neighbours draw what they would have drawn."""
    found = in_engine_process(cases.following_a_schema, folders["qwen2"])
    assert found["same"] and len(found["texts"]) == 4
    wholes = ('{"a":"x"}', '{"a":"yy"}')
    for text, reason in found["texts"]:  # a schema allows any space between its parts
        written = "".join(text.split())
        assert written in wholes if reason == "stop" else any(whole.startswith(written) for whole in wholes), text
    assert all(-1000 < value <= 0 for value in found["log_probs"])
    assert max(found["log_probs"]) > -1e-6, "where the schema leaves one token its probability is 1"
    nothing, too_large = found["refused"]
    assert "nothing" in nothing and "needs more than 2 s or 1 GiB" in too_large


def test_a_request_that_breaks_a_step_fails_alone(in_engine_process, folders):
    found = in_engine_process(cases.failing_alone, folders["qwen2"])
    assert found["failed"].keys() == {"bad 1", "bad 2", "too much"}
    assert found["failed"]["bad 1"] == "RuntimeError: poison" and found["failed"]["too much"]
    assert found["tokens"] == {(name, index): True for name in "abcd" for index in range(2)}
    assert found["largest"] < 1e-4 and found["left"] == 0


def test_lengths_and_refusals(in_engine_process, folders):
    check_cut_to_fit(in_engine_process(cases.cut_to_fit, folders["qwen2"]))
    check_refusals(in_engine_process(cases.refusals, folders["qwen2"]), ["step() between", "no_such"])


def test_requests_without_finite_log_probs_fail_and_faulty_updates_are_found(in_engine_process, folders):
    """vLLM's attention on a CPU multiplies what it masks: neighbours may get nan as well, but no nan is a sample."""
    alone, faulty = in_engine_process(cases.not_finite_and_faulty, folders["qwen3"])
    check_not_finite_alone(alone, may_spread=True)
    check_faulty_updates(faulty)


def test_refused_at_start(in_engine_process, tmp_path):
    heads = in_engine_process(cases.refused_at_start, tmp_path)
    assert "no attention for heads of size 16" in heads and "hf_infer" in heads


def test_faults_behind_the_receiver_are_found(in_engine_process, folders):
    wrong = in_engine_process(cases.mixed_up_by_the_loader, folders["qwen2"])
    assert len(wrong) == 4 and all(name.endswith(("k_proj.weight", "v_proj.weight")) for name in wrong)
    error = in_engine_process(cases.left_unpacked, folders["qwen2"])
    assert "does not compute with the weights it was loaded with" in error


def test_an_engine_of_another_dtype(in_engine_process, folders):
    assert in_engine_process(cases.other_dtype, folders["qwen3"]) == ([], ["model.layers.1.mlp.up_proj.weight"])


def test_log_probs_of_prompts(in_engine_process, folders):
    found = in_engine_process(cases.prompt_scores, folders["qwen3"])
    assert found["gap"] < 2e-5 and found["same"] and found["undisturbed"] and not found["left"]
    assert found["whole"] == [320] * 4
    assert "must have 1 to 95" in found["refused"]


def test_columns_of_a_teacher_are_those_of_the_model_itself(in_engine_process, folders):
    found = in_engine_process(cases.target_columns, folders["qwen3"])
    assert found.pop("ids") == 0 and max(found.values()) < 2e-5, found


def test_arguments_of_wrong_types(in_engine_process):
    level, switch = in_engine_process(cases.wrong_arguments)
    assert level.startswith(" be one of 0, 1, 2, 3;") and switch.startswith(" be true or false;")


def test_adapters(in_engine_process, folders):
    """A and B alone, which vLLM computes with itself, against the merged model."""
    found = in_engine_process(cases.adapters, folders["qwen2"])
    check_adapters(found)
    assert found["in flight"] == (10, True)
    on_the_way, not_set, plain, packed, right = found["faults"]
    assert on_the_way.endswith(f"({ADAPTED})")
    assert "#lora_A, " in not_set and "down_proj" in not_set and "q_proj" not in not_set
    assert plain.endswith("(model.norm.weight)")
    assert packed.endswith("(model.layers.0.mlp.down_proj.weight)")
    assert right == ""


@whole_engines
@pytest.mark.timeout(900)
def test_adapters_on_two_ranks(in_engine_process, folders):
    found = in_engine_process(cases.adapters, folders["qwen3"], tensor_parallel_size=2)
    check_adapters(found)
    assert found["in flight"] == (10, True)
    assert found["faults"][0].endswith(f"({ADAPTED})")
