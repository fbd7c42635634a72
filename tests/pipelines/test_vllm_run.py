"""RLVR with vLLM as the engine: the trainer and the engine agree after every weight update."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pipelines.conftest import Run
from tests.pipelines.tiny_runs import GENERATING, TinyWorld, role

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make install-vllm"),
]

STEPS = 3
GAP = 1e-5  # float32 sums in another order; measured 9.5e-7


def test_trainer_and_engine_agree_at_every_step(run: Run, wide_heads: TinyWorld, tmp_path: Path) -> None:
    engine = role("vllm", [1], generating_args=GENERATING)
    engine["strategy_args"]["strategy_config"] = {"load_format": "dummy", "max_num_seqs": 8}
    finished = run({"pretrain": str(wide_heads.model), "max_steps": STEPS, "actor_infer": engine}, output=tmp_path)
    assert finished.values("model_update/version") == list(range(STEPS))
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < GAP
    assert max(finished.values("actor/grad_norm")) > 0.0, "the weights move"
    assert all(length > 1 for length in finished.values("token/response_length/mean"))
