"""vLLM against ``model.generate``, ``hf_infer`` and a plain forward pass, before and after weight updates."""

from __future__ import annotations

from functools import partial

import pytest

from tests.strategies.engine_cases import SETTINGS, moe_folder
from tests.strategies.engine_checks import FP32_GAP, check_experts, check_greedy, check_in_flight, check_interrupted
from tests.strategies.greedy_answers import check_answers
from tests.strategies.vllm import cases

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.default_rows("qwen2-fp32", "qwen3-bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_greedy_tokens_and_log_probs_after_updates(in_engine_process, folders, name, dtype):
    check_greedy(in_engine_process(cases.greedy_after_updates, folders[name], dtype), dtype)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_greedy_answers_of_smollm2_are_those_of_generate(in_engine_process, smollm2):
    check_answers(smollm2, partial(in_engine_process, cases.greedy_answers))


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_an_update_in_flight(in_engine_process, folders, mode):
    found = in_engine_process(cases.update_in_flight, folders["qwen3"], mode)
    check_in_flight(found, mode)
    assert found["spans"] == [(0, 0, 12), (5, 12, 60)], "a step is a token"


def test_interrupted_samples_become_what_they_would_have_become(in_engine_process, folders):
    check_interrupted(in_engine_process(cases.interrupted_samples, folders["qwen2"]))


def test_log_probs_are_those_of_the_sampling_distribution(in_engine_process, folders):
    gaps = in_engine_process(cases.sampled_gaps, folders["qwen2"], SETTINGS)
    assert max(gaps) < FP32_GAP, gaps


def test_a_sample_does_not_depend_on_its_neighbours(in_engine_process, folders):
    together, alone, neighbour = in_engine_process(cases.together_and_alone, folders["qwen2"])
    drawn = [[outputs["1", i].token_ids for i in range(3)] for outputs in (together, alone, neighbour)]
    assert drawn[0] == drawn[1]
    assert len({tuple(token_ids) for token_ids in drawn[0] + drawn[2]}) == 6, "neighbouring seeds share no stream"


def test_stop_strings_end_where_hf_infer_ends(in_engine_process, folders):
    embedded, ours = in_engine_process(cases.stop_strings, folders["qwen2"])
    assert ours == embedded and ours[1] == "stop" and len(ours[0]) < 20


@pytest.mark.default_rows("gpt_oss")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"])
def test_experts_are_computed_with_after_updates(in_engine_process, tmp_path, family):
    """Every tensor of every expert is read back from where it belongs, and packed for the kernel again; so are biases
    by which experts are chosen and sinks of attention."""
    found, unread = in_engine_process(cases.experts_after_updates, moe_folder(tmp_path, family))
    check_experts(found)
    assert unread == []
