"""Mixture-of-experts models under Megatron compute what a plain model computes, however experts are dealt out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategies.megatron.layouts import by_replica

cases = pytest.importorskip("tests.strategies.megatron.cases", reason="needs megatron-core")

RunCase = Callable[..., list[Any]]
Expected = Callable[[str], dict[str, Any]]
RELATIVE = 5e-6  # as in test_numbers, with one more sum over the experts of a token
RECOMPUTE = {"disable_gradient_checkpointing": False}
PACKED = {"use_sequence_packing": True}

LAYOUTS = [
    pytest.param(1, {}, "qwen3_moe", {}, id="1-rank"),
    pytest.param(1, {"dispatcher": "allgather"}, "qwen2_moe", {}, id="shared-expert-allgather"),
    pytest.param(1, {}, "mixtral", {"model_args": RECOMPUTE}, id="mixtral-recomputed"),
    pytest.param(1, {}, "olmoe", PACKED, id="olmoe-packed"),
    pytest.param(2, {}, "qwen3_moe", {}, id="dp2"),
    pytest.param(2, {"ep": 2}, "qwen3_moe", {}, id="ep2"),
    pytest.param(2, {"ep": 2, "dispatcher": "allgather"}, "qwen3_moe", {}, id="ep2-allgather"),
    pytest.param(2, {"ep": 2, "dist_opt": True}, "mixtral", {"micro_batch": 2}, id="ep2-distributed-optimizer"),
    pytest.param(2, {"ep": 2}, "qwen2_moe", PACKED, id="ep2-packed"),
    pytest.param(2, {"tp": 2, "sp": True}, "qwen2_moe", {}, id="tp2"),
    pytest.param(2, {"tp": 2, "sp": True}, "olmoe", {}, id="olmoe-tp2"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1}, "qwen3_moe", {}, id="tp2-etp1"),
    pytest.param(2, {"tp": 2, "sp": True, "etp": 1, "ep": 2}, "mixtral", {}, id="tp2-ep2-etp1"),
    pytest.param(2, {"pp": 2}, "qwen3_moe", {}, id="pp2"),
    pytest.param(2, {"pp": 2, "vpp": 2}, "qwen3_moe", {}, id="vpp2"),
    pytest.param(2, {"cp": 2, "ep": 2}, "qwen3_moe", {}, id="cp2-ep2"),
    pytest.param(4, {"ep": 2, "pp": 2, "dist_opt": True}, "qwen3_moe", {"model_args": RECOMPUTE}, id="ep2-pp2"),
    pytest.param(4, {"ep": 2, "dist_opt": True}, "qwen2_moe", {}, id="ep2-dp4-one-without-rows"),
    pytest.param(4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "qwen3_moe", {}, id="tp2-ep2-etp2"),
]


def assert_same_gradients(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys(), actual.keys() ^ wanted.keys()
    for name, gradient in wanted.items():
        difference = (actual[name] - gradient).abs().max()
        assert float(difference) <= RELATIVE * max(float(gradient.abs().max()), 1e-2), name


@pytest.mark.default_rows("ep2", "tp2", "olmoe-packed")
@pytest.mark.parametrize(("world", "sizes", "model", "options"), LAYOUTS)
def test_gradient_and_outputs_equal_the_plain_model(
    run_case: RunCase, expected: Expected, world: int, sizes: dict[str, Any], model: str, options: dict[str, Any]
) -> None:
    results = run_case(cases.train, world, sizes, model, **options)
    wanted = expected(model)
    assert_same_gradients(results[0]["gradients"], wanted["stored_gradients"])
    assert all(result["metrics"]["grad_norm"] == pytest.approx(wanted["norm"], rel=2e-6) for result in results)
    for name, values in wanted["outputs"].items():
        actual = torch.cat([result["outputs"][name] for result in by_replica(results)])
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
