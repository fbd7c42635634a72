"""The table of what each strategy can do is true: tests that it names exist, and what it says is refused is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from roll.config.loader import LoadedConfig
from tests.config.good import changed, load, mistakes
from tests.strategies.support_matrix import BEGIN, END, FEATURES, PAGE, STRATEGIES, Noted, Refused, Yes, table

TESTS = Path(__file__).parents[1]
CELLS = [(name, cell) for row in FEATURES for name, cell in zip(STRATEGIES, row.cells, strict=True)]


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


def test_the_page_has_the_table():
    """Write it again with ``python -m tests.strategies.support_matrix``."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()


def test_a_yes_has_a_test():
    for cell in {cell for _, cell in CELLS if isinstance(cell, Yes)}:
        file, function, case = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[(.+)\])?", cell.test).groups()
        assert f"def {function}(" in source(file), cell
        assert case is None or f'"{case}"' in source(file), cell


@pytest.mark.parametrize(("strategy", "cell"), [one for one in CELLS if isinstance(one[1], Refused | Noted)])
def test_refusals_and_notes_are_those_of_roll_check(strategy, cell, tmp_path):
    name = {"actor_train.strategy_args.strategy_name": f"{strategy}_train"}
    options = {"actor_train.strategy_args.strategy_config": {}}
    data = changed({**name, **options, cell.key: cell.value})
    if isinstance(cell, Refused):
        assert [problem for problem in mistakes(tmp_path, data) if cell.words in str(problem)] != []
    else:
        loaded: LoadedConfig = load(tmp_path, data)
        assert [notice for notice in loaded.warnings if cell.words in str(notice)] != []
