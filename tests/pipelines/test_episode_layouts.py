"""The numbers of a step on episodes depend neither on how rows are formed nor on ranks, micro-batches and packing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipelines.conftest import Run
from tests.pipelines.tiny_runs import FinishedRun, role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TWO_MINI_BATCHES = {
    "adv_estimator": "turn_gae",
    "gamma": 0.9,
    "lambd": 0.8,
    "ppo_epochs": 2,
    "ratio_type": "segment",
    "loss_agg_mode": "seq-mean-token-mean",
    "value_loss_agg_mode": "seq-mean-token-mean",
    "value_clip": 0.5,
    "max_grad_norm": 0.5,
}
"""Two optimizer steps of 8 episodes in each of two passes, with turns of different lengths; some end at the limit."""


def layout(devices: list[int], micro_batch_size: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    """Actor and critic on these devices."""
    arguments = training_args(micro_batch_size, accumulation)
    return {
        "actor_train.device_mapping": devices,
        "actor_train.training_args": arguments,
        "critic": role("fsdp2_train", devices, training_args=arguments, infer_batch_size=micro_batch_size) | changes,
    } | {f"actor_train.{key}": value for key, value in changes.items()}


STEPS = {"custom_envs.game.samples": "step"}
PACKING = {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance"}}
LAYOUTS = {
    "micro-batches of one": layout([0], 1, 8),
    "two ranks, packed": layout([0, 1], 2, 2, **PACKING),
    "a row a turn": layout([0], 4, 2) | STEPS,
    "a row a turn, two ranks": layout([0, 1], 4, 1) | STEPS,
    "a row a turn, two ranks, shared prompts": layout([0, 1], 4, 1, use_prefix_sharing=True) | STEPS,
}
UPDATE = {"rel": 2e-4, "abs": 1e-7}
AFTERWARDS = {"rel": 2e-3, "abs": 2e-4}


@pytest.fixture(scope="module")
def reference_run(run: Run) -> FinishedRun:
    return run(TWO_MINI_BATCHES | layout([0], 4, 2), "agentic")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_the_update(run: Run, reference_run: FinishedRun, name: str) -> None:
    (row,), (expected,) = run(TWO_MINI_BATCHES | LAYOUTS[name], "agentic").steps, reference_run.steps
    sampled = [metric for metric in expected if metric.startswith(("critic/score", "rollout/", "episode/outcome"))]
    assert len(sampled) > 8
    assert {metric: row[metric] for metric in sampled} == {metric: expected[metric] for metric in sampled}
    for metric in ("pg_loss", "total_loss", "grad_norm"):
        assert row[f"actor/{metric}"] == pytest.approx(expected[f"actor/{metric}"], **UPDATE), metric
    for metric in ("loss", "grad_norm", "advantages/mean", "returns/mean", "values/mean"):
        assert row[f"critic/{metric}"] == pytest.approx(expected[f"critic/{metric}"], **UPDATE), metric
    for metric in ("ratio_mean", "ratio_max", "ratio_min", "clipfrac", "approxkl"):
        assert row[f"actor/{metric}"] == pytest.approx(expected[f"actor/{metric}"], **AFTERWARDS), metric


def test_the_case_says_something(reference_run: FinishedRun) -> None:
    (row,) = reference_run.steps
    assert row["actor/ratio_max"] > 1.01, "later optimizer steps must be off-policy"
    assert row["trajectory/turns/max"] > row["trajectory/turns/min"] and row["critic/advantages/max"] > 0
    assert row["episode/outcome/turn_limit"] > 0, "and some episodes go on with the critic's value"
    assert min(row["actor/grad_norm"], row["critic/grad_norm"]) > 0.01
