"""Translations can be run: whole commands by themselves and as overrides, single keys as overrides."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.loader import LoadedConfig, load_config
from roll.config.reading.errors import ConfigError
from roll.translation.command import load, overrides
from roll.translation.reading import read_yaml
from tests.translation import commands
from tests.translation.conftest import QUICKSTART, Translate

WHOLE = {
    "skyrl_train": commands.SKYRL_TRAIN,
    "skyrl": commands.SKYRL,
    **commands.VERL_CASES,
    "verl grpo": commands.VERL_GRPO,
}
CHANGES = {
    **{f"switch {name}": text for name, text in commands.SWITCH.items()},
    **{f"tuning {name}": text for name, text in commands.TUNING.items()},
}


@pytest.mark.default_rows("skyrl", "zero3_cpu_offload", "verl grpo")
@pytest.mark.parametrize("name", WHOLE)
def test_whole_commands_run_as_yaml_and_as_overrides(name: str, translated: Translate) -> None:
    translation = translated(WHOLE[name])
    assert translation.whole
    by_itself = load(translation, QUICKSTART)
    assert [str(warning) for warning in by_itself.warnings if "no effect" in warning.text] == []
    on_top = load_config(None, QUICKSTART, overrides=overrides(translation), check_files=False)
    assert batch(on_top) == batch(by_itself)
    assert on_top.config.pretrain == by_itself.config.pretrain


@pytest.mark.default_rows("switch deepspeed", "tuning deepspeed", "memory")
@pytest.mark.parametrize("name", [*CHANGES, *commands.README_YAML])
def test_changes_run_on_the_quickstart(name: str, translated: Translate) -> None:
    text = CHANGES.get(name)
    translation = translated(read_yaml(commands.README_YAML[name], "theirs.yaml") if text is None else text)
    assert not translation.whole
    loaded, before = load(translation, QUICKSTART), load_config(None, QUICKSTART, check_files=False)
    assert text is None or batch(loaded) == batch(before)
    assert loaded.config.actor_infer == before.config.actor_infer


def batch(loaded: LoadedConfig[Any]) -> list[str]:
    return [plan.sentence() for plan in loaded.plan.training.values()]


def test_the_batches_of_the_documents(translated: Translate) -> None:
    """PPO: two optimizer steps of 32, 8 micro-batches of 2; GRPO: 256 samples in two steps of 128, 64 micro-batches."""
    ppo = load(translated(commands.VERL_CASES["zero2_no_offload"]), QUICKSTART)
    sentence = "2 optimizer steps of 32; 2 ranks x 8 micro-batches of 2"
    assert batch(ppo) == [f"{sentence}, without padding", sentence]
    assert sorted(ppo.plan.roles) == ["actor_infer", "actor_train", "critic", "rewards.gsm8k_rule"]
    grpo = load(translated(commands.VERL_GRPO), QUICKSTART)
    assert batch(grpo) == ["2 optimizer steps of 128; 2 ranks x 64 micro-batches of 1, without padding"]
    assert grpo.config.max_steps == 60 and grpo.plan.eval_steps == grpo.plan.save_steps == 0
    assert grpo.plan.roles["actor_train"].device_mapping == (0, 1)
    assert "critic" not in grpo.plan.roles and "reference" not in grpo.plan.roles


def test_zero_1_with_offload_says_what_happens(translated: Translate) -> None:
    loaded = load(translated(commands.VERL_CASES["zero1_cpu_offload"]), QUICKSTART)
    assert [warning.key.partition(".")[0] for warning in loaded.warnings if "is taken as none" in warning.text] == [
        "actor_train",
        "critic",
    ]


def test_a10_one_key_switches_the_backend(translated: Translate) -> None:
    """A10: nothing but the strategies changes."""
    names = {"actor_train": "deepspeed_train", "reference": "deepspeed_infer"}
    expected = {f"{role}.strategy_args.strategy_name": name for role, name in names.items()}
    assert translated(commands.SWITCH["deepspeed"]).keys == expected


def test_d18_ulysses_under_deepspeed_is_taken_as_1(translated: Translate) -> None:
    text = f"{commands.VERL_GRPO.rstrip()} actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    translation = translated(text)
    assert translation.keys["actor_train.model_args.ulysses_size"] == 2
    assert translation.keys["actor_train.training_args.gradient_accumulation_steps"] == 64
    assert any("is taken as 1" in warning.text for warning in load(translation, QUICKSTART).warnings)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("A35", "bash x.sh trainer.strategy=fsdp trainer.policy.fsdp_config.cpu_offload=true"),
        ("A36", f"{commands.SKYRL_PPO} trainer.strategy=fsdp trainer.critic.fsdp_config.cpu_offload=true"),
    ],
)
def test_fsdp1_refuses_offload_of_trained_roles(row: str, text: str, translated: Translate) -> None:
    """A35, A36, A38: the refusal names the limitation."""
    with pytest.raises(ConfigError, match="gradient accumulation outside no_sync"):
        load(translated(text), QUICKSTART)
