"""Recipes for real models: each plans as its table in examples/README.md says, and nothing in it is without effect."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roll.config.reading.compose import parse_launcher_args
from tests.support.recipes import EXAMPLES, loaded

NODE = range(8)
FOUR, TWO = (range(16), range(16, 32)), (range(8), range(8, 16))
PACKED = "rows in balanced micro-batches of at most 16,384 tokens, without padding"
SMALL = "2 optimizer steps of 512; 8 ranks x 4 micro-batches of 16"
RLVR: dict[str, tuple[Any, Any, str]] = {
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config": (NODE, NODE, SMALL),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu": ([0], [0], "2 optimizer steps of 64; 1 rank x 8 micro-batches of 8"),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_2gpus": ([0], [1], "2 optimizer steps of 128; 1 rank x 8 micro-batches of 16"),
    "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_sglang": (NODE, NODE, SMALL),
    "qwen2.5-0.5B-rlvr_deepspeed/rlvr_config": (NODE, NODE, SMALL),
    "qwen2.5-0.5B-rlvr_megatron/rlvr_config": (NODE, NODE, SMALL.replace("8 ranks x 4", "4 ranks x 8")),
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config": (NODE, NODE, f"2 optimizer steps of 512; 8 ranks x 64 {PACKED}"),
    "qwen2.5-7B-rlvr_fsdp2/rlvr_config_2nodes": (*TWO, f"4 optimizer steps of 512; 8 ranks x 64 {PACKED}"),
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config": (NODE, NODE, f"2 optimizer steps of 512; 8 ranks x 64 {PACKED}"),
    "qwen2.5-7B-rlvr_deepspeed/rlvr_config_2nodes": (*TWO, f"4 optimizer steps of 512; 8 ranks x 64 {PACKED}"),
    "qwen2.5-7B-rlvr_megatron/rlvr_config": (NODE, NODE, f"2 optimizer steps of 512; 2 ranks x 256 {PACKED}"),
    "qwen2.5-7B-rlvr_megatron/rlvr_config_4nodes": (*FOUR, f"4 optimizer steps of 1024; 2 ranks x 512 {PACKED}"),
    "qwen3-8B-rlvr_fsdp2/rlvr_config": (NODE, NODE, f"2 optimizer steps of 256; 8 ranks x 32 {PACKED}"),
    "qwen3-8B-rlvr_fsdp2/rlvr_config_lora": (NODE, NODE, f"2 optimizer steps of 256; 8 ranks x 32 {PACKED}"),
    "qwen3-8B-rlvr_fsdp2/rlvr_config_4nodes": (*FOUR, f"4 optimizer steps of 512; 16 ranks x 32 {PACKED}"),
}
"""Devices that learn, devices that generate, and the batch."""
GIVEN = {
    "qwen2.5-7B-preferences/dpo_config": ("actor_train", "128; 8 ranks x 16", {"actor_train": NODE, "reference": NODE}),
    "qwen2.5-7B-preferences/rm_config": ("reward_train", "128; 8 ranks x 16", {"reward_train": NODE}),
    "qwen3-8B-distill/distill_config": (
        *("student", "128; 4 ranks x 32"),
        {"student": range(4), "teacher": range(4, 8)},
    ),
    "qwen3-8B-distill/opd_config": (
        *("actor_train", "256; 8 ranks x 32"),
        {"actor_train": NODE, "actor_infer": NODE, "teacher": NODE},
    ),
}
"""Of preferences and distillation: who learns, the batch, and where every role that holds a model is."""


def test_every_recipe_is_here_and_in_the_table() -> None:
    files = {str(file.relative_to(EXAMPLES).with_suffix("")) for file in EXAMPLES.glob("qwen*-rlvr_*/*.yaml")}
    assert files == set(RLVR)
    page = (EXAMPLES / "README.md").read_text("utf-8")
    folder, listed = "", set()
    for name, config in re.findall(r"^\| ([\w.-]*) ?\| `(rlvr_config\w*)` \|", page, re.M):
        folder = name or folder
        listed.add(f"{folder}/{config}")
    assert listed == files
    assert all("| {} | `{}` |".format(*name.split("/")) in page for name in GIVEN)


@pytest.mark.parametrize("name", RLVR)
def test_recipe_plans_as_written(name: str) -> None:
    learning, generating, batch = RLVR[name]
    backend = name.partition("/")[0].rpartition("_")[2]
    found = loaded(EXAMPLES / f"{name}.yaml")
    plan, roles = found.plan, found.plan.roles
    assert [str(warning) for warning in found.warnings] == []
    assert plan.training["actor_train"].sentence() == batch
    assert roles["actor_train"].strategy_name == f"{backend}_train"
    # The actor without its adapters is the reference of a LoRA run.
    reference = roles["actor_train"] if name.endswith("_lora") else roles["reference"]
    assert reference.strategy_name == f"{backend}_{'train' if name.endswith('_lora') else 'infer'}"
    assert roles["actor_infer"].strategy_name == ("sglang" if name.endswith("_sglang") else "vllm")
    assert roles["actor_train"].device_mapping == reference.device_mapping == tuple(learning)
    assert roles["actor_infer"].device_mapping == tuple(generating)
    together = "actor_infer" in roles["actor_train"].colocated_with
    assert together == (list(learning) == list(generating))
    assert plan.num_nodes == (max(*learning, *generating) // 8) + 1


@pytest.mark.parametrize("name", GIVEN)
def test_recipe_of_preferences_or_distillation_plans_as_written(name: str) -> None:
    learner, batch, places = GIVEN[name]
    found = loaded(EXAMPLES / f"{name}.yaml")
    assert [str(warning) for warning in found.warnings] == []
    assert found.plan.training[learner].sentence() == f"1 optimizer step of {batch} {PACKED}"
    models = {role: one.device_mapping for role, one in found.plan.roles.items() if one.device_mapping}
    assert models == {role: tuple(devices) for role, devices in places.items()}


def test_scripts_run_the_recipes_of_their_folders(recorder: Path) -> None:
    folders = sorted(EXAMPLES.glob("qwen*-rlvr_*"))
    assert len(folders) > 5
    for folder in folders:
        for words in (["max_steps=3"], ["rlvr_config_2nodes", "max_steps=3"]):
            environment = {**os.environ, "PYTHON": str(recorder)}
            done = subprocess.run(
                [folder / "run.sh", *words], env=environment, capture_output=True, text=True, check=True
            )
            launcher, *arguments = done.stdout.splitlines()
            found = parse_launcher_args(arguments, "tiny", "rlvr_config")
            assert launcher == "examples/start_rlvr_pipeline.py"
            assert (found.config_path, found.overrides) == (folder.name, ["max_steps=3"])
            assert found.config_name == ("rlvr_config" if len(words) == 1 else words[0])
