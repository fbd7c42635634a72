"""Every recipe under ``examples/`` and every preset under ``configs/`` loads and plans; every script is sound shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from roll import cli
from roll.config.loader import load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    file.relative_to(ROOT) for file in (ROOT / "examples").rglob("*.yaml") if "artifacts" not in file.parts
)
PRESETS = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
SCRIPTS = sorted(file.relative_to(ROOT) for file in (ROOT / "examples").rglob("*.sh"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_recipes_are_found() -> None:
    names = [str(recipe) for recipe in RECIPES]
    assert "examples/tiny/rlvr_config.yaml" in names
    assert "examples/gsm8k/rlvr_config.yaml" in names


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_loads_and_plans(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(recipe), "--skip-files"]) == 0
    plan = capsys.readouterr().out
    assert "batch" in plan
    assert str(recipe) in plan


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.parent.name in ("tiny", "gsm8k")], ids=str)
def test_recipe_sets_nothing_that_has_no_effect(recipe: Path) -> None:
    """These are the ones that are copied: what stands in them should do something."""
    loaded = load_config(None, recipe, check_files=False)
    assert [str(warning) for warning in loaded.warnings] == []


def test_recipes_that_resume_share_no_folder() -> None:
    """A checkpoint is for the backend that wrote it, and for one task."""
    plans = {recipe: load_config(None, recipe, check_files=False).plan for recipe in RECIPES}
    folders: dict[Path, Path] = {}
    for recipe, plan in plans.items():
        other = folders.setdefault(plan.checkpoint_dir, recipe)
        assert other == recipe, f"{recipe} and {other} both write to {plan.checkpoint_dir}"


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_loads_into_a_recipe_as_its_comment_says(preset: str, tmp_path: Path) -> None:
    comment = (ROOT / "configs" / f"{preset}.yaml").read_text(encoding="utf-8")
    defaults, key = re.findall(r"In a recipe:  (defaults: .*?)\s+(?:# +)?and  (\w+): \$\{", comment)[0]
    section = {"generating_args": "actor_infer", "strategy_config": "actor_train.strategy_args"}[key]
    recipe = tmp_path / "examples/mine/rlvr_config.yaml"
    recipe.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    recipe.write_text(f"{defaults}\n" + (ROOT / "examples/tiny/rlvr_config.yaml").read_text(encoding="utf-8"))
    loaded = load_config(None, recipe, overrides=[f"{section}.{key}=${{{preset}}}"], check_files=False)
    role, *rest = f"{section}.{key}".split(".")
    used = reduce(getitem, rest, loaded.resolved[role])
    assert used == loaded.resolved[preset]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_script_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.stat().st_mode & 0o111, f"{script} is not executable"


def test_gsm8k_on_fewer_gpus_is_the_same_training(capsys: pytest.CaptureFixture[str]) -> None:
    """The header of the recipe promises it."""
    file = "examples/gsm8k/rlvr_config.yaml"
    fewer = ["num_gpus_per_node=4", "actor_train.training_args.gradient_accumulation_steps=16"]
    assert cli.main(["check", file, "--skip-files", *fewer]) == 0
    assert "2 optimizer steps of 512; 4 ranks x 16 micro-batches of 8" in capsys.readouterr().out
