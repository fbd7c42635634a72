"""YAML as ROLL's users write it, and overrides as they type them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.errors import ConfigError
from roll.config.strategies.fsdp import Fsdp2StrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.methods.sft_keys import SFTConfig
from roll.pipelines.rlvr.config import RLVRConfig
from tests.config.good import GOOD, changed, load, mistakes

NATIVE = (Path(__file__).parent / "data/native.yaml").read_text(encoding="utf-8")


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "presets").mkdir()
    preset = "fsdp2_small:\n  fsdp_size: 2\n  param_dtype: bfloat16\nunused_preset:\n  a: 1\nmax_steps: 99\n"
    (tmp_path / "presets/fsdp2_small.yaml").write_text(preset)
    (tmp_path / "presets/sampling.yaml").write_text("temperature: 0.99\n")
    (tmp_path / "recipe/rlvr_config.yaml").write_text(NATIVE)
    monkeypatch.setenv("ROLL_TEST_MODEL", "owner/model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_native(*overrides: str) -> LoadedConfig[Any]:
    return load_config(None, "recipe", "rlvr_config", overrides, check_files=False)


@pytest.mark.usefixtures("native")
def test_native_file_means_what_its_author_meant() -> None:
    loaded = load_native()
    config, plan = loaded.config, loaded.plan
    assert config.pretrain == config.reward_pretrain == "owner/model"
    assert config.max_steps == 10, "the file's own value counts, not its preset's"
    assert config.reward_clip is None and config.norm_mean_type is None
    assert config.system_envs == {"RAY_PROFILING": "1"}
    assert config.actor_train.model_args.attn_implementation == "sdpa"
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert config.actor_infer.generating_args.temperature == 0.99
    assert config.actor_infer.generating_args.max_new_tokens == 128
    assert config.actor_infer.device_mapping == [0, 1]
    options = typed_strategy_config(config.actor_train.strategy_args)
    assert isinstance(options, Fsdp2StrategyConfig)
    assert (options.fsdp_size, options.param_dtype) == (2, "bf16")
    assert plan.roles["rewards.math_rule"].worker_cls == "math_rule"
    assert plan.roles["rewards.math_rule"].world_size == 8
    assert "hydra" not in loaded.resolved and loaded.resolved["defaults"] == "roll"


@pytest.mark.usefixtures("native")
def test_keys_without_effect_are_told() -> None:
    told = {notice.key for notice in load_native().warnings}
    assert {
        "postive_loss_coef",
        "actor_train.data_args.dataset_dir",
        "actor_train.data_args.interleave_probs",
        "actor_infer.strategy_args.strategy_config.block_size",
        "reference",
    } <= told


def test_names_for_interpolations_need_no_interpolation_that_is_left(native: Path) -> None:
    """An override may replace the only place that refers to a name, and a name made of another may serve nobody."""
    names = "default_length: 128\ndefault_history_length: ${default_length}\n"
    file = native / "recipe/rlvr_config.yaml"
    file.write_text(names + NATIVE.replace("response_length: 128", "response_length: ${default_length}"))
    assert load_native("response_length=64").config.response_length == 64
    file.write_text("rollout_batch_sizee: ${max_steps}\n" + NATIVE)
    with pytest.raises(ConfigError, match="the nearest known one is rollout_batch_size"):
        load_native()
    file.write_text("default_history_length: 5\n" + NATIVE)
    with pytest.raises(ConfigError, match="default_history_length"):
        load_native()


def test_a_mistake_in_a_preset_is_found_there(native: Path) -> None:
    (native / "presets/fsdp2_small.yaml").write_text("fsdp2_small:\n  fsdp_sizes: 2\n")
    with pytest.raises(ConfigError, match=r"fsdp_sizes.*the nearest known one is fsdp_size"):
        load_native()
    (native / "presets/fsdp2_small.yaml").write_text("fsdp2_small: {}\n\nrollout_batch_sizee: 3\n")
    with pytest.raises(ConfigError, match=r"presets/fsdp2_small\.yaml:3: rollout_batch_sizee"):
        load_native()


def test_folder_relative_to_examples(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "examples").mkdir()
    (native / "recipe").rename(native / "examples/recipe")
    (native / "presets").rename(native / "examples/presets")
    assert load_native().plan.exp_name == "native"
    assert load_config(None, "recipe/rlvr_config.yaml", check_files=False).plan.exp_name == "native"
    monkeypatch.chdir(native / "examples/recipe")
    assert load_config(None, ".", "rlvr_config.yaml", check_files=False).plan.exp_name == "native"


def test_wrong_overrides(tmp_path: Path) -> None:
    rules = {
        problem.key: str(problem) for problem in mistakes(tmp_path, GOOD, "justaword", "max_steps=1,2", "max_stps=1")
    }
    assert "must be key=value" in rules["(command line)"]
    assert "must be one value; write a list in brackets" in rules["max_steps"]
    assert "the nearest known one is max_steps" in rules["max_stps"]


def test_numbers_without_a_dot(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    load(tmp_path, GOOD)
    text = (tmp_path / "config.yaml").read_text().replace("learning_rate: 1.0e-06", "learning_rate: 1e-6")
    assert "learning_rate: 1e-6" in text
    file.write_text(text + "error_max_len_threshold: 1e8\nkl_horizon: '1e4'\n")
    config = load_config(None, file, check_files=False).config
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert config.error_max_len_threshold == 100_000_000 and isinstance(config.error_max_len_threshold, int)
    assert config.kl_horizon == 10_000


@pytest.mark.parametrize("pipeline", [None, "rlvr", "sft"])
def test_pipeline_of_another_launcher(tmp_path: Path, pipeline: str | None) -> None:
    file = tmp_path / "config.yaml"
    load(tmp_path, GOOD if pipeline is None else changed({"pipeline": "rlvr"}))
    if pipeline == "sft":
        with pytest.raises(ConfigError, match="this launcher runs sft"):
            load_config(SFTConfig, file)
    else:
        assert isinstance(load_config(RLVRConfig, file, check_files=False).config, RLVRConfig)


def test_a_file_of_no_pipeline(tmp_path: Path) -> None:
    assert "cannot be told" in str(mistakes(tmp_path, {"exp_name": "x"})[0])
