"""SGLang against ``model.generate``, ``hf_infer`` and a plain forward pass; updates: good, faulty, in flight."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.strategies.engine_cases import moe_folder
from tests.strategies.engine_checks import (
    FP32_GAP,
    check_aborted,
    check_adapters,
    check_cut_to_fit,
    check_experts,
    check_faulty_updates,
    check_greedy,
    check_growing,
    check_in_flight,
    check_interrupted,
    check_not_finite_alone,
    check_refusals,
)
from tests.strategies.greedy_answers import check_answers
from tests.strategies.sglang import cases

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


CHECKS = {
    "interrupted": check_interrupted,
    "aborted": check_aborted,
    "growing": check_growing,
    "lengths": check_cut_to_fit,
    "refusals": check_refusals,
    "faults": check_faulty_updates,
    "adapters": check_adapters,
}


@pytest.fixture(scope="module")
def found(in_engine_process, folders):
    """Results of one engine of the tied model."""
    result: dict[str, Any] = in_engine_process(cases.everything, folders["qwen2"])
    return result


@pytest.fixture(scope="module")
def kept(in_engine_process, folders):
    """Results of an engine of the untied model that keeps its cache over an update."""
    result: dict[str, Any] = in_engine_process(cases.keep_in_flight, folders["qwen3"])
    return result


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "fp32"), ("qwen3", "bf16")])
def test_greedy_tokens_and_log_probs_after_updates(in_engine_process, folders, name, dtype):
    check_greedy(in_engine_process(cases.greedy_after_updates, folders[name], dtype), dtype)


def test_greedy_answers_of_smollm2_are_those_of_generate(in_engine_process, smollm2):
    check_answers(smollm2, partial(in_engine_process, cases.greedy_answers))


def test_two_ranks(in_engine_process, folders):
    check_greedy(in_engine_process(cases.greedy_after_updates, folders["qwen2"], "fp32", tp_size=2), "fp32")


def test_experts_are_read_back_after_updates(in_engine_process, tmp_path):
    folder = moe_folder(tmp_path, "qwen3_moe", num_key_value_heads=2, moe_intermediate_size=64)
    check_experts(in_engine_process(cases.experts_after_updates, folder))


def test_samples_are_those_of_hf_infer(found):
    """The same streams, the same distributions: log-probs are those of the distribution that was drawn from."""
    assert all(case["gap"] < FP32_GAP and case["top"] < FP32_GAP for case in found["sampled"]), found["sampled"]
    assert all(all(case["alike"]) for case in found["sampled"]), found["sampled"]
    assert found["sampled"][-1]["num_top"] > 0


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_asked_of_every_engine(found, name):
    CHECKS[name](found[name])


def test_a_half_done_update_is_refused(found):
    step, load = found["half done"]
    assert "step() between" in step and "the model did not load the weights" in load


def test_an_update_in_flight_that_keeps_the_cache_or_not(found, kept):
    check_in_flight(found["in flight"], "recompute")
    check_in_flight(kept["in flight"], "keep")
    assert found["in flight"]["put back"] == kept["in flight"]["put back"] == []


def test_a_request_that_fails_leaves_the_others_alone(kept):
    failed, others_are_whole = kept["given up"]
    assert failed.keys() == {"bad"} and "sample 1 of request 'bad' was given up" in failed["bad"]
    assert others_are_whole
    check_not_finite_alone(kept["not finite"])


def test_a_spoilt_adapter_is_found(found):
    assert found["adapters"]["spoilt"].endswith("(model.layers.0.self_attn.q_proj.weight#lora_A)")


def test_faults_behind_the_receiver_are_found(in_engine_process, folders):
    wrong = in_engine_process(cases.mixed_up_by_the_loader, folders["qwen2"])
    assert len(wrong) == 8 and all(".k_proj." in name or ".v_proj." in name for name in wrong)


def test_the_engine_leaves_no_process_and_draws_again_what_nobody_noticed(found):
    assert found["unnoticed"] == (5, "abort", True), "the last token is drawn again"
    assert found["processes"] == 1 and found["left"] == 0


def test_arguments_of_wrong_types(in_engine_process):
    assert in_engine_process(cases.wrong_arguments) == [" be a whole number; for example chunked_prefill_size: 1"]
