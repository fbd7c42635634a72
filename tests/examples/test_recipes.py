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
import torch
import yaml
from jsonschema import Draft202012Validator
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks import recipe_costs
from roll import cli
from roll.config.loader import load_config
from roll.config.pipelines import NAMES, definition_of
from roll.config.plan.render import render_plan
from roll.config.reference import json_schema
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


def test_gsm8k_on_fewer_gpus_is_the_same_training(capsys: pytest.CaptureFixture[str]) -> None:
    """The header of the recipe promises it."""
    fewer = ["num_gpus_per_node=4", "actor_train.training_args.gradient_accumulation_steps=16"]
    assert cli.main(["check", "examples/gsm8k/rlvr_config.yaml", "--skip-files", *fewer]) == 0
    assert "2 optimizer steps of 512; 4 ranks x 16 micro-batches of 8" in capsys.readouterr().out


def test_the_table_of_costs_is_the_one_that_the_script_prints() -> None:
    """Write it again with ``python -m benchmarks.recipe_costs --write``."""
    text = recipe_costs.PAGE.read_text(encoding="utf-8")
    written = text.partition(recipe_costs.BEGIN)[2].partition(recipe_costs.END)[0].strip()
    assert written == recipe_costs.table()
    assert len(written.splitlines()) == 2 + len(recipe_costs.recipes())


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-8B", 8_190_735_360),
    ],
)
def test_the_shapes_behind_the_costs_have_as_many_parameters_as_the_models(model: str, parameters: int) -> None:
    """Those of the published models, which transformers builds from the same numbers."""
    shape = recipe_costs.SHAPES[model]
    qwen3 = model == "Qwen/Qwen3-8B"
    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if qwen3 else (Qwen2Config, Qwen2ForCausalLM)
    config = config_class(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        built = model_class(config)
    assert shape.parameters == sum(parameter.numel() for parameter in built.parameters()) == parameters


def test_the_costs_of_a_trainer_by_hand() -> None:
    """7.6 billion parameters on eight devices: 16 bytes each under FSDP2; 2 x 2 parts, twice, under Megatron."""
    fsdp2, zero2, megatron = (
        recipe_costs.costs(loaded(EXAMPLES / f"qwen2.5-7B-rlvr_{name}.yaml"))
        for name in ("fsdp2/rlvr_config", "deepspeed/rlvr_config_2nodes", "megatron/rlvr_config")
    )
    size = 7_615_616_512
    assert fsdp2.trainer == 16 * size / 8
    assert (zero2.trainer, zero2.host) == (2 * size, 16 * size / 8)
    assert megatron.trainer == 6 * size / 4 + 12 * size / 8
    assert fsdp2.engine == 2 * size and fsdp2.reference == 2 * size / 8
    # 1,024 samples of 200 + 1,536 tokens, four forward passes' worth each; attention over half of the sequence.
    work = 1024 * 1736 * 4 * (2 * (size - 152_064 * 3584) + 2 * 28 * 3584 * 1736)
    assert fsdp2.training == pytest.approx(work / (0.4 * 989e12 * 8))
