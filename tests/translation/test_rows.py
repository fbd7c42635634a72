"""Every key that the five source documents name, by the number of its row in the list of what they promise.

A line of ``rows.table``: row numbers | text | our keys with their values | their keys with words of their notes. ``@N``
is ``strategy_args.strategy_name``, ``@O`` ``strategy_args.strategy_config``, ``@T`` ``training_args``; a key without a
value must not be there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll.config.words import expanded
from roll.translation.reading import read_yaml
from tests.translation import commands
from tests.translation.conftest import Translate

TEXTS = {
    "skyrl_train": commands.SKYRL_TRAIN,
    "skyrl": commands.SKYRL,
    "zero1": commands.VERL_CASES["zero1_no_offload"],
    "zero1 cpu": commands.VERL_CASES["zero1_cpu_offload"],
    "zero3 cpu": commands.VERL_CASES["zero3_cpu_offload"],
    "grpo": commands.VERL_GRPO,
    **{f"switch {name}": text for name, text in commands.SWITCH.items()},
    **{f"tuning {name}": text for name, text in commands.TUNING.items()},
}
SHORT = {
    "@N": "strategy_args.strategy_name",
    "@O": "strategy_args.strategy_config",
    "@T": "training_args",
    "@Z": "strategy_args.strategy_config.zero_optimization",
}


TABLE = Path(__file__).with_name("rows.table").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.partition(" |")[0])
def test_row(row: str, translated: Translate) -> None:
    for short, full in SHORT.items():
        row = row.replace(short, full)
    _, text, ours, says = (cell.strip() for cell in re.split(r" \|(?= )", f"{row} | | ")[:4])
    if text.startswith("yaml "):
        translation = translated(read_yaml(commands.README_YAML[text.removeprefix("yaml ")], "theirs.yaml"))
    else:
        translation = translated(TEXTS.get(text, text))
    for pair in filter(None, ours.split("; ")):
        keys, equals, value = pair.partition("=")
        for key in expanded(keys):
            assert translation.keys.get(key, ...) == (yaml.safe_load(value) if equals else ...), key
    said = {note.theirs: note.text for note in translation.notes}
    for pair in filter(None, says.split("; ")):
        key, _, words = pair.partition(": ")
        assert words in said[key], key


@pytest.mark.parametrize("name", commands.VERL_CASES)
def test_stage_and_offload_of_the_six_cases(name: str, translated: Translate) -> None:
    """D56 to D61: stage and offload as asked for, for each role."""
    keys = translated(commands.VERL_CASES[name]).keys
    for options in ("actor_train.strategy_args.strategy_config", "critic.strategy_args.strategy_config"):
        assert keys[f"{options}.zero_stage"] == int(name[4])
        assert keys[f"{options}.offload"] == ("cpu" if "cpu" in name else "none")
        assert keys.get(f"{options}.offload_param", False) == (name == "zero3_cpu_offload")
