"""SGLang beside ``model.generate``, ``hf_infer`` and a plain forward pass; updates: good, faulty, in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.sglang import cases

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FP32_GAP = 5e-5  # measured: 1e-5
BF16_GAP = 0.15  # eight bits of mantissa, logits of magnitude 10


@pytest.fixture(scope="module")
def found(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> dict[str, Any]:
    """What one engine of the tied model showed."""
    result: dict[str, Any] = in_engine_process(cases.everything, folders["qwen2"])
    return result


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "fp32"), ("qwen3", "fp32"), ("qwen3", "bf16")])
def test_greedy_tokens_and_log_probs_after_updates(
    in_engine_process: Callable[..., Any], folders: dict[str, Path], name: str, dtype: str
) -> None:
    _check_greedy(in_engine_process(cases.greedy_after_updates, folders[name], dtype), dtype)


def test_two_ranks(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    _check_greedy(in_engine_process(cases.greedy_after_updates, folders["qwen2"], "fp32", tp_size=2), "fp32")


def _check_greedy(greedy: list[dict[str, Any]], dtype: str) -> None:
    assert len(greedy) == 12 and all(case["versions"] and case["wrong"] == [] for case in greedy)
    assert max(case["gap"] for case in greedy) < (FP32_GAP if dtype == "fp32" else BF16_GAP)
    if dtype == "fp32":
        assert all(case["sglang"] == case["hf_infer"] == case["generate"] for case in greedy)


def test_samples_are_those_of_hf_infer(found: dict[str, Any]) -> None:
    """The same streams, the same distributions: log-probs are those of the distribution that was drawn from."""
    assert all(case["gap"] < FP32_GAP and case["top"] < FP32_GAP for case in found["sampled"]), found["sampled"]
    assert all(all(case["alike"]) for case in found["sampled"]), found["sampled"]
    assert found["sampled"][-1]["num_top"] > 0


def test_interrupted_samples_become_what_they_would_have_become(found: dict[str, Any]) -> None:
    (rounds,), *samples = found["interrupted"]
    assert rounds > 2, "they were stopped on the way"
    assert len(samples) == 6 and all(same and versions for same, _, _, _, versions in samples)
    assert all(reason == other and gap < FP32_GAP for _, reason, other, gap, _ in samples)
    assert samples[-1][1] == "stop"


def test_aborted_samples_keep_what_they_have(found: dict[str, Any]) -> None:
    aborted = found["aborted"]
    assert aborted["aborted"] == [("1", 0, "abort"), ("1", 1, "abort"), ("2", 0, "abort"), ("2", 1, "abort")]
    assert all(0 < tokens < 60 for tokens in aborted["tokens"][:2]) and aborted["tokens"][2:] == [0, 0]
    assert aborted["gap"] < FP32_GAP
    assert aborted["left"] == 2 and aborted["finished"] == [("0", 0, 60), ("0", 1, 60)]
    assert aborted["rest"] == [("1", [], "abort")]
    assert found["unnoticed"] == (5, "abort", True), "the last token is drawn again"


def test_lengths_and_refusals(found: dict[str, Any]) -> None:
    assert found["lengths"] == (6, "length"), "the response ends with the engine's sequence"
    expected = ["must have 1 to 95", "must be in [0, 320)", "update_weights outside of", "without start_weight_update"]
    messages = found["refusals"]
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
    assert "step() between" in found["faults"]["step"]


def test_an_update_in_flight(found: dict[str, Any]) -> None:
    _check_in_flight(found["in flight"])
    assert found["in flight"]["after"] < FP32_GAP and found["in flight"]["continued"]


def test_an_update_in_flight_that_keeps_the_cache(
    in_engine_process: Callable[..., Any], folders: dict[str, Path]
) -> None:
    kept = in_engine_process(cases.keep_in_flight, folders["qwen3"])
    _check_in_flight(kept)
    assert kept["after"] > 0.01, "the old weights' keys and values are still in use"


def _check_in_flight(update: dict[str, Any]) -> None:
    (old, start, split), (new, begin, end) = update["spans"]
    assert (old, start, new, begin, end) == (0, 0, 5, split, 60) and 0 < split < 60
    assert update["wrong"] == update["put back"] == []
    assert update["before"] < FP32_GAP and update["again"]


def test_faulty_updates_are_found_and_the_next_one_puts_them_right(found: dict[str, Any]) -> None:
    faults = found["faults"]
    assert faults["none"] == faults["put right"] == []
    assert faults["lost"] == faults["element"] == [cases.KEY]
    assert sorted(faults["swapped"]) == sorted([cases.KEY, cases.VALUE])
    assert len(faults["old"]) > 20, "an old version differs everywhere"
    assert "the model did not load the weights" in faults["shape"]


def test_faults_behind_the_receiver_are_found(in_engine_process: Callable[..., Any], folders: dict[str, Path]) -> None:
    wrong = in_engine_process(cases.mixed_up_by_the_loader, folders["qwen2"])
    assert len(wrong) == 8 and all(".k_proj." in name or ".v_proj." in name for name in wrong)


def test_the_engine_leaves_no_process(found: dict[str, Any]) -> None:
    assert found["processes"] == 1 and found["left"] == 0
