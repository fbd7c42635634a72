"""Whose defaults a policy's file has: those of GRPO, or ROLL's in ROLL's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import roll
from roll.config.loader import LoadedConfig, load_config
from roll.config.plan.render import default_facts, effective_yaml
from roll.config.reading.errors import ConfigError

SMALLEST = """\
pretrain: owner/model
rollout_batch_size: 6
prompt_length: 16
response_length: 16
actor_train:
  data_args: {file_name: train.jsonl}
  strategy_args: {strategy_name: fsdp2_train}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
rewards: {math: {worker_cls: math_rule}}
"""
ROLLS = """
adv_estimator: grpo
actor_train: {device_mapping: [0], training_args: {per_device_train_batch_size: 6}}
actor_infer: {device_mapping: [0]}
"""


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLATFORM", "cpu")


def read(folder: Path, text: str, *overrides: str) -> LoadedConfig[Any]:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(None, file, None, overrides, check_files=False)


def whole(text: str, more: str) -> str:
    """``text`` with the sections of ``more`` merged into its own."""
    merged = yaml.safe_load(text)
    for key, value in yaml.safe_load(more).items():
        merged[key] = merged[key] | value if isinstance(value, dict) and key in merged else value
    return yaml.safe_dump(merged, sort_keys=False)


def test_the_smallest_file_is_grpo(tmp_path: Path) -> None:
    loaded = read(tmp_path, SMALLEST)
    config, training = loaded.config, loaded.plan.training["actor_train"]
    assert (config.estimator.name, config.num_return_sequences_in_group) == ("grpo", 8)
    assert config.actor_train.training_args.learning_rate == 1e-6
    sampling = config.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)
    assert (config.num_gpus_per_node, config.actor_train.device_mapping, config.actor_infer.device_mapping) == (
        1,
        [0],
        [0],
    )
    assert (training.samples_per_step, training.optimizer_steps_per_step, training.micro_batch_size) == (48, 1, 4)
    assert default_facts(loaded) == [("defaults", "of GRPO, as verl's and TRL's")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["num_gpus_per_node=2"], {"devices": [0, 1], "micro": 4, "group": 8}),
        (["actor_train.device_mapping=[0,1,2]"], {"devices": [0, 1, 2], "micro": 4, "group": 8}),
        (["rollout_batch_size=5", "num_return_sequences_in_group=3"], {"devices": [0], "micro": 3, "group": 3}),
        (["actor_train.training_args.per_device_train_batch_size=2"], {"devices": [0], "micro": 2, "group": 8}),
        (["adv_estimator=reinforce"], {"devices": [0], "micro": 3, "group": 1}),
        (["actor_train.model_args.lora_target=all-linear"], {"devices": [0], "micro": 4, "group": 8, "rate": 1e-5}),
    ],
)
def test_what_is_written_decides_about_the_rest(tmp_path: Path, words: list[str], expected: dict[str, Any]) -> None:
    """The batch stays one optimizer step, on the devices that there are."""
    loaded = read(tmp_path, SMALLEST, *words)
    training = loaded.plan.training["actor_train"]
    assert loaded.config.actor_infer.device_mapping == expected["devices"]
    assert (training.micro_batch_size, loaded.plan.group_size) == (expected["micro"], expected["group"])
    assert training.optimizer_steps_per_step == 1
    assert loaded.config.actor_train.training_args.learning_rate == expected.get("rate", 1e-6)


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("rollout_batch_size: 64", 8),
        ("rollout_batch_size: 12", 6),
        ("{rollout_batch_size: 2, train_env_manager: {num_env_groups: 2}}", 1),
        ("{rollout_batch_size: 64, train_env_manager: {num_env_groups: 4}}", 16),
        ("{rollout_batch_size: 64, train_env_manager: {group_size: 2}}", 2),
    ],
)
def test_groups_of_episodes_divide_the_batch(tmp_path: Path, written: str, group: int) -> None:
    text = """
pipeline: agentic
pretrain: owner/model
custom_envs: {lake: {env_type: frozen_lake}}
train_env_manager: {tags: [lake]}
actor_train: {strategy_args: {strategy_name: fsdp2_train}}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
"""
    assert read(tmp_path, whole(text, written)).plan.group_size == group


def test_a_critic_means_gae(tmp_path: Path) -> None:
    loaded = read(tmp_path, whole(SMALLEST, "critic: {strategy_args: {strategy_name: fsdp2_train}}"))
    assert (loaded.config.estimator.name, loaded.plan.group_size) == ("gae", 1)
    assert loaded.config.critic.device_mapping == [0]
    assert loaded.plan.training["critic"].optimizer_steps_per_step == 1


@pytest.mark.parametrize("mark", ["hydra: {run: {dir: .}}", "defaults: roll"])
def test_rolls_files_have_rolls_defaults(tmp_path: Path, mark: str) -> None:
    loaded = read(tmp_path, f"{mark}\n{whole(SMALLEST, ROLLS)}")
    config = loaded.config
    assert (config.num_return_sequences_in_group, config.num_gpus_per_node) == (1, 8)
    assert config.actor_train.training_args.learning_rate == 5e-5
    sampling = config.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.95, 0.7, 50)
    assert "ROLL's" in dict(default_facts(loaded))["defaults"]
    with pytest.raises(ConfigError, match="device_mapping: is needed"):
        read(tmp_path, f"{mark}\n{SMALLEST}")


@pytest.mark.parametrize("mark", ["", "hydra: {run: {dir: .}}\n"])
def test_the_configuration_of_a_run_means_the_same_again(tmp_path: Path, mark: str) -> None:
    """``config.yaml`` has no ``hydra`` section: it says whose defaults it has."""
    loaded = read(tmp_path, mark + whole(SMALLEST, ROLLS))
    again = read(tmp_path, effective_yaml(loaded))
    assert again.config == loaded.config and again.resolved == loaded.resolved
    assert roll.load_config(loaded.resolved, check_files=False).config == loaded.config


def test_an_unknown_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"defaults = 'verl': must be one of learning, roll, or a list of files"):
        read(tmp_path, f"defaults: verl\n{SMALLEST}")
