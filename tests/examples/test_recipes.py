"""Every recipe under ``examples/`` and every preset under ``configs/`` loads and plans; every script is sound shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import reduce
from io import StringIO
from operator import getitem
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from rich.console import Console

from roll.config.json_schema import json_schema
from roll.config.loader import load_config
from roll.config.pipelines import NAMES, definition_of
from roll.config.plan.render import render_plan
from roll.preflight import check_parts
from tests.support.recipes import EXAMPLES, ROOT, loaded

RECIPES = sorted(
    file
    for file in EXAMPLES.rglob("*.yaml")
    # Made by runs; manifests of schedulers.
    if not {"artifacts", "cluster"} & set(file.parts)
)
COPIED = ("tiny", "tiny_agentic", "gsm8k")
"""Folders of recipes that are copied: what stands in them should do something."""
PRESETS = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_recipe_loads_and_plans_into_a_folder_of_its_own() -> None:
    """A checkpoint is for the backend that wrote it, and for one task."""
    assert {EXAMPLES / "tiny/rlvr_config.yaml", EXAMPLES / "gsm8k/rlvr_config.yaml"} <= set(RECIPES)
    mistakes, folders = [], dict[Path, Path]()
    for recipe in RECIPES:
        found = loaded(recipe)
        check_parts(found)
        out = StringIO()
        render_plan(found, Console(file=out, width=200, emoji=False))
        if str(recipe) not in out.getvalue() or (found.plan.training and "batch" not in out.getvalue()):
            mistakes.append(f"{recipe}: {out.getvalue()}")
        if recipe.parent.name in COPIED:
            mistakes += [f"{recipe}: {warning}" for warning in found.warnings]
        if (other := folders.setdefault(found.plan.checkpoint_dir, recipe)) != recipe:
            mistakes.append(f"{recipe} and {other} both write to {found.plan.checkpoint_dir}")
    assert mistakes == []


@pytest.mark.long
def test_every_recipe_is_valid_under_the_schema() -> None:
    mistakes = []
    for name in NAMES:
        schema = json_schema(definition_of(name).config_class, name)
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        for recipe in RECIPES:
            if loaded(recipe).plan.pipeline == name:
                found = validator.iter_errors(yaml.safe_load(recipe.read_text(encoding="utf-8")))
                mistakes += [f"{recipe.name}: {error.json_path}: {error.message[:200]}" for error in found]
    assert mistakes == []


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_loads_into_a_recipe_as_its_comment_says(preset: str, tmp_path: Path) -> None:
    comment = (ROOT / "configs" / f"{preset}.yaml").read_text(encoding="utf-8")
    defaults, key = re.findall(r"In a recipe:  (defaults: .*?)\s+(?:# +)?and  (\w+): \$\{", comment)[0]
    section = {"generating_args": "actor_infer", "strategy_config": "actor_train.strategy_args"}[key]
    recipe = tmp_path / "examples/mine/rlvr_config.yaml"
    recipe.parent.mkdir(parents=True)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    recipe.write_text(f"{defaults}\n" + (EXAMPLES / "tiny/rlvr_config.yaml").read_text(encoding="utf-8"))
    found = load_config(None, recipe, overrides=[f"{section}.{key}=${{{preset}}}"], check_files=False)
    role, *rest = f"{section}.{key}".split(".")
    assert reduce(getitem, rest, found.resolved[role]) == found.resolved[preset]


def test_scripts_are_sound() -> None:
    for script in EXAMPLES.rglob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        assert script.stat().st_mode & 0o111, f"{script} is not executable"
