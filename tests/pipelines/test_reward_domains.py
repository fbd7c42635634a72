"""Several reward domains in a run, rewards that fail, group filters and over-provisioning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import HERE, FinishedRun, role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def domain(reward: str, tag: str, **settings: Any) -> dict[str, Any]:
    return {"worker_cls": f"{HERE}.rewards.{reward}", "tag_included": [tag], "world_size": 1} | settings


@pytest.fixture(scope="module")
def finished(run: Run) -> FinishedRun:
    """Two domains whose rewards fail for a quarter of all texts: left out in one, worth -5 in the other. The sections
    of reference and critic have nothing to do."""
    changes = {
        "max_steps": 4,
        "rewards": {
            "masked": domain("fails_for_some", "even"),
            "valued": domain("fails_for_some", "odd", on_error="value", error_value=-5),
        },
        "actor_train.data_args.domain_interleave_probs": {"masked": 0.75, "valued": 0.25},
        "log_entropy": False,
        "reference": role("fsdp2_infer", [0]),
        "critic": role("fsdp2_train", [1], training_args=training_args(8, 2, 1e-2)),
    }
    return run(changes)


def test_rows_go_to_the_domain_of_their_tag_in_the_shares_asked_for(finished: FinishedRun) -> None:
    for row in finished.steps:
        tags = [(sample["domain"], sample["tag"]) for sample in finished.samples(row["step"])]
        assert tags.count(("masked", "even")) == 12
        assert tags.count(("valued", "odd")) == 4, "a quarter of 4 prompts, at every step"


def test_failed_rewards_are_counted_and_left_out_of_the_loss_or_have_their_value(finished: FinishedRun) -> None:
    failures = {"masked": 0, "valued": 0}
    for row in finished.steps:
        samples = finished.samples(row["step"])
        for name in failures:
            own = [sample for sample in samples if sample["domain"] == name]
            failed = [sample for sample in own if sample["error"] is not None]
            failures[name] += len(failed)
            assert all("this text cannot be scored" in sample["error"] for sample in failed)
            assert {sample["score"] for sample in failed} <= {None if name == "masked" else -5.0}
            scores = [sample["score"] for sample in own if sample["score"] is not None]
            assert row[f"reward/{name}/error_rate"] == len(failed) / len(own)
            assert row[f"{name}/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6), "no zero"
            assert row[f"{name}/score/max"] == pytest.approx(max(scores), abs=1e-6)
        unscored = sum(sample["score"] is None for sample in samples)
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        assert row["critic/unscored_ratio"] == unscored / 16
        assert row["actor/valid_samples"] == 16 - unscored
        assert row["critic/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6), "not counted as zero"
        assert row["actor/ratio_mean"] == 1.0
    assert min(failures.values()) > 0


def test_nothing_is_computed_that_nothing_uses(finished: FinishedRun) -> None:
    """On-policy GRPO without KL: no reference, no old log-probs, no values, and no entropy where it is not logged."""
    for row in finished.steps:
        assert not {"time/ref_log_probs_values", "time/old_log_probs", "time/values", "actor/entropy"} & row.keys()
    started = {path.stem.rpartition("-")[0] for path in (finished.logs / "workers").iterdir()}
    assert started == {"actor_train", "actor_infer", "rewards.masked", "rewards.valued"}


def test_a_step_is_filled_with_groups_that_differ_inside(run: Run) -> None:
    """Two questions in three give all their samples the same score and are replaced by others."""
    changes = {
        "max_steps": 4,
        "rewards.digits.worker_cls": f"{HERE}.rewards.by_question",
        "rewards.digits.query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0.001}},
        "rewards.digits.world_size": 2,
        "actor_infer.device_mapping": [0, 1],
        "is_use_additional_prompts": True,
        "max_additional_running_prompts": 3,
    }
    finished = run(changes)
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
