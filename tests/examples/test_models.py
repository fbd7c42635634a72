"""Recipes for real models: each plans as its table in examples/README.md says, and nothing in it is without effect."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.config.reading.compose import parse_launcher_args

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NODE = range(8)
FOUR, TWO = (range(16), range(16, 32)), (range(8), range(8, 16))
PACKED = "balanced micro-batches of at most 16,384 tokens, without padding"
PLANS = {
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config": (
        "fsdp2",
        NODE,
        NODE,
        "2 optimizer steps of 512; 8 ranks x 4 micro-batches of 16",
    ),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu": (
        "fsdp2",
        [0],
        [0],
        "2 optimizer steps of 64; 1 rank x 8 micro-batches of 8",
    ),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_2gpus": (
        "fsdp2",
        [0],
        [1],
        "2 optimizer steps of 128; 1 rank x 8 micro-batches of 16",
    ),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_sglang": (
        "fsdp2",
        NODE,
        NODE,
        "2 optimizer steps of 512; 8 ranks x 4 micro-batches of 16",
    ),
    "qwen2.5-0.5B-rlvr_deepspeed/rlvr_config": (
        "deepspeed",
        NODE,
        NODE,
        "2 optimizer steps of 512; 8 ranks x 4 micro-batches of 16",
    ),
    "qwen2.5-0.5B-rlvr_megatron/rlvr_config": (
        "megatron",
        NODE,
        NODE,
        "2 optimizer steps of 512; 4 ranks x 8 micro-batches of 16",
    ),
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config": (
        "fsdp2",
        NODE,
        NODE,
        "2 optimizer steps of 512; 8 ranks x 64 rows in " + PACKED,
    ),
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config_2nodes": (
        "fsdp2",
        *TWO,
        "4 optimizer steps of 512; 8 ranks x 64 rows in " + PACKED,
    ),
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config": (
        "deepspeed",
        NODE,
        NODE,
        "2 optimizer steps of 512; 8 ranks x 64 rows in " + PACKED,
    ),
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config_2nodes": (
        "deepspeed",
        *TWO,
        "4 optimizer steps of 512; 8 ranks x 64 rows in " + PACKED,
    ),
    "qwen2.5-7B-rlvr_megatron/rlvr_config": (
        "megatron",
        NODE,
        NODE,
        "2 optimizer steps of 512; 2 ranks x 256 rows in balanced "
        "micro-batches of at most 16,384 tokens, without padding",
    ),
    "qwen2.5-7B-rlvr_megatron/rlvr_config_4nodes": (
        "megatron",
        *FOUR,
        "4 optimizer steps of 1024; 2 ranks x 512 rows in balanced "
        "micro-batches of at most 16,384 tokens, without padding",
    ),
    "qwen3-8B-rlvr_fsdp2/rlvr_config": (
        "fsdp2",
        NODE,
        NODE,
        "2 optimizer steps of 256; 8 ranks x 32 rows in " + PACKED,
    ),
    "qwen3-8B-rlvr_fsdp2/rlvr_config_lora": (
        "fsdp2",
        NODE,
        NODE,
        "2 optimizer steps of 256; 8 ranks x 32 rows in " + PACKED,
    ),
    "qwen3-8B-rlvr_fsdp2/rlvr_config_4nodes": (
        "fsdp2",
        *FOUR,
        "4 optimizer steps of 512; 16 ranks x 32 rows in " + PACKED,
    ),
}
"""Backend, devices that learn, devices that generate, and the batch."""
FOLDERS = sorted(folder.name for folder in EXAMPLES.glob("qwen*-rlvr_*"))


def test_every_recipe_is_here_and_in_the_table() -> None:
    files = {str(file.relative_to(EXAMPLES).with_suffix("")) for file in EXAMPLES.glob("qwen*-rlvr_*/*.yaml")}
    assert files == set(PLANS)
    rows = re.findall(r"^\| ([\w.-]*) ?\| `(rlvr_config\w*)` \|", (EXAMPLES / "README.md").read_text("utf-8"), re.M)
    folder, listed = "", set()
    for name, config in rows:
        folder = name or folder
        listed.add(f"{folder}/{config}")
    assert listed == files


@pytest.mark.parametrize("name", PLANS)
def test_recipe_plans_as_written(name: str) -> None:
    backend, learning, generating, batch = PLANS[name]
    loaded = load_config(None, EXAMPLES / f"{name}.yaml", check_files=False)
    plan = loaded.plan
    assert [str(warning) for warning in loaded.warnings] == []
    assert plan.training["actor_train"].sentence() == batch
    assert plan.roles["actor_train"].strategy_name == f"{backend}_train"
    # The actor without its adapters is the reference of a LoRA run.
    reference = plan.roles["actor_train"] if name.endswith("_lora") else plan.roles["reference"]
    assert reference.strategy_name == f"{backend}_{'train' if name.endswith('_lora') else 'infer'}"
    assert plan.roles["actor_infer"].strategy_name == ("sglang" if name.endswith("_sglang") else "vllm")
    assert plan.roles["actor_train"].device_mapping == reference.device_mapping == tuple(learning)
    assert plan.roles["actor_infer"].device_mapping == tuple(generating)
    together = "actor_infer" in plan.roles["actor_train"].colocated_with
    assert together == (list(learning) == list(generating))
    assert plan.num_nodes == (max(*learning, *generating) // 8) + 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_script_runs_the_recipe_of_its_folder(folder: str, recorder: Path) -> None:
    for words, config in (
        (["max_steps=3"], "rlvr_config"),
        (["rlvr_config_2nodes", "max_steps=3"], "rlvr_config_2nodes"),
    ):
        done = subprocess.run(
            [EXAMPLES / folder / "run.sh", *words],
            env={**os.environ, "PYTHON": str(recorder)},
            capture_output=True,
            text=True,
            check=True,
        )
        launcher, *arguments = done.stdout.splitlines()
        found = parse_launcher_args(arguments, "tiny", "rlvr_config")
        assert launcher == "examples/start_rlvr_pipeline.py"
        assert (found.config_path, found.config_name, found.overrides) == (folder, config, ("max_steps=3",))


GIVEN = {
    "qwen2.5-7B-preferences/dpo_config": ("actor_train", "128; 8 ranks x 16", {"actor_train": NODE, "reference": NODE}),
    "qwen2.5-7B-preferences/rm_config": ("reward_train", "128; 8 ranks x 16", {"reward_train": NODE}),
    "qwen3-8B-distill/distill_config": (
        "student",
        "128; 4 ranks x 32",
        {"student": range(4), "teacher": range(4, 8)},
    ),
    "qwen3-8B-distill/opd_config": (
        "actor_train",
        "256; 8 ranks x 32",
        {"actor_train": NODE, "actor_infer": NODE, "teacher": NODE},
    ),
}
"""Of preferences and distillation: who learns, the batch, and where every role that holds a model is."""


@pytest.mark.parametrize("name", GIVEN)
def test_recipe_of_preferences_or_distillation_plans_as_written(name: str) -> None:
    learner, batch, places = GIVEN[name]
    loaded = load_config(None, EXAMPLES / f"{name}.yaml", check_files=False)
    plan = loaded.plan
    assert [str(warning) for warning in loaded.warnings] == []
    assert plan.training[learner].sentence() == f"1 optimizer step of {batch} rows in {PACKED}"
    models = {role: one.device_mapping for role, one in plan.roles.items() if one.device_mapping}
    assert models == {role: tuple(devices) for role, devices in places.items()}
    folder, _, config = name.partition("/")
    assert f"| {folder} | `{config}` |" in (EXAMPLES / "README.md").read_text("utf-8")
