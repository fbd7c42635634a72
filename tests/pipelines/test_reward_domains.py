"""Several reward domains in a run, and rewards that fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll.distributed import WorkerFailed
from tests.pipelines.conftest import Run
from tests.pipelines.tiny_runs import HERE

pytestmark = pytest.mark.e2e


def domain(reward: str, tags: list[str], **settings: Any) -> dict[str, Any]:
    return {"worker_cls": f"{HERE}.rewards.{reward}", "tag_included": tags, "world_size": 1} | settings


def test_rows_go_to_the_domain_of_their_tag_in_the_shares_asked_for(run: Run, tmp_path) -> None:
    changes = {
        "max_steps": 4,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "rewards": {"digits": domain("digit_share", ["even"]), "letters": domain("letter_share", ["odd"])},
        "actor_train.data_args.domain_interleave_probs": {"digits": 0.25, "letters": 0.75},
    }
    finished = run(changes, output=tmp_path)
    for row in finished.steps:
        samples = [json.loads(line) for line in (tmp_path / f"rollouts/train-{row['step']:06d}.jsonl").open()]
        tags = [(sample["domain"], sample["tag"]) for sample in samples]
        assert tags.count(("digits", "even")) == 4, "a quarter of 4 prompts, at every step"
        assert tags.count(("letters", "odd")) == 12
        for name in ("digits", "letters"):
            scores = [sample["score"] for sample in samples if sample["domain"] == name]
            assert row[f"{name}/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
            assert row[f"{name}/score/max"] == pytest.approx(max(scores), abs=1e-6)
            assert row[f"reward/{name}/error_rate"] == 0.0


def test_failed_rewards_are_counted_and_left_out_of_the_loss(run: Run, tmp_path) -> None:
    changes = {
        "max_steps": 3,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
        "rewards": {"digits": domain("fails_for_some", ["even", "odd"])},
    }
    finished = run(changes, output=tmp_path)
    total_failed = 0
    for row in finished.steps:
        samples = [json.loads(line) for line in (tmp_path / f"rollouts/train-{row['step']:06d}.jsonl").open()]
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        failed = [sample for sample in samples if sample["score"] is None]
        total_failed += len(failed)
        assert all("this text cannot be scored" in sample["error"] for sample in failed)
        assert row["reward/digits/error_rate"] == row["critic/unscored_ratio"] == len(failed) / 16
        assert row["actor/valid_samples"] == 16 - len(failed)
        assert row["digits/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6), "not counted as zero"
        assert row["critic/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6), "not counted as zero"
        assert row["actor/ratio_mean"] == 1.0
    assert total_failed > 0


@pytest.mark.long
def test_failed_rewards_with_a_value(run: Run) -> None:
    finished = run({"rewards": {"digits": domain("fails_for_some", ["even", "odd"], on_error="value", error_value=-5)}})
    for row in finished.steps:
        assert row["actor/valid_samples"] == 16
        assert row["reward/digits/error_rate"] > 0
        assert row["digits/score/min"] == -5


@pytest.mark.long
def test_failed_rewards_that_end_the_run(run: Run) -> None:
    with pytest.raises(WorkerFailed) as failure:
        run({"max_steps": 10, "rewards": {"digits": domain("fails_for_some", ["even", "odd"], on_error="raise")}})
    message = str(failure.value)
    assert "rewards.digits rank 0" in message
    assert "'score'" in message
    assert "this text cannot be scored" in message
