"""The loop of runs on given rows, in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.pipelines.rows import RowsPipeline
from roll.workers.model import TrainWorker
from tests.pipelines.in_process import Here, prepare, run_here, worker_on
from tests.support.tiny_runs import TinyWorld, load_changed, sft_settings


def test_a_step_that_is_measured_is_begun_within_its_phase_and_alone(
    world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third one. Workers answer when they have done what was begun before they were asked."""
    settings = sft_settings(world, tmp_path)
    pipeline = RowsPipeline(load_changed(settings, {"max_steps": 6, "memory_steps": 3}))
    learner = Here("sft_train", worker_on(TrainWorker, None, seed=1))
    prepare(pipeline, learner)

    def measure(*_: object) -> dict[str, list[float]]:
        learner.asked.append(("measure", None))
        return {}

    monkeypatch.setattr(pipeline.context, "_ask_workers", measure)
    run_here(pipeline, monkeypatch)
    letters = "".join({"measure": "m", "step": "s"}.get(name, "") for name in learner.names())
    assert re.sub("m+", "m", letters) == "msmss" * 2
