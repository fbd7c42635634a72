"""Training in fp16: a loss scale, overflow on any rank, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.loss_scale import INITIAL_SCALE, DynamicLossScale
from tests.strategies import sharded_cases as cases
from tests.strategies.comparison import STEPS
from tests.strategies.samples import TensorBatch, make_batch, make_role, policy_loss, split_rows

RunRanks = Callable[..., list[Any]]
STRATEGIES = ("fsdp2_train", "fsdp_train")
SPLIT = (7, 5)


def test_the_scale_falls_at_once_and_rises_slowly() -> None:
    scale = DynamicLossScale(value=8.0, growth_interval=3)
    values = []
    for finite in (False, True, True, True, True, True, False, False, False, False, False, False):
        scale.adapt(finite)
        values.append(scale.value)
    assert values == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_a_restored_scale_goes_on_where_it_was() -> None:
    first = DynamicLossScale(value=8.0, growth_interval=3)
    first.adapt(True)
    second = DynamicLossScale(growth_interval=3)
    second.restore(first.state())
    for scale in (first, second):
        scale.adapt(True)
        scale.adapt(True)
    assert first == second and second.value == 16.0


@pytest.fixture(scope="module")
def roles(tied_model: Path) -> dict[str, WorkerConfig]:
    """Every strategy in fp32, in fp16, and with gradients that are summed in fp16 too."""
    half = {"reduce_dtype": "fp16", "reduce_scatter_during_grad_accumulation": False}
    kinds = {"fp32": ("fp32", {}), "fp16": ("fp16", {}), "half": ("fp16", half)}
    return {
        f"{strategy}-{kind}": make_role(tied_model, strategy, dtype=dtype, training=STEPS, config=config)
        for strategy in STRATEGIES
        for kind, (dtype, config) in kinds.items()
    }


@pytest.fixture(scope="module")
def steps(run_ranks: RunRanks, roles: dict[str, WorkerConfig]) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """After one and after three clipped steps, by rank and role."""
    parts = split_rows(make_batch(), SPLIT)
    return {count: run_ranks(2, cases.each, cases.train, roles, parts, count, 0.5) for count in (1, 3)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["fp16", "half"])
def test_a_step_in_fp16_is_near_the_one_in_fp32(
    steps: dict[int, list[dict[str, dict[str, Any]]]], strategy: str, kind: str
) -> None:
    """fp16 has 11 bits: 0.05% of each of a dozen products and sums. bf16, with 8 bits, is eight times as far off."""
    for results in steps[1]:
        half, whole = results[f"{strategy}-{kind}"], results[f"{strategy}-fp32"]
        assert half["dtypes"] == {"torch.float32"}
        assert half["metrics"]["loss_scale"] == INITIAL_SCALE
        assert "loss_scale" not in whole["metrics"] and "skipped_updates" not in half["metrics"]
        difference = (half["outputs"]["log_probs"] - whole["outputs"]["log_probs"]).abs().max()
        assert 1e-5 < float(difference) < 5e-3
        assert half["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-3)
        for name, gradient in whole["gradients"].items():
            unscaled = half["gradients"][name] / INITIAL_SCALE
            limit = 5e-3 * float(gradient.abs().max())
            torch.testing.assert_close(unscaled, gradient, rtol=0, atol=limit)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_steps_in_fp16_are_near_those_in_fp32(
    steps: dict[int, list[dict[str, dict[str, Any]]]], strategy: str
) -> None:
    """Weights move by up to 1e-2 a step here; the two runs part by a tenth of that in three."""
    half, whole = (steps[3][0][f"{strategy}-{kind}"] for kind in ("fp16", "fp32"))
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(half["weights"][name].float(), weight, rtol=1e-3, atol=1e-3)


def overflow(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, Any]:
    """Steps with a loss of which rank 0's part is far too large for the first scale, then a new strategy that goes on
    from a checkpoint."""
    strategy = cases.trainer(role)
    start = cases.weights_of(strategy)
    metrics, unchanged = [], []
    for _ in range(8):
        metrics.append(to_floats(strategy.train_step(batch, _large_loss, cases.POLICY)))
        now = cases.weights_of(strategy)
        unchanged.append(all(torch.equal(now[name], start[name]) for name in start))
    strategy.save(folder)
    strategy.saved()
    resumed = cases.trainer(role)
    resumed.load(folder)
    return {"metrics": metrics, "unchanged": unchanged, "scales": (strategy.loss_scale, resumed.loss_scale)}


def _large_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss * (30.0 if torch.distributed.get_rank() == 0 else 1.0), metrics


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_on_one_rank_drops_the_update_everywhere(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, world_size: int
) -> None:
    batch = make_batch()
    parts = split_rows(batch, SPLIT) if world_size == 2 else batch
    for strategy in STRATEGIES:
        role = make_role(tied_model, strategy, dtype="fp16", training={"learning_rate": 1e-4})
        results = run_ranks(world_size, overflow, role, parts, tmp_path / strategy)
        for result in results:
            skipped = ["skipped_updates" in metrics for metrics in result["metrics"]]
            dropped = skipped.index(False)
            assert 0 < dropped < 8 and not any(skipped[dropped:])
            assert [metrics["loss_scale"] for metrics in result["metrics"][: dropped + 1]] == [
                INITIAL_SCALE / 2**step for step in range(dropped + 1)
            ]
            assert result["metrics"][0]["skipped_updates"] == pytest.approx(1 / world_size)
            if result is results[0]:
                assert result["unchanged"] == [step < dropped for step in range(8)]
            kept, resumed = result["scales"]
            assert kept == resumed == replace(DynamicLossScale(), value=kept.value, good_updates=8 - dropped)
        assert len({str([metrics["loss_scale"] for metrics in result["metrics"]]) for result in results}) == 1
