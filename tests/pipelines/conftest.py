"""One model and one set of word problems for all runs of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.conftest import tiny  # noqa: F401  the modules of examples/tiny, as a fixture
from tests.support.subprocess_runs import Start, starter
from tests.support.tiny_runs import (
    FinishedRun,
    TinyWorld,
    agentic_settings,
    distill_settings,
    dpo_settings,
    grpo_changes,
    let_go_of_process,
    load_changed,
    make_world,
    rlvr_settings,
    rm_settings,
    sft_settings,
)

Run = Callable[..., FinishedRun]


@pytest.fixture(scope="session")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    return make_world(tiny, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def wide_heads(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:  # noqa: F811
    """The tiny model with two heads of 32: vLLM has no kernel for smaller ones on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny["tiny_model"], "HEADS", 2)
        return make_world(tiny, tmp_path_factory.mktemp("wide_heads"))


@pytest.fixture(scope="session")
def run(shared_ray: str, world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run({"dotted.key": value}, "rlvr")``: run a pipeline in this process, to its end. What samples has its rollouts
    written."""
    settings_of: Mapping[str, Any] = {
        "rlvr": rlvr_settings,
        "sft": sft_settings,
        "dpo": dpo_settings,
        "rm": rm_settings,
        "agentic": agentic_settings,
        "distill": distill_settings,
    }

    def run_pipeline(
        changes: Mapping[str, Any] | None = None, pipeline: str = "rlvr", output: Path | None = None
    ) -> FinishedRun:
        output = output or tmp_path_factory.mktemp("run")
        rollouts = {"rollout_dump_dir": str(output / "rollouts")} if pipeline in ("rlvr", "agentic") else {}
        loaded = load_changed(settings_of[pipeline](world, output) | rollouts, changes or {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", shared_ray)
            loaded.pipeline.run(loaded)
        return FinishedRun(output)

    yield run_pipeline
    let_go_of_process()


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(config, output)``: a run in a process of its own, which ends with the test."""
    with starter() as begin:
        yield begin


@pytest.fixture(scope="session")
def plain_run(run: Run) -> FinishedRun:
    """Two steps of GRPO whose log-probs before the update are computed: what other runs are compared with."""
    return run({"max_steps": 2, "enable_old_logprobs_recompute": True})


@pytest.fixture(scope="session")
def grpo_run(run: Run, world: TinyWorld) -> FinishedRun:
    """The run of ``grpo_changes``, from start to end."""
    return run(grpo_changes(world))
