"""A run whose trainer and reference compute by Liger's kernels, in Triton's interpreter: ``make test-liger``."""

from __future__ import annotations

import os

import pytest

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import role, training_args

pytest.importorskip("liger_kernel", reason="needs liger-kernel: make test-liger")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-liger", allow_module_level=True)

ROUNDING = {"rel": 2e-4, "abs": 1e-7}
SMALL = {
    "max_steps": 1,
    "rollout_batch_size": 2,
    "num_return_sequences_in_group": 2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "rpc_timeout": 600,
    "actor_train.training_args": training_args(4, 1),
    "reference": role("fsdp2_infer", [0]),
}


def test_the_numbers_of_a_step(run: Run) -> None:
    """Compared with transformers' layers."""
    uses = {f"{name}.model_args.use_liger_kernel": True for name in ("actor_train", "reference")}
    (row,), (expected,) = run(SMALL | uses).steps, run(SMALL).steps
    assert row["critic/score/mean"] == expected["critic/score/mean"]
    assert expected["actor/grad_norm"] > 0.01
    for metric in ("total_loss", "grad_norm", "kl_loss", "entropy"):
        assert row[f"actor/{metric}"] == pytest.approx(expected[f"actor/{metric}"], **ROUNDING), metric
