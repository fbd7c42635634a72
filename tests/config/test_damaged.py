"""Damaged configurations: each gives its own message, names the key, and nothing else is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError
from tests.config.good import GOOD_SFT, changed, load, mistakes

TRAIN = "actor_train.training_args"


# (changes, key that is blamed, part of the message)
def test_all_mistakes_at_once(tmp_path: Path) -> None:
    changes = {"max_stepps": 1, "gamma": 3, "pretrain": "${nope}", "rewards.math.worker_cls": "nothing", TRAIN: "x"}
    problems = mistakes(tmp_path, changed(changes), "lambd=7", "no-equals-sign")
    assert {problem.key for problem in problems} == {
        "max_stepps",
        "gamma",
        "pretrain",
        "rewards.math.worker_cls",
        TRAIN,
        "lambd",
        "(command line)",
    }


def test_place_of_a_mistake(tmp_path: Path) -> None:
    problems = mistakes(tmp_path, changed({f"{TRAIN}.learning_rate": "x"}), "gamma=2")
    places = {problem.key: problem.source for problem in problems}
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "learning_rate" in text)
    assert places[f"{TRAIN}.learning_rate"].endswith(f"config.yaml:{line}")
    assert places["gamma"] == "command line"


def test_missing_files_and_models(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    changes = {
        "pretrain": str(tmp_path / "model"),
        "actor_train.data_args.file_name": [str(tmp_path / "no.jsonl")],
        "validation.data_args.file_name": str(tmp_path / "none.parquet"),
        "resume_from_checkpoint": str(tmp_path / "checkpoint-3"),
    }
    text = "\n".join(map(str, mistakes(tmp_path, changed(changes), check_files=True)))
    assert "has no config.json" in text
    assert text.count("no such file") == 2
    assert "no such checkpoint folder" in text
    assert mistakes(tmp_path, changed(changes), check_files=False) == ()


def test_sequences_longer_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"max_position_embeddings": 200}')
    changes = {"pretrain": str(tmp_path / "model")}
    told = [notice.text for notice in load(tmp_path, changed(changes)).warnings if notice.key == "pretrain"]
    assert len(told) == 1 and "256 tokens are longer than the model's 200 positions" in told[0]
    told = [notice.text for notice in load(tmp_path, changed(changes, GOOD_SFT)).warnings]
    assert any("longer than the model's 200" in text for text in told)


@pytest.mark.parametrize(
    ("name", "text", "asked", "message"),
    [
        ("config.yml", "a: 1", "config.yml", r"must be a file that ends in \.yaml"),
        ("config.yaml", "a: [1, 2", "config.yaml", "not valid YAML"),
        ("config.yaml", "a: 1\na: 2\n", "config.yaml", "duplicate key"),
        ("config.yaml", "", "config.yaml", "is empty"),
        ("grpo_config.yaml", "a: 1", "grpo_confg", r"there is .*grpo_config\.yaml.*nearest: grpo_config"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, asked: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(None, *((tmp_path / asked,) if "." in asked else (tmp_path, asked)))
