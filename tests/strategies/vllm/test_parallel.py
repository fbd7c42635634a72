"""Engines of several ranks; whole engines in ``make test-all`` and ``make test-vllm-parallel``."""

from __future__ import annotations

import pytest

from tests.strategies.engine_cases import moe_folder
from tests.strategies.engine_checks import check_experts, check_greedy, check_in_flight
from tests.strategies.vllm import parallel_cases
from tests.support.engines import whole_engines

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@whole_engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "kind"), [("qwen2", "pipeline_parallel_size"), ("qwen3", "tensor_parallel_size")])
def test_two_ranks(in_engine_process, folders, name, kind):
    found = in_engine_process(parallel_cases.two_ranks, folders[name], kind)
    check_greedy(found["greedy"])
    check_in_flight(found["in flight"], "recompute", versions=(10, 11))
    rank = "" if kind.startswith("pipeline") else ", on rank 1 of it"
    wrong = "weight update 13: engine 3 holds other values than the trainer sent in 1 of"
    assert found["spoilt on the way"].startswith(wrong) and found["spoilt on the way"].endswith("k_proj.weight)")
    assert found["spoilt by a rank"].startswith("weight update 14: engine 3 holds other values than the trainer sent")
    assert "v_proj.weight)" in found["spoilt by a rank"] and found["spoilt by a rank"].endswith(f"v_proj.weight){rank}")
    assert "rank 0: " in found["unknown"] and "no_such" in found["unknown"]


@whole_engines
@pytest.mark.timeout(900)
def test_experts_of_two_ranks(in_engine_process, tmp_path):
    """Each rank reads its part of every matrix of every expert back."""
    folder = moe_folder(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    found = in_engine_process(parallel_cases.experts_of_two_ranks, folder)
    check_experts(found["updates"])
    assert found["unread"] == [[], []]
    assert found["spoilt"].startswith("weight update 3: engine 3 holds other values than the trainer sent in 2 of")
    assert "mlp.experts.5.up_proj.weight" in found["spoilt"] and found["spoilt"].endswith(", on rank 1 of it")


def test_the_part_of_a_rank(in_engine_process):
    found = in_engine_process(parallel_cases.parts_of_ranks)
    rows = [[4.0 * row + column for column in range(4)] for row in range(6)]
    assert found["rows"] == [rows[:3], rows[3:]]
    assert found["columns"] == [[row[:2] for row in rows], [row[2:] for row in rows]]
    assert found["shared"] == rows[3:] and found["whole"]
    assert found["vocabulary"] == rows[4:] and found["vocabulary held"] == 2
    assert found["fused"] == rows[2:5]
