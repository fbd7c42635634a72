"""Experts of tokens as vLLM returns them, against its own classes; its engine returns them on GPUs only."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from roll.strategies.engines.requests import GenerationOutput

pytestmark = pytest.mark.long
ROWS = np.arange(7 * 2 * 3).reshape(7, 2, 3)
"""Of a prompt of 5 tokens and a response of 3, 2 layers, 3 choices."""


@pytest.fixture(scope="module")
def arguments():
    """Imported for these tests alone: every test process collects this file."""
    reason = "vllm is not installed: make install-vllm"
    return pytest.importorskip("roll.strategies.vllm.arguments", reason=reason)


def begun(routes: np.ndarray | None) -> GenerationOutput:
    return GenerationOutput("r", 0, [8], [-0.5], "abort", [(0, 0, 1)], routes=routes)


def test_vllm_has_what_is_asked_for(arguments):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput

    assert "enable_return_routed_experts" in {one.name for one in fields(EngineArgs)}
    output = CompletionOutput(0, "", [1, 2, 3], None, None, routed_experts=ROWS)
    assert (arguments.recorded_routes(output.routed_experts, 7, 42, None, 0) == ROWS).all()


def test_recorded_routes(arguments):
    """In the type of the column; a continued sample keeps what it was sampled with; one that lacks tokens has none."""
    for num_experts, dtype in ((255, np.uint8), (256, np.int16)):
        assert arguments.recorded_routes(ROWS, 7, num_experts, None, 0).dtype == dtype
    for old, kept in ((np.full((5, 2, 3), 9, np.uint8), 9), (None, 255)):
        found = arguments.recorded_routes(ROWS, 7, 42, begun(old), 5)
        assert (found[:5] == kept).all() and (found[5:] == ROWS[5:]).all()
    for rows in (None, ROWS[:6]):
        assert arguments.recorded_routes(rows, 7, 42, None, 0) is None
