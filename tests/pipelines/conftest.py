"""One model, one set of word problems and one Ray for all runs of this folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.pipelines.tiny_runs import (
    FinishedRun,
    TinyWorld,
    grpo_changes,
    load_changed,
    make_world,
    rlvr_settings,
    sft_settings,
)

ROOT = Path(__file__).parents[2]

Run = Callable[..., FinishedRun]


@pytest.fixture(scope="session")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray that runs join, so that not every one of them has to start its own."""
    file = tmp_path_factory.mktemp("ray") / "address"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.pipelines.serve_ray", str(file)], cwd=ROOT, stdin=subprocess.PIPE
    )
    give_up = time.monotonic() + 60
    while not file.exists():
        assert server.poll() is None, "Ray did not start"
        assert time.monotonic() < give_up, "Ray did not start in time"
        time.sleep(0.05)
    yield file.read_text()
    server.communicate(timeout=60)


@pytest.fixture(scope="session")
def run(shared_ray: str, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run({"dotted.key": value}, "rlvr")``: run a pipeline in this process, to its end."""
    settings_of: Mapping[str, Any] = {"rlvr": rlvr_settings, "sft": sft_settings}

    def run_pipeline(
        changes: Mapping[str, Any] | None = None, pipeline: str = "rlvr", output: Path | None = None
    ) -> FinishedRun:
        output = output or tmp_path_factory.mktemp("run")
        loaded = load_changed(settings_of[pipeline](world, output), changes or {})
        module = __import__(f"roll.pipelines.{pipeline}", fromlist=["run"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", shared_ray)
            module.run(loaded)
        return FinishedRun(output)

    yield run_pipeline
    package = logging.getLogger("roll")
    for handler in list(package.handlers):
        package.removeHandler(handler)
    package.propagate = True
    os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def grpo_run(run: Run, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run of ``grpo_changes``, from start to end."""
    output = tmp_path_factory.mktemp("grpo")
    return run(grpo_changes(world, output), output=output)
