"""Group filters and over-provisioning in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import HERE

pytestmark = pytest.mark.e2e


def test_a_step_is_filled_with_groups_that_differ_inside(run: Run, tmp_path: Path) -> None:
    """Two questions in three give all their samples the same score and are replaced by others."""
    changes = {
        "max_steps": 4,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "rewards.digits.worker_cls": f"{HERE}.rewards.by_question",
        "rewards.digits.query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0.001}},
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
        scores = [sample["score"] for sample in finished.samples(row["step"])]
        assert all(len(set(scores[i : i + 4])) > 1 for i in range(0, 16, 4))
    assert sum(finished.values("scheduler/filtered_query_count")) > 0
    assert sum(finished.values("scheduler/aborted_query_count")) > 0, "3 more prompts than needed are always running"
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4, "no sample outlives its weights"
