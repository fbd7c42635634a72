"""Workers that are replaced while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.rollout.rewarding import QUARANTINE_FILE
from tests.faults.dying_workers import DEATHS_ENV, KILLERS_ENV
from tests.pipelines.conftest import Run
from tests.support.tiny_runs import FinishedRun, TinyWorld, role, untimed

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DYING = "tests.faults.dying_workers"
DEATHS = ("scheduler/reward_worker_deaths", "scheduler/set_aside_samples", "system/reference_deaths")


def changes(folder: Path) -> dict[str, Any]:
    return {
        "max_steps": 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "reference": role("fsdp2_infer", [0, 1], infer_batch_size=4, worker_cls=f"{DYING}.DyingReference"),
        "rewards.digits.worker_cls": f"{DYING}.digit_share",
        "rewards.digits.world_size": 2,
        "system_envs": {DEATHS_ENV: str(folder / "deaths"), KILLERS_ENV: str(folder / "killers")},
    }


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    output = tmp_path_factory.mktemp("undisturbed")
    return run(changes(output), output=output)


def responses(finished: FinishedRun) -> list[str]:
    """Of the first step."""
    return [sample["response"] for sample in finished.samples(0)]


def test_their_deaths_change_no_number(run: Run, undisturbed: FinishedRun, tmp_path: Path) -> None:
    """A rank of the reference is killed at its second batch, and a reward worker by a response that is harmless the
    next time."""
    (tmp_path / "deaths").write_text("2")
    (tmp_path / "killers").write_text(json.dumps(responses(undisturbed)[:1]))
    finished = run(changes(tmp_path), output=tmp_path)
    assert (tmp_path / "deaths").read_text() == ""
    assert finished.values(DEATHS[0]) == [1, 1]
    assert finished.values(DEATHS[1]) == [0, 0]
    assert [row.get(DEATHS[2], 0) for row in finished.steps] == [0, 1]
    rows = [{name: value for name, value in untimed(row).items() if name not in DEATHS} for row in finished.steps]
    assert rows == [untimed(row) for row in undisturbed.steps]


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["advantage", "topk", "distill"])
def test_the_death_of_a_teacher_changes_no_number(run: Run, world: TinyWorld, tmp_path: Path, form: str) -> None:
    """One of two teachers, which share a device with it, or the only one, which is a step ahead."""
    model = {"model_args": {"model_name_or_path": str(world.teacher)}}
    dying = {"infer_batch_size": 4, "worker_cls": f"{DYING}.DyingReference"}
    settings: dict[str, Any] = {"teacher": role("fsdp2_infer", [1], **dying), "max_steps": 3}
    dead, pipeline = "teacher", "distill"
    if form != "distill":
        teachers = {"one": role("fsdp2_infer", [1]) | model, "two": role("fsdp2_infer", [0, 1], **dying) | model}
        if form == "topk":
            del teachers["one"]  # a row has one teacher
        settings = {"pipeline": "opd", "is_pure_opd": True, "opd_form": form, "opd_topk": 4, "max_steps": 2}
        settings["teacher"] = teachers
        dead, pipeline = "teacher.two", "rlvr"
    runs = []
    for deaths in ("", "2"):
        output = tmp_path / f"deaths {deaths}"
        output.mkdir()
        (output / "deaths").write_text(deaths)
        environment = {"system_envs": {DEATHS_ENV: str(output / "deaths")}}
        runs.append(run(settings | environment, pipeline, output=output))
        assert (output / "deaths").read_text() == ""
    undisturbed, disturbed = runs
    name = f"system/{dead}_deaths"
    assert sum(row.get(name, 0) for row in disturbed.steps) == 1
    rows = [{key: value for key, value in untimed(row).items() if key != name} for row in disturbed.steps]
    assert rows == [untimed(row) for row in undisturbed.steps]


def test_a_response_that_kills_twice_is_quarantined(run: Run, undisturbed: FinishedRun, tmp_path: Path) -> None:
    deadly = next(one for one in responses(undisturbed) if responses(undisturbed).count(one) == 1)
    (tmp_path / "killers").write_text(json.dumps([deadly] * 2))
    finished = run(changes(tmp_path) | {"max_steps": 1}, output=tmp_path)
    assert finished.values(DEATHS[0]) == [2]
    assert finished.values(DEATHS[1]) == [1]
    assert np.isclose(finished.values("critic/unscored_ratio")[0], 1 / 16)
    (line,) = (finished.logs / QUARANTINE_FILE).read_text().splitlines()
    row = json.loads(line)
    assert (row["role"], row["response"]) == ("rewards.digits", deadly)
    assert row["row"]["id"].startswith("train-")
    assert "died in 'score'" in row["cause"]
