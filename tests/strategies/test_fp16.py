"""Training in fp16: a loss scale, overflow on any rank, and what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.preflight import computes_in_fp16
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.training.optimizer import INITIAL_SCALE, DynamicLossScale
from tests.strategies import jobs
from tests.strategies.comparison import STEPS
from tests.strategies.samples import TensorBatch, policy_loss

BACKENDS = {
    **{name: (name, {}) for name in ("fsdp2", "fsdp", "zero0", "zero1", "zero3")},
    "megatron-plain": ("megatron", {"dist_opt": False}),
    "megatron-distributed": ("megatron", {}),
}
"""Strategies, and ways in which they keep the optimizer's states."""
DIVIDED = {
    "tp2-sp": ("megatron", {"tp": 2, "sp": True}),
    "pp2": ("megatron", {"pp": 2}),
    "cp2": ("megatron", {"cp": 2}),
}
HALF = {"reduce_dtype": "fp16", "reduce_scatter_during_grad_accumulation": False}


def backend_of(name: str) -> tuple[str, dict[str, Any]]:
    if name.startswith("zero") and not computes_in_fp16():
        pytest.skip("DeepSpeed computes in fp16 on processors that do")
    return (BACKENDS | DIVIDED)[name]


def test_the_scale_falls_at_once_and_rises_slowly():
    scale = DynamicLossScale(value=8.0, growth_interval=3)
    values = []
    for finite in (False, True, True, True, True, True, False, False, False, False, False, False):
        scale.adapt(finite)
        values.append(scale.value)
    assert values == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def stepped(run):
    """``stepped(backend, dtype, half=False)``: after a clipped step, by rank; gradients summed in fp16 or not."""
    found = {}

    def train(backend, dtype, half=False):
        key = backend, dtype, half
        if key not in found:
            strategy, config = backend_of(backend)
            options = {"dtype": dtype, "training": STEPS, "config": config | (HALF if half else {})}
            found[key] = run(jobs.train, 2, strategy, "tied", 1, 0.5, **options)
        return found[key]

    return train


@pytest.mark.long
@pytest.mark.default_rows("fsdp2-True", "zero1-False", "megatron-distributed-False")
@pytest.mark.parametrize(
    ("backend", "half"), [*((one, False) for one in BACKENDS | DIVIDED), ("fsdp2", True), ("fsdp", True)]
)
def test_a_step_in_fp16_is_near_the_one_in_fp32(stepped, backend, half):
    """fp16 has 11 bits: 0.05% of each of a dozen products and sums. bf16, with 8 bits, is eight times as far off."""
    for low, whole in zip(stepped(backend, "fp16", half), stepped(backend, "fp32"), strict=True):
        if backend.startswith("fsdp"):
            assert low["dtypes"] == {"torch.float32"}
        assert low["metrics"]["loss_scale"] == INITIAL_SCALE
        assert "loss_scale" not in whole["metrics"] and "skipped_updates" not in low["metrics"]
        difference = (low["outputs"]["log_probs"] - whole["outputs"]["log_probs"]).abs().max()
        assert 1e-5 < float(difference) < 5e-3
        assert low["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
        for name, gradient in whole["gradients"].items():
            unscaled = low["gradients"][name] / INITIAL_SCALE
            limit = 5e-3 * float(gradient.abs().max())
            torch.testing.assert_close(unscaled, gradient, rtol=0, atol=limit)


def overflow(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, Any]:
    """Steps with a loss of which rank 0's part is far too large for the first scale, then a new strategy that goes on
    from a checkpoint."""
    strategy = jobs.started(role, 10)
    start = jobs.weights_of(strategy)
    metrics, unchanged = [], []
    for _ in range(8):
        metrics.append(to_floats(strategy.train_step(batch, _large_loss, jobs.POLICY)))
        now = jobs.weights_of(strategy)
        unchanged.append(all(torch.equal(now[name], start[name]) for name in start))
    strategy.save(folder)
    strategy.saved()
    resumed = jobs.started(role, 10)
    resumed.load(folder)
    assert resumed.progress.step == strategy.progress.step
    if hasattr(resumed, "engine"):
        assert resumed.engine.optimizer.loss_scale == resumed.progress.loss_scale.value
    return {
        "metrics": metrics,
        "unchanged": unchanged,
        "scales": (strategy.progress.loss_scale, resumed.progress.loss_scale),
    }


def _large_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss * (30.0 if torch.distributed.get_rank() == 0 else 1.0), metrics


@pytest.mark.long
@pytest.mark.default_rows("fsdp2-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_on_one_rank_drops_the_update_everywhere(run, tmp_path, backend, world):
    strategy, config = backend_of(backend)
    options = {"dtype": "fp16", "training": {"learning_rate": 1e-4}, "config": config}
    results = run(overflow, world, strategy, "tied", tmp_path, **options)
    for result in results:
        skipped = ["skipped_updates" in metrics for metrics in result["metrics"]]
        dropped = skipped.index(False)
        assert 0 < dropped < 8 and not any(skipped[dropped:])
        assert [metrics["loss_scale"] for metrics in result["metrics"][: dropped + 1]] == [
            INITIAL_SCALE / 2**step for step in range(dropped + 1)
        ]
        assert result["metrics"][0]["skipped_updates"] == pytest.approx(1 / world)
        if result is results[0]:
            assert result["unchanged"] == [step < dropped for step in range(8)]
        kept, resumed = result["scales"]
        assert kept == resumed == replace(DynamicLossScale(), value=kept.value, good_updates=8 - dropped)
    assert len({str([metrics["loss_scale"] for metrics in result["metrics"]]) for result in results}) == 1
