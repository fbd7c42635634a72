"""Runs that go on by themselves when something of them dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.distributed.restarts import RECORD_NAME
from tests.faults.conftest import only_test_faults
from tests.faults.dying_workers import DEATHS_ENV
from tests.pipelines.conftest import Run
from tests.pipelines.subprocess_runs import Start
from tests.pipelines.tiny_runs import (
    FinishedRun,
    TinyWorld,
    agentic_settings,
    dpo_settings,
    load_changed,
    rlvr_settings,
    sft_settings,
    training_args,
    untimed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DYING = "tests.faults.dying_workers"
TWO = training_args(4, 1)
SETTINGS = {"rlvr": rlvr_settings, "sft": sft_settings, "dpo": dpo_settings, "agentic": agentic_settings}
RUNS = {
    "rlvr": {"actor_train.worker_cls": f"{DYING}.DyingActor", "max_steps": 4, "save_steps": 2},
    "sft": {
        "sft_train.worker_cls": f"{DYING}.DyingSft",
        "sft_train.device_mapping": [0, 1],
        "sft_train.training_args": TWO,
        "max_steps": 6,
        "save_steps": 2,
    },
    "dpo": {"actor_train.worker_cls": f"{DYING}.DyingPreference", "max_steps": 4, "save_steps": 2},
    "agentic": {"actor_train.worker_cls": f"{DYING}.DyingActor", "max_steps": 3, "save_steps": 1},
}
SURVIVES = {"max_restarts": 3, "restart_backoff": 0.1}


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "logs" / RECORD_NAME).read_text().splitlines()]


def differences(ours: FinishedRun, theirs: FinishedRun) -> list[str]:
    """Steps and metrics that are not the same, durations of episodes aside."""
    assert [row["step"] for row in ours.steps] == [row["step"] for row in theirs.steps]
    return [
        f"step {mine['step']}: {name} is {mine.get(name)}, not {value}"
        for mine, their in zip(map(untimed, ours.steps), map(untimed, theirs.steps), strict=True)
        for name, value in their.items()
        if mine.get(name) != value and not name.endswith("/seconds")
    ]


@pytest.mark.parametrize(
    "pipeline", ["rlvr", *(pytest.param(name, marks=only_test_faults) for name in ("sft", "dpo", "agentic"))]
)
def test_a_killed_rank_costs_no_number(start: Start, run: Run, world: TinyWorld, tmp_path: Path, pipeline: str) -> None:
    """A rank is killed in the fourth update, or the third; the metrics are those of the run that nobody disturbed."""
    changes = RUNS[pipeline]
    deaths = tmp_path / "deaths"
    undisturbed = run(changes | {"system_envs": {DEATHS_ENV: str(deaths)}}, pipeline, tmp_path / "whole")
    deaths.write_text("3" if pipeline in ("dpo", "agentic") else "4")
    output = tmp_path / "killed"
    load_changed(SETTINGS[pipeline](world, output), changes | SURVIVES | {"system_envs": {DEATHS_ENV: str(deaths)}})
    status, errors = start(output / "input" / "config.yaml", output).finish(240)
    assert status == 0, errors
    assert deaths.read_text() == "", "the rank was killed"
    assert [row["event"] for row in records(output)] == ["ended", "restarted", "recovered"]
    assert "restart 1 of 3 in 0.1 s, from" in errors, errors
    assert pipeline != "rlvr" or "checkpoint-2:" in errors, errors  # short steps may end before a checkpoint is written
    assert differences(FinishedRun(output), undisturbed) == []


@only_test_faults
def test_a_run_that_dies_twice_in_the_same_place_ends(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("1\n1\n1")
    load_changed(sft_settings(world, tmp_path), RUNS["sft"] | SURVIVES | {"system_envs": {DEATHS_ENV: str(deaths)}})
    status, errors = start(tmp_path / "input" / "config.yaml", tmp_path).finish(240)
    assert status == 1
    assert "not started again: the run died twice in the same place, after 0 steps, without progress" in errors, errors
    assert f"the evidence is in {tmp_path / 'logs'}" in errors
    assert deaths.read_text() == "1", "two of three"
    assert [row["event"] for row in records(tmp_path)] == ["ended", "restarted", "ended"]


@only_test_faults
def test_a_rewound_run_leaves_a_batch_out(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    """The loss of the third step is infinite; the run goes back to a checkpoint, and on without that batch."""
    deaths = tmp_path / "deaths"
    deaths.write_text("3")
    changes = {"sft_train.worker_cls": f"{DYING}.InfiniteOnce", "on_nonfinite": "rewind", "save_steps": 1}
    load_changed(sft_settings(world, tmp_path), changes | {"system_envs": {DEATHS_ENV: str(deaths)}})
    status, errors = start(tmp_path / "input" / "config.yaml", tmp_path).finish(240)
    assert status == 0, errors
    assert "rewinding: the run goes on from" in errors
    finished = FinishedRun(tmp_path)
    assert [row["step"] for row in finished.steps] == list(range(6))
    assert ["sft_train/loss" in row for row in finished.steps] == [True, True, False, True, True, True]
    assert all("skipped_updates" not in row for row in finished.steps)
    assert (tmp_path / "batches" / "step-000002.safetensors").is_file()
