"""DeepSpeed's options: what each role gets, what is said, what is refused."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import load_config
from roll.config.strategies.deepspeed import ENVIRONMENT, DeepSpeedStrategyConfig, ZeroPlan, numbers, plan_zero, switch
from roll.config.strategies.registry import typed_strategy_config
from tests.config.good import changed, load, mistakes

ROOT = Path(__file__).parents[2]
CONFIG = "actor_train.strategy_args.strategy_config"
NAME = "actor_train.strategy_args.strategy_name"
PRESETS = sorted(file.stem for file in (ROOT / "configs").glob("deepspeed_*.yaml"))
CASES = sorted(file.stem for file in (ROOT / "examples/deepspeed").glob("zero*.yaml"))


def plan(environ: dict[str, str] | None = None, trains: bool = True, gpu: bool = False, **config: Any) -> ZeroPlan:
    return plan_zero(DeepSpeedStrategyConfig(**config), environ or {}, trains=trains, has_accelerator=gpu)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (3, "none", "none")),
        ({"zero_stage": 0}, (0, "none", "none")),
        ({"zero_optimization": {"stage": "2"}}, (2, "none", "none")),
        ({"zero_stage": 1, "offload": "cpu"}, (1, "none", "none")),
        ({"zero_stage": 2, "offload": "cpu"}, (2, "cpu", "none")),
        ({"zero_stage": 2, "offload": "cpu", "offload_param": True}, (2, "cpu", "none")),
        ({"zero_stage": 3, "offload": "cpu"}, (3, "cpu", "none")),
        ({"zero_stage": 3, "offload": "cpu", "offload_param": True}, (3, "cpu", "cpu")),
        ({"zero_stage": 3, "offload": "none", "offload_param": True}, (3, "none", "none")),
        ({"zero_stage": 3, "offload": "nvme", "offload_param": True}, (3, "nvme", "nvme")),
        ({"zero_stage": 2, "offload": "auto"}, (2, "none", "none")),
    ],
)
def test_training_roles(config: dict[str, Any], expected: tuple[int, str, str]) -> None:
    actual = plan(**config)
    assert (actual.stage, actual.offload_optimizer, actual.offload_param) == expected


def test_auto_offloads_where_there_is_an_accelerator() -> None:
    assert plan(gpu=True, zero_stage=2, offload="auto").offload_optimizer == "cpu"
    assert plan(gpu=True, zero_stage=1, offload="auto").notices == ()


@pytest.mark.parametrize(("stage", "expected"), [(0, (0, "none")), (1, (0, "none")), (2, (0, "none")), (3, (3, "cpu"))])
def test_forward_only_roles_shard_parameters_or_nothing(stage: int, expected: tuple[int, str]) -> None:
    actual = plan(trains=False, zero_stage=stage, offload="cpu")
    assert (actual.stage, actual.offload_param) == expected
    assert actual.offload_optimizer == "none"


def test_switches_of_published_scripts_count_where_the_key_is_not_written() -> None:
    everything = {"zero_stage": 3, "offload": "cpu"}
    assert plan({"VERL_ENABLE_PARAM_OFFLOAD": "1"}, **everything).offload_param == "cpu"
    assert plan({"VERL_ENABLE_PARAM_OFFLOAD": "1"}, **everything, offload_param=False).offload_param == "none"
    config = DeepSpeedStrategyConfig()
    assert [switch(config, name, {}) for name in ENVIRONMENT] == [False, True, False]
    assert not switch(config, "fp32_grad_accumulation", {"VERL_DS_ZERO2_FP32_ACCUM_PATCH": "0"})
    assert switch(config, "step_each_micro_batch", {"VERL_DS_ZERO2_STEP_EACH_MICRO": "1"})
    with pytest.raises(ValueError, match=r"VERL_DS_ZERO2_STEP_EACH_MICRO='maybe'.* must be 0 or 1"):
        switch(config, "step_each_micro_batch", {"VERL_DS_ZERO2_STEP_EACH_MICRO": "maybe"})


def test_numbers_become_the_ints_that_deepspeed_needs() -> None:
    written = {"a": "1e8", "b": 1e8, "c": 0.5, "d": "0.5", "e": "auto", "f": ["2", True], "g": {"h": "5e8", "i": "cpu"}}
    read = numbers(written)
    assert read == {"a": 10**8, "b": 10**8, "c": 0.5, "d": 0.5, "f": [2, True], "g": {"h": 5 * 10**8, "i": "cpu"}}
    assert type(read["a"]) is type(read["b"]) is type(read["g"]["h"]) is int and read["f"][1] is True


def test_a_wrong_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENABLE_PARAM_OFFLOAD", "yes")
    (problem,) = mistakes(tmp_path, changed({NAME: "deepspeed_train", CONFIG: {}}))
    assert "VERL_ENABLE_PARAM_OFFLOAD='yes'" in problem.rule


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"zenflow": {"topk_ratio": 0.1}}, "zenflow"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "offload_optimizer.super_offload"),
    ],
)
def test_muon_is_refused_where_deepspeed_steps_by_its_own_adamw(
    tmp_path: Path, section: dict[str, Any], key: str
) -> None:
    def found(optimizer: str) -> list[str]:
        options = {"actor_train.training_args.optimizer": optimizer, CONFIG: {"zero_optimization": section}}
        return [one.key for one in mistakes(tmp_path, changed({NAME: "deepspeed_train", **options}))]

    assert found("muon") == [f"{CONFIG}.zero_optimization.{key}"] and not found("adamw")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(tmp_path: Path, preset: str) -> None:
    """As ROLL's files use them: a fragment spliced in, and an interpolation."""
    role = "reference" if preset == "deepspeed_eval" else "actor_train"
    strategy = {"strategy_name": f"deepspeed_{'infer' if role == 'reference' else 'train'}"}
    data = changed(
        {
            "defaults": [f"../../configs/{preset}@_here_"],
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            f"{role}.strategy_args": {**strategy, "strategy_config": f"${{{preset}}}"},
        }
    )
    recipe = tmp_path / "examples/mine"
    recipe.mkdir(parents=True)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    loaded = load(recipe, data)
    options = typed_strategy_config(getattr(loaded.config, role).strategy_args)
    assert isinstance(options, DeepSpeedStrategyConfig)
    stages = {"deepspeed_zero1": 1, "deepspeed_zero2": 2}
    assert plan_zero(options, {}, trains=True, has_accelerator=False).stage == stages.get(preset, 3)
    assert ("offload_param" in options.zero_optimization) == preset.endswith("cpuoffload")
    section = numbers(options.zero_optimization)
    assert all(type(value) is not float and not str(value).startswith("1e") for value in section.values())


def test_the_six_cases_and_five_presets_are_there() -> None:
    offloads = ("cpu", "no")
    assert sorted(f"zero{stage}_{offload}_offload" for stage in (1, 2, 3) for offload in offloads) == CASES
    assert len(PRESETS) == 5


@pytest.mark.parametrize("algorithm", ["gae", "grpo"])
@pytest.mark.parametrize("case", CASES)
def test_cases_load(case: str, algorithm: str) -> None:
    file = ROOT / f"examples/deepspeed/{case}.yaml"
    loaded = load_config(None, file, overrides=[f"adv_estimator={algorithm}"], check_files=False)
    assert loaded.plan.roles["actor_train"].strategy_name == "deepspeed_train"
    assert ("critic" in loaded.plan.roles) == (algorithm == "gae")
    said = [notice.key for notice in loaded.warnings if "taken as none" in notice.text]
    roles = ["actor_train", "critic"] if algorithm == "gae" else ["actor_train"]
    expected = [f"{role}.strategy_args.strategy_config.offload" for role in roles]
    assert sorted(said) == (expected if case == "zero1_cpu_offload" else [])


def test_the_keys_are_those_of_the_installed_deepspeed() -> None:
    """Write them again as ``docs/site/deepspeed_keys.py`` says."""
    pytest.importorskip("deepspeed")
    from roll.config.strategies.deepspeed_keys import KEYS, REMOVED

    keys, removed = runpy.run_path(str(ROOT / "docs/site/deepspeed_keys.py"))["known_keys"]()
    assert {path: tuple(names) for path, names in keys.items()} == KEYS
    assert removed == REMOVED
