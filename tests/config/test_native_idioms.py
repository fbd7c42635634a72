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

NATIVE = """
hydra:
  run:
    dir: .
  output_subdir: null

defaults:
  - ../presets/fsdp2_small@_here_
  - ../presets/sampling@sampling

exp_name: "native"
pretrain: ${oc.env:ROLL_TEST_MODEL}
reward_pretrain: ${pretrain}
num_gpus_per_node: 8
max_steps: 10
rollout_batch_size: 64
num_return_sequences_in_group: 4
prompt_length: 128
response_length: 128
adv_estimator: "grpo"
reward_clip: ~
norm_mean_type: None
postive_loss_coef: 1.0
system_envs:
  RAY_PROFILING: 1
tag_to_template:
  math: qwen2_5

actor_train:
  model_args:
    flash_attn: sdpa
    dtype: bf16
    model_type: ~
  training_args:
    learning_rate: 1e-6
    weight_decay: 0
    per_device_train_batch_size: 8
    gradient_accumulation_steps: 8
  data_args:
    template: native
    file_name:
      - data/math.jsonl
    dataset_dir: data
    messages: messages
    interleave_probs: "1.0"
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: ${fsdp2_small}
  device_mapping: list(range(0,2))
  infer_batch_size: 4

actor_infer:
  generating_args:
    max_new_tokens: ${response_length}
    temperature: ${sampling.temperature}
    top_p: 1
    top_k: -1
    num_return_sequences: ${num_return_sequences_in_group}
  strategy_args:
    strategy_name: hf_infer
    strategy_config:
      gpu_memory_utilization: 0.8
      block_size: 16
  device_mapping: "[0] + list(range(1,2))"

reference:
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config: ~
  device_mapping: "[0, 1]"

rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    model_args:
      model_name_or_path: ${reward_pretrain}
    tag_included: [math]
    world_size: 8
"""


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


OVERRIDES: list[tuple[str, str, Any]] = [
    ("max_steps=7", "max_steps", 7),
    ("max_steps=1e2", "max_steps", 100),
    ("+max_steps=7", "max_steps", 7),
    ("++max_steps=7", "max_steps", 7),
    ("save_steps=3", "save_steps", 3),
    ("+critic_warmup=2", "critic_warmup", 2),
    ("seed='5'", "seed", 5),
    ("exp_name=tiny-run_2", "exp_name", "tiny-run_2"),
    ("exp_name=7", "exp_name", "7"),
    ('adv_estimator="reinforce++"', "estimator.name", "reinforce++"),
    ("adv_estimator=reinforce++", "estimator.name", "reinforce++"),
    ("use_pg_clip_range=true", "loss.options.clip_low", 0.2),
    ("whiten_advantages=False", "whiten_advantages", False),
    ("resume_from_checkpoint='true'", "resume_from_checkpoint", True),
    ("resume_from_checkpoint=output/x/checkpoint-3", "resume_from_checkpoint", "output/x/checkpoint-3"),
    ("value_clip=null", "value_clip", None),
    ("value_clip=~", "value_clip", None),
    ("value_clip=.5", "value_clip", 0.5),
    ("track_with=[stdout,jsonl]", "track_with", ["stdout", "jsonl"]),
    ("actor_train.training_args.learning_rate=3e-6", "actor_train.training_args.learning_rate", 3e-6),
    ("actor_train.training_args.min_lr_ratio=0.1", "actor_train.training_args.min_lr_ratio", 0.1),
    (
        "actor_train.data_args.file_name=['a.parquet','b.json']",
        "actor_train.data_args.file_name",
        ["a.parquet", "b.json"],
    ),
    ("actor_infer.device_mapping=[1,0]", "actor_infer.device_mapping", [1, 0]),
    ("actor_infer.device_mapping=list(range(0,4,2))", "actor_infer.device_mapping", [0, 2]),
    ("actor_infer.device_mapping='[3] + [1]'", "actor_infer.device_mapping", [3, 1]),
    ("actor_infer.device_mapping=[3]+list(range(2))", "actor_infer.device_mapping", [3, 0, 1]),
    ("pretrain=/models/some model (v2), final", "pretrain", "/models/some model (v2), final"),
    (r"pretrain=models\d (v2", "pretrain", r"models\d (v2"),
    ("+system_envs.NCCL_DEBUG=INFO", "system_envs", {"NCCL_DEBUG": "INFO"}),
    ("exp_name=run_${seed}", "exp_name", "run_42"),
]


@pytest.mark.parametrize(("override", "key", "value"), OVERRIDES)
def test_override(tmp_path: Path, override: str, key: str, value: Any) -> None:
    node: Any = load(tmp_path, changed({"seed": 42}), override).config
    for name in key.split("."):
        node = getattr(node, name)
    assert node == value and type(node) is type(value)


def test_override_takes_a_section_out(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "~reference").config.reference is None
    assert load(tmp_path, GOOD, "reference=null").config.reference is None
    assert load(tmp_path, GOOD, "~validation").plan.eval_steps == 0


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


def test_published_worker_classes(tmp_path: Path) -> None:
    changes = {
        "actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
        "actor_train.pg_variant": "topr",
        "rewards.choice.worker_cls": "my_package.rewards.score",
    }
    loaded = load(tmp_path, changed(changes))
    assert loaded.plan.roles["actor_train"].worker_cls is None
    assert loaded.config.loss.name == "topr"
    assert loaded.plan.roles["rewards.choice"].worker_cls == "my_package.rewards.score"


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
