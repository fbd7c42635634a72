"""Reading of pasted commands, scripts and YAML files."""

from __future__ import annotations

import pytest

from roll.config.reading.errors import ConfigError
from roll.translation.engine import dialect_of
from roll.translation.reading import read_text, read_words, read_yaml
from tests.translation import commands

SCRIPT = """
set -x
: "${NUM_GPUS:=4}"   # a default
DATA_DIR=/data/gsm8k
export NCCL_DEBUG=WARN
uv run --isolated --extra vllm --with ray==2.48.0 -- python -m skyrl_train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.run_name='a $NUM_GPUS "b"' \\
  trainer.ckpt_path="$HOME/ckpts/${NAME:-mine}" \\
  trainer.resume_mode=null \\
  $@
"""


def test_a_script_with_variables() -> None:
    source = read_text(SCRIPT)
    assert source.launcher == "skyrl_train.entrypoints.main_base" and source.from_module
    assert source.keys == {
        "data.train_data": ["/data/gsm8k/train.parquet"],
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.run_name": 'a $NUM_GPUS "b"',
        "trainer.ckpt_path": "${oc.env:HOME}/ckpts/mine",
        "trainer.resume_mode": None,
    }
    assert source.environment == {"NCCL_DEBUG": "WARN"}
    assert source.unset == ("HOME",)
    assert source.left_out == ["set -x"]


def test_words_of_a_split_command_are_the_same_as_its_text() -> None:
    words = [
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        "+reward.reward_kwargs.method=flexible",
        "trainer.logger=[console]",
    ]
    assert read_words(words).keys == read_text(" ".join(words)).keys
    assert read_words(["A_B=1", *words]).environment == {"A_B": "1"}


def test_values_are_read_as_hydra_reads_them() -> None:
    keys = read_text("a.b=1e8 a.c='grpo' a.d=\"['x', y]\" a.e=True a.f=null ++a.g=-1 a.h={x:1}").keys
    assert keys == {"a.b": 1e8, "a.c": "grpo", "a.d": ["x", "y"], "a.e": True, "a.f": None, "a.g": -1, "a.h": {"x": 1}}


def test_preparing_data_is_passed_over_and_a_script_without_keys_is_named() -> None:
    with pytest.raises(ConfigError, match=r"run_no_seq_pack.sh': holds no key=value; a script is translated"):
        read_text(commands.NO_SEQ_PACK)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer.run_name='open", "the quote ' in line 1 is not closed"),
        ("bash a.sh x.y=1\nbash b.sh x.y=2", "2: runs are in the text"),
        ("make train", "'make train': is no launch command"),
        ("python -m verl.trainer.main_ppo a.b=1 --loud", "'--loud': must be key=value"),
        ("", "holds no key=value"),
    ],
)
def test_text_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(text)
    assert message in str(error.value)


def test_yaml_with_sections_dots_and_references() -> None:
    text = "trainer: {policy: {model: {path: m}}, n: 2}\ntrainer.strategy: ${name}\nname: fsdp2\ncopy: a/${trainer.n}\n"
    assert read_yaml(text, "x.yaml").keys == {
        "trainer.policy.model.path": "m",
        "trainer.n": 2,
        "trainer.strategy": "fsdp2",
        "name": "fsdp2",
        "copy": "a/2",
    }
    with pytest.raises(ConfigError, match="refers to nowhere"):
        read_yaml("a: ${nowhere}", "x.yaml")
    composed = read_yaml("defaults: [other]\na:\n  b: 1\n  c: ${elsewhere}\n  _target_: x.Y\n", "x.yaml")
    assert composed.keys == {"a.b": 1}
    assert composed.left_out == ["defaults", "a.c: ${elsewhere}", "a._target_"]
    for wrong in ("- a", "a: ["):
        with pytest.raises(ConfigError):
            read_yaml(wrong, "x.yaml")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (commands.SKYRL_TRAIN, "skyrl_train"),
        (commands.SKYRL, "skyrl"),
        (commands.VERL_GRPO, "verl"),
        (commands.SWITCH["fsdp"], "skyrl_train"),
        (commands.SWITCH["fsdp of skyrl"], "skyrl"),
        ("trainer.n_gpus_per_node=2", "verl"),
        ("generator.backend=vllm", "skyrl_train"),
    ],
)
def test_whose_keys_they_are(text: str, name: str) -> None:
    assert dialect_of(read_text(text)).name == name


def test_keys_of_nobody() -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer.strateg = 'fsdp': is no key of SkyRL or verl; the nearest .* trainer.strategy",
    ):
        dialect_of(read_text("trainer.strateg=fsdp"))
