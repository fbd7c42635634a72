"""Training in fp16: a loss scale, overflow on any rank, and what a checkpoint keeps of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.roles import WorkerConfig
from roll.preflight import computes_in_fp16
from roll.protocol.metrics import Metrics, to_floats
from roll.strategies.factory import create_strategy
from roll.strategies.training.optimizer import INITIAL_SCALE, DynamicLossScale
from tests.strategies import sharded_cases as cases
from tests.strategies.comparison import STEPS
from tests.strategies.samples import TensorBatch, make_batch, make_role, policy_loss, split_rows

RunRanks = Callable[..., list[Any]]
STRATEGIES = ("fsdp2_train", "fsdp_train", "deepspeed_train", "megatron_train")
PACKAGES = {"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}
SPLIT = (7, 5)
STAGES = {f"deepspeed_train-{stage}": {"zero_stage": stage} for stage in range(4)}
LAYOUTS = {"megatron_train-plain": {"use_distributed_optimizer": False}, "megatron_train-distributed": {}}
BACKENDS = ("fsdp2_train", "fsdp_train", *STAGES, *LAYOUTS)
"""Strategies, and ways in which they keep the optimizer's states."""


def runs_here(strategy: str) -> bool:
    """Its package is installed, and computes in fp16 on this processor."""
    if strategy == "deepspeed_train" and not computes_in_fp16():
        return False
    return strategy not in PACKAGES or find_spec(PACKAGES[strategy].partition(".")[0]) is not None


def train(role: WorkerConfig, batch: TensorBatch, steps: int, max_grad_norm: float) -> dict[str, Any]:
    """``train`` of the cases of the role's strategy."""
    folder = role.strategy_args.strategy_name.removesuffix("_train")
    module = cases if folder.startswith("fsdp") else import_module(f"tests.strategies.{folder}.cases")
    result: dict[str, Any] = module.train(role, batch, steps, max_grad_norm)
    return result


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
    made = {}
    for backend in BACKENDS:
        strategy = backend.partition("-")[0]
        kinds = {"fp32": ("fp32", {}), "fp16": ("fp16", {})}
        if strategy.startswith("fsdp"):
            kinds["half"] = ("fp16", half)
        if runs_here(strategy):
            for kind, (dtype, more) in kinds.items():
                config = STAGES.get(backend, {}) | LAYOUTS.get(backend, {}) | more
                made[f"{backend}-{kind}"] = make_role(tied_model, strategy, dtype=dtype, training=STEPS, config=config)
    return made


@pytest.fixture(scope="module")
def steps(run_ranks: RunRanks, roles: dict[str, WorkerConfig]) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """After one and after three clipped steps, by rank and role."""
    parts = split_rows(make_batch(), SPLIT)
    return {count: run_ranks(2, cases.each, train, roles, parts, count, 0.5) for count in (1, 3)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "kind"), [*((one, "fp16") for one in BACKENDS), ("fsdp2_train", "half"), ("fsdp_train", "half")]
)
def test_a_step_in_fp16_is_near_the_one_in_fp32(
    steps: dict[int, list[dict[str, dict[str, Any]]]], backend: str, kind: str
) -> None:
    """fp16 has 11 bits: 0.05% of each of a dozen products and sums. bf16, with 8 bits, is eight times as far off."""
    skip_where_missing(backend)
    for results in steps[1]:
        half, whole = results[f"{backend}-{kind}"], results[f"{backend}-fp32"]
        if backend.startswith("fsdp"):
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


def skip_where_missing(backend: str) -> None:
    strategy = backend.partition("-")[0]
    if not runs_here(strategy):
        pytest.skip(f"needs {PACKAGES[strategy]}, and under DeepSpeed a processor with fp16")


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_steps_in_fp16_are_near_those_in_fp32(
    steps: dict[int, list[dict[str, dict[str, Any]]]], backend: str
) -> None:
    """Weights move by up to 1e-2 a step here; the two runs part by a tenth of that in three. So do two backends."""
    skip_where_missing(backend)
    half, whole, fsdp2 = (steps[3][0][name] for name in (f"{backend}-fp16", f"{backend}-fp32", "fsdp2_train-fp16"))
    assert half["metrics"]["grad_norm"] == pytest.approx(fsdp2["metrics"]["grad_norm"], rel=5e-3)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(half["weights"][name].float(), fsdp2["weights"][name].float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(half["weights"][name].float(), weight, rtol=1e-3, atol=1e-3)


def overflow(role: WorkerConfig, batch: TensorBatch, folder: Path) -> dict[str, Any]:
    """Steps with a loss of which rank 0's part is far too large for the first scale, then a new strategy that goes on
    from a checkpoint."""
    strategy = started(role)
    start = cases.weights_of(strategy)
    metrics, unchanged = [], []
    for _ in range(8):
        metrics.append(to_floats(strategy.train_step(batch, _large_loss, cases.POLICY)))
        now = cases.weights_of(strategy)
        unchanged.append(all(torch.equal(now[name], start[name]) for name in start))
    strategy.save(folder)
    strategy.saved()
    resumed = started(role)
    resumed.load(folder)
    assert resumed.progress.step == strategy.progress.step
    if hasattr(resumed, "engine"):
        assert resumed.engine.optimizer.loss_scale == resumed.progress.loss_scale.value
    return {
        "metrics": metrics,
        "unchanged": unchanged,
        "scales": (strategy.progress.loss_scale, resumed.progress.loss_scale),
    }


def started(role: WorkerConfig) -> Any:
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()  # a process has one such strategy at a time
    strategy = create_strategy(role)
    strategy.initialize(num_training_steps=10)
    return strategy


def _large_loss(outputs: TensorBatch, batch: TensorBatch) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = policy_loss(outputs, batch)
    return loss * (30.0 if torch.distributed.get_rank() == 0 else 1.0), metrics


@pytest.mark.default_rows("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_on_one_rank_drops_the_update_everywhere(
    run_ranks: RunRanks, tied_model: Path, tmp_path: Path, world_size: int
) -> None:
    batch = make_batch()
    parts = split_rows(batch, SPLIT) if world_size == 2 else batch
    for backend in BACKENDS:
        strategy = backend.partition("-")[0]
        if not runs_here(strategy):
            continue
        config = STAGES.get(backend, {}) | LAYOUTS.get(backend, {})
        role = make_role(tied_model, strategy, dtype="fp16", training={"learning_rate": 1e-4}, config=config)
        results = run_ranks(world_size, overflow, role, parts, tmp_path / backend)
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
