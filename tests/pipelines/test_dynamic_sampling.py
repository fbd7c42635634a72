"""Group filters and over-provisioning in a run."""

from __future__ import annotations

import json

import pytest

from roll.rollout.flow import RolloutExhausted
from tests.pipelines.conftest import Run
from tests.pipelines.tiny_runs import HERE, FinishedRun, training_args

pytestmark = pytest.mark.e2e

STD_FILTER = {"type": "std_filter", "filter_args": {"std_threshold": 0.001}}


def dumped(finished: FinishedRun, step: int) -> list[dict]:
    return [json.loads(line) for line in (finished.output / f"rollouts/train-{step:06d}.jsonl").open()]


def test_a_step_is_filled_with_groups_that_differ_inside(run: Run, tmp_path) -> None:
    """Two questions in three give all their samples the same score and are replaced by others."""
    changes = {
        "max_steps": 4,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "rewards.digits.worker_cls": f"{HERE}.rewards.by_question",
        "rewards.digits.query_filter_config": STD_FILTER,
        "rewards.digits.world_size": 2,
        "actor_infer.device_mapping": [0, 1],
        "is_use_additional_prompts": True,
        "max_additional_running_prompts": 3,
    }
    finished = run(changes, output=tmp_path)
    for row in finished.steps:
        assert row["scheduler/query_use_count"] == 4
        assert row["system/samples"] == 16
        parts = ("query_use_count", "filtered_query_count", "aborted_query_count")
        assert row["scheduler/collect_query_count"] == sum(row[f"scheduler/{part}"] for part in parts)
        groups = [[r["score"] for r in dumped(finished, row["step"])][i : i + 4] for i in range(0, 16, 4)]
        assert all(len(set(scores)) > 1 for scores in groups)
    assert sum(finished.values("scheduler/filtered_query_count")) > 0
    assert sum(finished.values("scheduler/aborted_query_count")) > 0, "3 more prompts than needed are always running"
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4, "no sample outlives its weights"


@pytest.mark.long
def test_mean_filter_keeps_what_is_neither_too_easy_nor_too_hard(run: Run, tmp_path) -> None:
    limits = {"threshold_down": 0.5, "threshold_up": 1.5}
    changes = {
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "rewards.digits.worker_cls": f"{HERE}.rewards.by_question",
        "rewards.digits.query_filter_config": {"type": "mean_filter", "filter_args": limits},
    }
    finished = run(changes, output=tmp_path)
    for row in finished.steps:
        assert row["critic/score/mean"] == 1.0
        assert {int(r["ground_truth"]) % 3 for r in dumped(finished, row["step"])} == {1}
        assert row["scheduler/aborted_query_count"] == 0, "nothing was asked beyond the need"
    assert sum(finished.values("scheduler/filtered_query_count")) > 0


def test_a_filter_that_rejects_everything_ends_the_run_with_a_reason(run: Run) -> None:
    changes = {
        "rollout_batch_size": 1,
        "actor_train.training_args": training_args(2, 2),
        "rewards.digits.worker_cls": f"{HERE}.rewards.always_one",
        "rewards.digits.query_filter_config": STD_FILTER,
    }
    with pytest.raises(RolloutExhausted, match=r"rejected 51 groups while 1 were wanted.*1\.000 to 1\.000.*Loosen"):
        run(changes)
