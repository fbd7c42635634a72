"""Runs that go on by themselves when something of them dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.distributed.restarts import RECORD_NAME
from roll.pipelines.evaluate.samples import SAMPLES
from tests.faults.conftest import only_test_faults
from tests.faults.dying_workers import DEATHS_ENV
from tests.pipelines.conftest import Run
from tests.support.subprocess_runs import Start
from tests.support.tiny_runs import (
    GENERATING,
    NUM_VALIDATION,
    FinishedRun,
    TinyWorld,
    agentic_settings,
    distill_settings,
    dpo_settings,
    load_changed,
    rlvr_settings,
    rm_settings,
    sft_settings,
    training_args,
    untimed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DYING = "tests.faults.dying_workers"
TWO = training_args(4, 1)
RUNS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "rlvr": (rlvr_settings, "actor_train", {"max_steps": 4, "save_steps": 2}),
    "sft": (
        *(sft_settings, "sft_train"),
        {"sft_train.device_mapping": [0, 1], "sft_train.training_args": TWO, "max_steps": 6, "save_steps": 2},
    ),
    "dpo": (dpo_settings, "actor_train", {"max_steps": 4, "save_steps": 2}),
    "rm": (rm_settings, "reward_train", {"max_steps": 4, "save_steps": 2}),
    "distill": (distill_settings, "student", {"max_steps": 4, "save_steps": 2}),
    "agentic": (agentic_settings, "actor_train", {"max_steps": 3, "save_steps": 1}),
}
"""Settings, the role that dies, and changes."""
ENGINES_OWN = "actor/train_infer_"
"""Of the engine's log-probs. How many rows an engine computes together depends on how long environments take, and the
last bits of its log-probs on that; tokens and everything that is trained do not."""
SURVIVES = {"max_restarts": 3, "restart_backoff": 0.1}


def dying(pipeline: str) -> tuple[Any, dict[str, Any]]:
    settings, role, changes = RUNS[pipeline]
    return settings, changes | {f"{role}.worker_cls": f"{DYING}.DyingTrainer"}


def records(output: Path) -> list[dict[str, Any]]:
    file = next(output.rglob(RECORD_NAME), None)
    return [] if file is None else [json.loads(line) for line in file.read_text().splitlines()]


def ended(start: Start, output: Path, status: int = 0) -> str:
    """What a run that ends by itself has written to standard error."""
    found, errors = start(output / "input" / "config.yaml", output).finish(240)
    assert found == status, errors
    return errors


def differences(ours: FinishedRun, theirs: FinishedRun) -> list[str]:
    """Steps and metrics that are not the same, durations of episodes aside."""
    assert [row["step"] for row in ours.steps] == [row["step"] for row in theirs.steps]
    return [
        f"step {mine['step']}: {name} is {mine.get(name)}, not {value}"
        for mine, their in zip(map(untimed, ours.steps), map(untimed, theirs.steps), strict=True)
        for name, value in their.items()
        if not same(name, mine.get(name), value, "episode/turns" in their) and not name.endswith("/seconds")
    ]


def same(name: str, ours: float | None, theirs: float, of_episodes: bool) -> bool:
    if of_episodes and name.startswith(ENGINES_OWN):
        return ours == pytest.approx(theirs, abs=1e-5)
    return ours == theirs


@pytest.mark.parametrize(
    "pipeline",
    ["rlvr", *(pytest.param(name, marks=only_test_faults) for name in list(RUNS)[1:])],
)
def test_a_killed_rank_costs_no_number(start: Start, run: Run, world: TinyWorld, tmp_path: Path, pipeline: str) -> None:
    """A rank is killed in the fourth update, or the third; the metrics are those of the run that nobody disturbed."""
    settings, changes = dying(pipeline)
    deaths = tmp_path / "deaths"
    undisturbed = run(changes | {"system_envs": {DEATHS_ENV: str(deaths)}}, pipeline, tmp_path / "whole")
    deaths.write_text("4" if pipeline in ("rlvr", "sft") else "3")
    output = tmp_path / "killed"
    load_changed(settings(world, output), changes | SURVIVES | {"system_envs": {DEATHS_ENV: str(deaths)}})
    errors = ended(start, output)
    assert deaths.read_text() == "", "the rank was killed"
    assert [row["event"] for row in records(output)] == ["ended", "restarted", "recovered"]
    assert "restart 1 of 3 in 0.1 s, from" in errors, errors
    assert pipeline != "rlvr" or "checkpoint-2:" in errors, errors  # short steps may end before a checkpoint is written
    assert differences(FinishedRun(output), undisturbed) == []


@pytest.mark.matrix
def test_engines_and_environments_of_episodes_die_and_none_is_lost(
    start: Start, world: TinyWorld, tmp_path: Path
) -> None:
    """The process of an environment is replaced within the run; without its only engine the run starts again."""
    deaths = tmp_path / "deaths"
    (tmp_path / "deaths-environment").touch()
    envs = {"system_envs": {DEATHS_ENV: str(deaths)}}
    letters = {"env_type": f"{DYING}.DyingLetters", "max_steps": 2, "max_tokens_per_step": 8}
    changes = {
        "max_steps": 5,
        "save_steps": 1,
        "sequence_length": 128,
        "async_generation_ratio": 1,
        "custom_envs": {"letters": letters | {"env_config": {"slow": 0.02}}},
        "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["letters"], "max_env_num_per_worker": 4}
        | envs,
        "actor_infer.worker_cls": f"{DYING}.DyingEngine",
        "actor_infer.max_restarts": 0,
        "rollout_dump_dir": str(tmp_path / "rollouts"),
    }
    deaths.write_text("20")
    load_changed(agentic_settings(world, tmp_path), changes | SURVIVES | envs)
    ended(start, tmp_path)
    assert deaths.read_text() == "" and not (tmp_path / "deaths-environment").exists()
    assert [row["event"] for row in records(tmp_path)] == ["ended", "restarted", "recovered"]
    assert "actor_infer" in records(tmp_path)[0]["reason"]
    finished = FinishedRun(tmp_path)
    assert [row["step"] for row in finished.steps] == list(range(5))
    trained = [(row["group"], row["member"]) for step in range(5) for row in finished.samples(step)]
    assert sorted(trained) == [(group, member) for group in range(5 * 4) for member in range(4)]
    assert finished.values("agent/retokenized_tokens") == [0.0] * 5


@only_test_faults
def test_an_evaluation_goes_on_with_what_it_has(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    """Its engine is killed; what was answered is not asked again."""
    deaths = tmp_path / "deaths"
    deaths.write_text("3")
    generating = GENERATING | {"num_return_sequences": 4}
    data = {"file_name": [str(world.validation)], "messages": "messages"}
    changes = {
        "pipeline": "evaluate",
        "validation": {"data_args": data, "generating_args": generating, "greedy": False},
        "evaluate": {"models": {"first": str(world.model)}},
        "val_batch_size": 2,
        "actor_infer.worker_cls": f"{DYING}.DyingEngine",
        "actor_infer.max_restarts": 0,
        "rewards.digits.worker_cls": "tests.pipelines.rewards.slow_digit_share",
        "system_envs": {DEATHS_ENV: str(deaths)},
    }
    load_changed(rlvr_settings(world, tmp_path), changes | SURVIVES)
    errors = ended(start, tmp_path)
    assert deaths.read_text() == "" and "restart 1 of 3" in errors
    rows = [json.loads(line) for line in next(tmp_path.rglob(SAMPLES)).read_text().splitlines()]
    assert len(rows) == len({(row["order"], row["sample"]) for row in rows}) == 4 * NUM_VALIDATION


@only_test_faults
def test_a_run_that_dies_twice_in_the_same_place_ends(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("1\n1\n1")
    load_changed(sft_settings(world, tmp_path), dying("sft")[1] | SURVIVES | {"system_envs": {DEATHS_ENV: str(deaths)}})
    errors = ended(start, tmp_path, status=1)
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
    errors = ended(start, tmp_path)
    assert "rewinding: the run goes on from" in errors
    finished = FinishedRun(tmp_path)
    assert [row["step"] for row in finished.steps] == list(range(6))
    assert ["sft_train/loss" in row for row in finished.steps] == [True, True, False, True, True, True]
    assert all("skipped_updates" not in row for row in finished.steps)
    assert (tmp_path / "batches" / "step-000002.safetensors").is_file()
