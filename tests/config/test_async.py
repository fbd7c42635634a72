"""Requirements of asynchronous rollout on a configuration, and its consequences."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roll.config.plan.render import render_plan
from roll.pipelines.rlvr.plan import RLVRPlan
from tests.config.good import changed, load

APART = {"async_generation_ratio": 1.5, "actor_infer.device_mapping": [2, 3], "num_gpus_per_node": 4}
ON_POLICY = {"actor_train.training_args.gradient_accumulation_steps": 16}


def test_engines_of_other_devices_need_not_take_turns(tmp_path: Path) -> None:
    apart, shared = load(tmp_path, changed(APART)).plan, load(tmp_path, changed({"async_generation_ratio": 0.5})).plan
    assert isinstance(apart, RLVRPlan) and isinstance(shared, RLVRPlan)
    assert apart.is_async and not apart.engines_take_turns
    assert shared.is_async and shared.engines_take_turns


CORRECTED = {"train_infer_correction": "decoupled"}
CASES: list[tuple[dict[str, Any], bool, bool, str]] = [
    ({}, False, True, ""),
    ({"ppo_epochs": 2}, False, True, ""),
    (CORRECTED, False, False, ""),
    (CORRECTED | {"ppo_epochs": 2}, True, False, ""),
    ({"enable_old_logprobs_recompute": True}, True, False, "nothing corrects for"),
    ({"top_entropy_quantile": 0.2}, True, False, "nothing corrects for"),
    ({"force_disable_old_logprobs_recompute": True}, False, True, ""),
    (CORRECTED | {"force_disable_old_logprobs_recompute": True}, False, False, ""),
]


@pytest.mark.parametrize(("changes", "computed", "engines", "note"), CASES)
def test_whose_log_probs_are_the_old_ones(
    tmp_path: Path, changes: dict[str, Any], computed: bool, engines: bool, note: str
) -> None:
    loaded = load(tmp_path, changed(APART | ON_POLICY | changes))
    assert isinstance(loaded.plan, RLVRPlan)
    assert (loaded.plan.needs_old_log_probs, loaded.plan.engine_log_probs_as_old) == (computed, engines)
    notes = [str(one) for one in loaded.warnings if one.key == "async_generation_ratio"]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


def test_the_plan_says_how_far_ahead(tmp_path: Path) -> None:
    console = Console(width=200, file=io.StringIO())
    additional = {"is_use_additional_prompts": True, "max_additional_running_prompts": 5}
    render_plan(load(tmp_path, changed(APART | additional)), console)
    sentence = (
        "generation up to 1.5 steps: 165 prompts in flight or waiting at a time; samples at most 2 versions of the "
        "weights old; ratios against the engine's log-probs"
    )
    assert sentence in console.file.getvalue()


def test_validation_is_concurrent_where_devices_are_its_own(tmp_path: Path) -> None:
    expected = {None: True, False: False, True: True}
    for written, concurrent in expected.items():
        plan = load(tmp_path, changed(APART | {"validation.concurrent": written})).plan
        assert isinstance(plan, RLVRPlan) and plan.validates_concurrently is concurrent
    older = load(tmp_path, changed(APART | {"validation.beside_training": False})).plan
    assert isinstance(older, RLVRPlan) and not older.validates_concurrently, "the name that it had before"
    shared = load(tmp_path, changed({})).plan
    assert isinstance(shared, RLVRPlan) and not shared.validates_concurrently


def test_a_harness_has_the_engines_to_itself(tmp_path: Path) -> None:
    harness, synchronous = {"validation.harness": {"tasks": ["x"]}}, APART | {"async_generation_ratio": 0}
    assert load(tmp_path, changed(synchronous)).plan.validates_concurrently
    assert not load(tmp_path, changed(synchronous | harness)).plan.validates_concurrently
