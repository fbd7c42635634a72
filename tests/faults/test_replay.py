"""Batches that are written down, and steps that are taken again from them; numbers that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.reading.errors import ConfigError
from roll.distributed.failures import NotFinite
from roll.pipelines.batches import RecordedBatch
from roll.replay import main
from tests.faults.conftest import only_test_faults
from tests.pipelines.conftest import Run
from tests.pipelines.tiny_runs import FinishedRun, role, training_args

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
        return main([str(dump), config, *overrides, "--output", str(tmp_path)])

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


@pytest.mark.parametrize(
    "changes",
    [
        ["actor_train.device_mapping=[0,1]", "actor_train.training_args.per_device_train_batch_size=4"],
        pytest.param(["actor_train.strategy_args.strategy_name=deepspeed_train"], marks=only_test_faults),
    ],
    ids=["two ranks", "deepspeed"],
)
def test_another_layout_or_strategy_agrees(replay: Any, changes: list[str]) -> None:
    assert replay(0, *changes) == 0


def test_what_differs_is_named(replay: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(0, "actor_train.training_args.learning_rate=0.002", "kl_loss_coef=0.02") == 1
    printed = capsys.readouterr().out
    assert "actor/lr" in printed
    assert "actor/pg_loss" not in printed
    with pytest.raises(ConfigError, match=r"name that checkpoint, resume_from_checkpoint=.*checkpoint-1"):
        replay(1)


@only_test_faults
@pytest.mark.parametrize(("pipeline", "role"), [("sft", "sft_train"), ("dpo", "actor"), ("distill", "student")])
def test_other_pipelines(
    run: Run, shared_ray: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipeline: str, role: str
) -> None:
    finished = run({"max_steps": 1, "dump_batches": 1}, pipeline, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", shared_ray)
    dump = tmp_path / "batches" / "step-000000.safetensors"
    assert main([str(dump), str(tmp_path / "input" / "config.yaml")]) == 0
    recorded = RecordedBatch.load(dump)
    assert recorded.metrics[f"{role}/loss"] == pytest.approx(finished.values(f"{role}/loss")[0], rel=0)


SPOILT = {"sft_train.worker_cls": "tests.faults.dying_workers.InfiniteLoss", "max_steps": 4, "save_steps": 1}
TWO_RANKS = {"sft_train.device_mapping": [0, 1], "sft_train.training_args": training_args(4, 1)}


def test_a_loss_that_is_not_finite_is_skipped_by_all_ranks(run: Run) -> None:
    """The loss of one rank is infinite in the second step, with a finite gradient. The batch can be run again."""
    finished = run(SPOILT | TWO_RANKS, "sft")
    assert [row.get("skipped_updates", 0) for row in finished.steps] == [0, 1, 0, 0]
    batch = RecordedBatch.load(finished.output / "batches" / "step-000001.safetensors")
    assert (batch.pipeline, batch.step, len(batch.batch)) == ("sft", 1, 8)
    assert "its batch is in" in (finished.logs / "run.log").read_text()


@only_test_faults
def test_a_loss_that_is_not_finite_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"step 1: a loss or gradient was not finite.*batches/step-000001.*stop"):
        run(SPOILT | TWO_RANKS | {"on_nonfinite": "stop"}, "sft", tmp_path)
    assert [row["step"] for row in FinishedRun(tmp_path).steps] == [0, 1]
