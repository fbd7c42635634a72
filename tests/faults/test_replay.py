"""Batches that are written down, and steps that are taken again from them; numbers that are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from roll import replay as commands
from roll.config.reading.errors import ConfigError
from roll.distributed.failures import NotFinite
from roll.pipelines.batches import RecordedBatch
from roll.strategies.base import target_columns
from tests.faults.conftest import only_test_faults
from tests.faults.dying_workers import DEATHS_ENV
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import FinishedRun, TinyWorld, role, training_args

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CHANGES = {
    "max_steps": 2,
    "save_steps": 1,
    "dump_batches": 1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "reference": role("fsdp2_infer", [0]),
}


@pytest.fixture(scope="module")
def recorded(run: Run) -> FinishedRun:
    return run(CHANGES)


@pytest.fixture
def replay(recorded: FinishedRun, shared_ray: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``replay(step, "key=value")``: the exit status of the command."""
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)

    def call(step: int, *overrides: str) -> int:
        dump = recorded.output / "batches" / f"step-{step:06d}.safetensors"
        config = str(recorded.output / "input" / "config.yaml")
        return commands.replay([str(dump), config, *overrides, "--output", str(tmp_path)])

    return call


def test_the_same_step_again(recorded: FinishedRun, replay: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit, at the start and from a checkpoint; the run's own files are left alone."""
    before = (recorded.logs / "metrics.jsonl").read_text()
    assert replay(0) == 0
    assert replay(1, f"resume_from_checkpoint={recorded.output}/checkpoints/checkpoint-1") == 0
    printed = capsys.readouterr().out
    (first, second) = (line for line in printed.splitlines() if "metrics: " in line)
    for line in (first, second):
        total, equal = int(line.split(" metrics: ")[0].split()[-1]), int(line.split(" metrics: ")[1].split(" ")[0])
        assert total == equal > 20, line
    assert (recorded.logs / "metrics.jsonl").read_text() == before


def test_another_layout_and_strategy_agree(replay: Any) -> None:
    two_ranks = ["actor_train.device_mapping=[0,1]", "actor_train.training_args.per_device_train_batch_size=4"]
    assert replay(0, *two_ranks, "actor_train.strategy_args.strategy_name=deepspeed_train") == 0


def test_what_differs_is_named(replay: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(0, "actor_train.training_args.learning_rate=0.002", "kl_loss_coef=0.02") == 1
    printed = capsys.readouterr().out
    assert "actor/lr" in printed
    assert "actor/pg_loss" not in printed
    with pytest.raises(ConfigError, match=r"name that checkpoint, resume_from_checkpoint=.*checkpoint-1"):
        replay(1)


LOSSES = {
    "sft": "sft_train/loss",
    "dpo": "actor/loss",
    "rm": "reward/loss",
    "distill": "student/kd_loss",
    "opd": "actor/total_loss",
}


@pytest.mark.matrix
@pytest.mark.parametrize("pipeline", LOSSES)
def test_other_pipelines(
    run: Run, world: TinyWorld, shared_ray: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipeline: str
) -> None:
    changes: dict[str, Any] = {"max_steps": 1, "dump_batches": 1}
    if pipeline == "opd":
        teacher = role("fsdp2_infer", [0], model_args={"model_name_or_path": str(world.teacher), "dtype": "fp32"})
        changes |= {"pipeline": "opd", "estimator": "reinforce", "opd_form": "topk", "teacher": teacher}
    finished = run(changes, "rlvr" if pipeline == "opd" else pipeline, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    dump = tmp_path / "batches" / "step-000000.safetensors"
    assert commands.replay([str(dump), str(tmp_path / "input" / "config.yaml")]) == 0
    recorded, name = RecordedBatch.load(dump), LOSSES[pipeline]
    assert recorded.pipeline == pipeline
    assert recorded.metrics[name] == finished.values(name)[0] != 0


SPOILT = {"sft_train.worker_cls": "tests.faults.dying_workers.InfiniteLoss", "max_steps": 3, "save_steps": 1}
TWO_RANKS = {"sft_train.device_mapping": [0, 1], "sft_train.training_args": training_args(4, 1)}


def test_a_loss_that_is_not_finite_is_skipped_by_all_ranks(run: Run) -> None:
    """The loss of one rank is infinite in the second step, with a finite gradient. The batch can be run again."""
    finished = run(SPOILT | TWO_RANKS, "sft")
    assert [row.get("skipped_updates", 0) for row in finished.steps] == [0, 1, 0]
    batch = RecordedBatch.load(finished.output / "batches" / "step-000001.safetensors")
    assert (batch.pipeline, batch.step, len(batch.batch)) == ("sft", 1, 8)
    assert "its batch is in" in (finished.logs / "run.log").read_text()


@pytest.mark.matrix
def test_distillation_leaves_a_batch_out(run: Run, tmp_path: Path) -> None:
    """The student does not learn from the second step's batch, for which the teacher was asked."""
    deaths = tmp_path / "deaths"
    deaths.write_text("2")
    changes = {"student.worker_cls": "tests.faults.dying_workers.InfiniteOnce"}
    finished = run(changes | {"system_envs": {DEATHS_ENV: str(deaths)}}, "distill", tmp_path)
    assert [row.get("skipped_updates", 0) for row in finished.steps] == [0, 1, 0]
    left_out = RecordedBatch.load(tmp_path / "batches" / "step-000001.safetensors")
    assert left_out.pipeline == "distill" and left_out.metrics["skipped_updates"] == 1
    assert set(target_columns("teacher")) <= set(left_out.batch.batch.keys())
    norms = finished.values("student/grad_norm")
    assert math.isfinite(norms[0]) and not math.isfinite(norms[1]) and math.isfinite(norms[2])


@only_test_faults
def test_a_loss_that_is_not_finite_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"step 1: a loss or gradient was not finite.*batches/step-000001.*stop"):
        run(SPOILT | TWO_RANKS | {"on_nonfinite": "stop"}, "sft", tmp_path)
    assert [row["step"] for row in FinishedRun(tmp_path).steps] == [0, 1]
