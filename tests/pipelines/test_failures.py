"""Runs that end badly: they end soon, say why, and leave nothing behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from roll.distributed import DeadlineExceeded, WorkerFailed
from tests.pipelines.conftest import Run
from tests.support.subprocess_runs import Driver, Start, left_of
from tests.support.tiny_runs import (
    HERE,
    TinyWorld,
    agentic_settings,
    load_changed,
    rlvr_settings,
    sft_settings,
    training_args,
)

pytestmark = pytest.mark.e2e

SECONDS_TO_NOTICE = 20
"""From a death to the end of the run: at most two seconds of listening to other ranks, and tidying up."""


SLOW_REWARD = {"rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share"}
TWO_TRAINERS = {"actor_train.device_mapping": [0, 1], "actor_train.training_args": training_args(8, 1)}


@pytest.fixture
def start_long_run(start: Start, world: TinyWorld, tmp_path: Path) -> Callable[[], Driver]:
    """Start a run that has done a step and has many slow ones to go."""

    def begin() -> Driver:
        load_changed(rlvr_settings(world, tmp_path), {"max_steps": 500} | TWO_TRAINERS | SLOW_REWARD)
        driver = start(tmp_path / "input" / "config.yaml", tmp_path)
        driver.wait_for(lambda: driver.steps_done() >= 1)
        return driver

    return begin


def assert_account(errors: str, output: Path) -> None:
    """The end of a run says how far it came and how to go on, and leaves its report."""
    assert re.search(r"\d+ of \d+ steps are done", errors), errors
    assert "Traceback" not in errors
    assert re.search(r"\d+ of \d+ steps are done", (output / "logs" / "run.log").read_text())
    give_up = time.monotonic() + 20
    while not (output / "report.html").exists():
        assert time.monotonic() < give_up, "no report"
        time.sleep(0.1)


@pytest.mark.long
def test_a_killed_worker_ends_the_run_with_a_diagnosis(start_long_run: Callable[[], Driver], tmp_path: Path) -> None:
    driver = start_long_run()
    mark, pid = driver.mark("actor_train-1"), driver.worker_pid("actor_train-1")
    os.kill(pid, signal.SIGKILL)
    status, errors = driver.finish(SECONDS_TO_NOTICE)
    assert status == 1
    assert re.search(rf"actor_train rank 1 \(pid {pid} on [\d.]+\) died in '\w+' after", errors), errors
    assert "actor_train-1.log" in errors
    assert_account(errors, tmp_path)
    assert left_of(mark) == []


@pytest.mark.long
@pytest.mark.default_rows("gcs_server")
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_the_death_of_a_daemon_of_ray_is_named(start_long_run: Callable[[], Driver], tmp_path: Path, name: str) -> None:
    """Ray itself ends the driver without a word, or lets it wait for a minute."""
    driver = start_long_run()
    mark = driver.mark("actor_train-0")
    pid, folder = driver.daemon(name, mark)
    os.kill(pid, signal.SIGKILL)
    status, errors = driver.finish(SECONDS_TO_NOTICE)
    assert status == 1
    assert f"Ray's {name}" in errors, errors
    assert_account(errors, tmp_path)
    give_up = time.monotonic() + 10
    while left := left_of(mark, folder):
        assert time.monotonic() < give_up, left


@pytest.mark.long
def test_an_engine_that_died_in_a_weight_update_comes_back(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    """The other one is sent everything again, for which the trainer's ranks gather anew."""
    changes = {
        "max_steps": 500,
        "num_gpus_per_node": 4,
        "model_update_buffer_size_mb": 1,
        "actor_infer.device_mapping": [2, 3],
        "actor_infer.worker_cls": f"{HERE}.faulty_workers.EngineDyingInUpdate",
    }
    load_changed(rlvr_settings(world, tmp_path), changes | TWO_TRAINERS | SLOW_REWARD)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.last("scheduler/engines") == 1)
    driver.wait_for(lambda: driver.last("scheduler/engines") == 2)
    assert driver.last("scheduler/engine_deaths") == 1
    assert driver.last("model_update/buckets") > 1, "ranks must be found in the middle of the gathering"
    os.killpg(driver.process.pid, signal.SIGINT)
    driver.finish(SECONDS_TO_NOTICE)


INTERRUPTIONS = [
    pytest.param("rlvr", {"async_generation_ratio": 1.0}, signal.SIGTERM, id="async-sigterm"),
    pytest.param(
        "sft",
        {"sft_train.device_mapping": [0, 1], "sft_train.training_args": training_args(4, 1)},
        signal.SIGHUP,
        id="sft-sighup",
    ),
    pytest.param("agentic", {}, signal.SIGTERM, id="agentic-sigterm"),
]


@pytest.mark.long
@pytest.mark.default_rows("agentic-sigterm")
@pytest.mark.parametrize(("pipeline", "changes", "number"), INTERRUPTIONS)
def test_the_first_signal_saves(
    start: Start, run: Run, world: TinyWorld, tmp_path: Path, pipeline: str, changes: dict, number: signal.Signals
) -> None:
    """Without a checkpoint of its own; what was saved is whole, and goes on where it stopped."""
    base = {"rlvr": rlvr_settings, "sft": sft_settings, "agentic": agentic_settings}[pipeline](world, tmp_path)
    load_changed(base, {**changes, **(SLOW_REWARD if pipeline == "rlvr" else {}), "max_steps": 5000})
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.steps_done() >= 2)
    mark = driver.mark("sft_train-0" if pipeline == "sft" else "actor_train-0")
    os.killpg(driver.process.pid, number)  # as from a terminal or a scheduler: the whole process group gets it
    status, errors = driver.finish(2 * SECONDS_TO_NOTICE)
    assert status == 128 + number, errors
    assert f"{number.name}: the run ends; what is done is saved first" in errors
    assert "Traceback" not in errors
    saved = next((tmp_path / "checkpoints").glob("checkpoint-*"), None)
    assert saved is not None, errors
    steps = int(saved.name.removeprefix("checkpoint-"))
    assert steps == driver.steps_done(), errors
    assert f"{steps} of 5000 steps are done; newest checkpoint: {saved}" in errors
    config = tmp_path / "input" / "config.yaml"
    assert f"roll run {config} resume_from_checkpoint=true" in errors
    assert_account(errors, tmp_path)
    assert left_of(mark) == []
    goes_on = {"max_steps": steps + 1, "resume_from_checkpoint": True}
    resumed = run({**changes, **goes_on}, pipeline=pipeline, output=tmp_path)
    assert [row["step"] for row in resumed.steps] == list(range(steps + 1))


@pytest.mark.long
def test_a_step_that_does_not_end_is_given_up(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    """Its models may be half changed: nothing is saved, and that is said."""
    changes = {"interrupt_timeout": 3, "actor_train.worker_cls": f"{HERE}.faulty_workers.HangingActor"}
    load_changed(rlvr_settings(world, tmp_path), changes)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.is_in_log("actor_train-0", "hangs for ever"))
    os.killpg(driver.process.pid, signal.SIGINT)
    status, errors = driver.finish(SECONDS_TO_NOTICE)
    assert status == 130
    assert "the step in flight was not done within interrupt_timeout: 3" in errors
    assert "0 of 2 steps are done; there is no checkpoint" in errors
    assert "Traceback" not in errors


def test_a_wrong_configuration_ends_at_once(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    settings = rlvr_settings(world, tmp_path) | {"rollout_batch_size": 5}
    settings["actor_trian"] = settings["actor_train"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    used = cpu_seconds_of_children()
    driver = start(config, tmp_path)
    status, errors = driver.finish(60)
    assert status == 2
    assert "actor_trian" in errors
    assert "actor_train" in errors, "the nearest known key"
    assert "Traceback" not in errors
    assert not (tmp_path / "logs").exists(), "nothing was started"
    assert cpu_seconds_of_children() - used < 10  # not by the clock, which on a busy host says little


def cpu_seconds_of_children() -> float:
    """Of those that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.long
def test_a_worker_that_hangs_is_named_after_the_deadline(run: Run) -> None:
    changes = {"rpc_timeout": 12, "actor_train.worker_cls": f"{HERE}.faulty_workers.HangingActor"}
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as failure:
        run(changes)
    message = str(failure.value)
    assert "actor_train: 'step' was not done after 12" in message
    assert "no answer from rank 0" in message
    assert "wait_for_ever" in message, "where it stands"
    assert time.monotonic() - began < 45


@pytest.mark.long
def test_a_run_ends_when_its_engine_holds_other_weights(run: Run) -> None:
    with pytest.raises(WorkerFailed) as failure:
        run({"actor_infer.worker_cls": f"{HERE}.faulty_workers.CorruptingEngine"})
    message = str(failure.value)
    assert "actor_train rank 0" in message
    assert "'send_weights'" in message
    assert "engine 0 holds other values than the trainer sent in 1 of" in message


@pytest.mark.long
@pytest.mark.default_rows("DyingEngine")
@pytest.mark.parametrize(
    "engine", ["DyingEngine", "StoppedEngine", "FailingEngine", "EngineStoppedInUpdate", "EngineDyingAtWake"]
)
def test_the_loss_of_an_engine_costs_no_sample(run: Run, engine: str) -> None:
    """Killed, stopped (as a hung one), raising, in the middle of generation; stopped in a weight update; killed while
    others have its device."""
    changes = {
        "max_steps": 3,
        "actor_infer.device_mapping": [0, 1],
        "actor_infer.engine_timeout": 8,
        "memory_steps": 1,
        "is_offload_states": engine == "EngineDyingAtWake",
        "actor_infer.worker_cls": f"{HERE}.faulty_workers.{engine}",
    }
    finished = run(changes)
    assert finished.values("scheduler/engine_deaths") == [0, 1, 1]
    if engine in ("DyingEngine", "StoppedEngine", "FailingEngine"):
        assert finished.values("scheduler/reissued")[-1] > 0
    samples = finished.values("system/samples")
    assert len(set(samples)) == 1, "every step has its whole batch"
    assert samples[0] > 0
