"""Runs that end badly: they end soon, say why, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from roll.distributed import DeadlineExceeded, WorkerFailed
from tests.pipelines.conftest import Run
from tests.pipelines.subprocess_runs import Driver, Start, left_of
from tests.pipelines.tiny_runs import HERE, TinyWorld, load_changed, rlvr_settings, training_args

pytestmark = pytest.mark.e2e

SECONDS_TO_NOTICE = 20
"""From a death to the end of the run: at most two seconds of listening to other ranks, and tidying up."""


StartLongRun = Callable[[list[int], list[int]], Driver]


@pytest.fixture
def start_long_run(start: Start, world: TinyWorld, tmp_path: Path) -> StartLongRun:
    """``start_long_run(trainer_devices, engine_devices)``: a run that has done a step and has many slow ones to go."""

    def begin(trainers: list[int], engines: list[int]) -> Driver:
        changes = {
            "max_steps": 500,
            "actor_train.device_mapping": trainers,
            "actor_train.training_args": training_args(16 // len(trainers), 1),
            "actor_infer.device_mapping": engines,
            "rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share",
        }
        load_changed(rlvr_settings(world, tmp_path), changes)
        driver = start(tmp_path / "input" / "config.yaml", tmp_path)
        driver.wait_for(lambda: driver.steps_done() >= 1)
        return driver

    return begin


@pytest.mark.parametrize(
    ("trainers", "engines", "name", "rank"), [([0, 1], [1], "actor_train", 1), ([0], [1], "actor_infer", 0)]
)
def test_a_killed_worker_ends_the_run_with_a_diagnosis(
    start_long_run: StartLongRun, trainers: list[int], engines: list[int], name: str, rank: int
) -> None:
    driver = start_long_run(trainers, engines)
    mark, pid = driver.mark(f"{name}-{rank}"), driver.worker_pid(f"{name}-{rank}")
    os.kill(pid, signal.SIGKILL)
    status, errors = driver.finish(SECONDS_TO_NOTICE)
    assert status == 1
    assert re.search(rf"{name} rank {rank} \(pid {pid} on [\d.]+\) died in '\w+' after", errors), errors
    assert f"{name}-{rank}.log" in errors
    assert left_of(mark) == []


def test_an_engine_that_died_in_a_weight_update_comes_back(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    """The other one is sent everything again, for which the trainer's ranks gather anew."""
    changes = {
        "max_steps": 500,
        "num_gpus_per_node": 4,
        "model_update_buffer_size_mb": 1,
        "actor_train.device_mapping": [0, 1],
        "actor_train.training_args": training_args(8, 1),
        "actor_infer.device_mapping": [2, 3],
        "actor_infer.worker_cls": f"{HERE}.faulty_workers.EngineDyingInUpdate",
        "rewards.digits.worker_cls": f"{HERE}.rewards.slow_digit_share",
    }
    load_changed(rlvr_settings(world, tmp_path), changes)
    driver = start(tmp_path / "input" / "config.yaml", tmp_path)
    driver.wait_for(lambda: driver.last("scheduler/engines") == 1)
    driver.wait_for(lambda: driver.last("scheduler/engines") == 2)
    assert driver.last("scheduler/engine_deaths") == 1
    assert driver.last("model_update/buckets") > 1, "ranks must be found in the middle of the gathering"
    os.killpg(driver.process.pid, signal.SIGINT)
    driver.finish(SECONDS_TO_NOTICE)


def test_ctrl_c_leaves_nothing_behind(start_long_run: StartLongRun) -> None:
    driver = start_long_run([0], [1])
    mark = driver.mark("actor_train-0")
    assert len(left_of(mark)) >= 5, "Ray's daemons, a trainer, an engine and a reward worker"
    os.killpg(driver.process.pid, signal.SIGINT)  # as from a terminal: the whole process group gets it
    status, _ = driver.finish(SECONDS_TO_NOTICE)
    assert status == -signal.SIGINT
    assert left_of(mark) == []


def test_a_wrong_configuration_ends_at_once(start: Start, world: TinyWorld, tmp_path: Path) -> None:
    settings = rlvr_settings(world, tmp_path) | {"rollout_batch_size": 5}
    settings["actor_trian"] = settings["actor_train"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    began = time.monotonic()
    driver = start(config, tmp_path)
    status, errors = driver.finish(30)
    assert status == 2
    assert "actor_trian" in errors
    assert "actor_train" in errors, "the nearest known key"
    assert "Traceback" not in errors
    assert not (tmp_path / "logs").exists(), "nothing was started"
    assert time.monotonic() - began < 10


def test_a_worker_that_hangs_is_named_after_the_deadline(run: Run) -> None:
    changes = {"rpc_timeout": 12, "actor_train.worker_cls": f"{HERE}.faulty_workers.HangingActor"}
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as failure:
        run(changes)
    message = str(failure.value)
    assert "actor_train: 'update' was not done after 12" in message
    assert "no answer from rank 0" in message
    assert "wait_for_ever" in message, "where it stands"
    assert time.monotonic() - began < 45


def test_a_run_ends_when_its_engine_holds_other_weights(run: Run) -> None:
    with pytest.raises(WorkerFailed) as failure:
        run({"actor_infer.worker_cls": f"{HERE}.faulty_workers.CorruptingEngine"})
    message = str(failure.value)
    assert "actor_train rank 0" in message
    assert "'send_weights'" in message
    assert "engine 0 holds other values than the trainer sent in 1 of" in message


def test_the_death_of_an_engine_costs_no_sample(run: Run) -> None:
    changes = {"max_steps": 3, "actor_infer.device_mapping": [0, 1]}
    finished = run(changes | {"actor_infer.worker_cls": f"{HERE}.faulty_workers.DyingEngine"})
    assert finished.values("scheduler/engine_deaths") == [0, 1, 1]
    assert finished.values("scheduler/reissued")[-1] > 0
    samples = finished.values("system/samples")
    assert len(set(samples)) == 1, "every step has its whole batch"
    assert samples[0] > 0
