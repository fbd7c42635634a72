"""Whole recipes: phases, what does not fit and what would, and the recipes for real models at their full size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal import PAGE, recipe_row
from roll.cli import main
from roll.config.loader import load_config
from roll.rehearsal.hardware import Gpu, Hardware
from roll.rehearsal.recipe import Rehearsal, rehearse_recipe
from roll.rehearsal.report import to_json, verdict
from roll.rehearsal.simulate import rehearse
from roll.rehearsal.suggestions import suggest
from roll.rehearsal.tracker import Kind
from tests.rehearsal.test_execution import CONFIG, HIDDEN, LAYERS, MATRICES, PROMPT, RESPONSE, ROWS, task_of

pytestmark = pytest.mark.long


def test_recomputation_trades_activations_for_a_forward_pass(tmp_path: Path) -> None:
    task = task_of(tmp_path, forward_rows=0, sends=False)
    args = replace(task.role.model_args, disable_gradient_checkpointing=False)
    kept = rehearse(task).works["train"]
    again = rehearse(replace(task, role=replace(task.role, model_args=args))).works["train"]
    assert again.peak[Kind.ACTIVATIONS] < kept.peak[Kind.ACTIVATIONS]
    tokens = PROMPT + RESPONSE
    layer = (2 * MATRICES * tokens) // LAYERS + 2 * HIDDEN * tokens * tokens
    assert 0 < again.flops - kept.flops <= 2 * ROWS * LAYERS * layer


def small_machine(gib: float) -> Hardware:
    return Hardware(Gpu("small", int(gib * 2**30), 1e12, 1e12, 1e11, 1e10), "nvlink+ib400", 1e10, 1e9, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """The tiny recipe, its model's sizes from a file."""
    file = tmp_path_factory.mktemp("tiny") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return load_config(None, "tiny/rlvr_config", None, (), check_files=False), {"": file}


@pytest.fixture(scope="module")
def rehearsed(tiny: tuple[Any, dict[str, Path]]) -> Rehearsal:
    return rehearse_recipe(tiny[0], small_machine(16), tiny[1])


def test_phases_of_a_step_and_who_is_on_the_devices(rehearsed: Rehearsal) -> None:
    assert rehearsed.fits
    names = [phase.name for phase in rehearsed.devices[0].phases]
    assert names[:2] == ["weight update", "generation"] and names[-1] == "update of actor_train"
    phases = {phase.name: phase.parts for use in rehearsed.devices for phase in use.phases}
    train = phases["update of actor_train"]
    assert train["actor_train", "optimizer states"] > 0
    assert ("actor_train", "optimizer states") not in phases["weight update"]
    content = json.loads(json.dumps(to_json(rehearsed)))
    assert content["fits"] and content["phases"].keys() == set(names)


def test_what_does_not_fit_is_refused_with_the_sum_and_changes_that_fit(tiny: Any, rehearsed: Rehearsal) -> None:
    loaded, given = tiny
    room = (rehearsed.peak - 2**20) / 2**30
    known: dict[Any, Any] = {}
    report = rehearse_recipe(loaded, small_machine(room), given, known=known)
    assert not report.fits
    (sentence,) = verdict(report)
    assert "does not fit on devices" in sentence and "more than the" in sentence
    found = suggest(loaded, report, given, known=known)
    assert any("++actor_train.model_args.disable_gradient_checkpointing=false" in one.overrides for one in found)
    for one in found:
        changed = load_config(None, loaded.source, None, one.overrides, check_files=False)
        assert rehearse_recipe(changed, small_machine(room), given, known=known).fits


def test_a_recipe_that_cannot_fit_exits_with_1_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rehearse", "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu", "pretrain=Qwen/Qwen2.5-7B", "--no-suggestions"]
    assert main(words) == 1
    assert "does not fit on devices 0: in the phase update of actor_train" in capsys.readouterr().out.replace("\n", " ")


# One of each strategy and size: all of them take ten minutes of a core.
@pytest.mark.parametrize(
    "recipe",
    [
        "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu",
        "qwen2.5-0.5B-rlvr_deepspeed/rlvr_config",
        "qwen2.5-0.5B-rlvr_megatron/rlvr_config",
        "qwen2.5-7B-rlvr_fsdp2/rlvr_config",
    ],
)
def test_recipes_for_real_models_need_what_the_page_says(recipe: str) -> None:
    assert recipe_row(recipe) in PAGE.read_text(encoding="utf-8"), "python -m benchmarks.rehearsal --recipes --write"
