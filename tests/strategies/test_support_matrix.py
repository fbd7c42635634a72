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
CELLS = [
    pytest.param(strategy, cell, id=f"{strategy}-{feature.name}")
    for feature in FEATURES
    for strategy, cell in zip(STRATEGIES, feature.cells, strict=True)
]


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


def test_the_page_has_the_table():
    """Write it again with ``python -m tests.strategies.support_matrix``."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()


@pytest.mark.parametrize(("strategy", "cell"), CELLS)
def test_cell(strategy, cell, tmp_path):
    """A yes has a test that exists; refusals and notes are those of ``roll check``."""
    if isinstance(cell, Yes):
        file, function, case = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[(.+)\])?", cell.test).groups()
        assert f"def {function}(" in source(file)
        assert case is None or f'"{case}"' in source(file)
    elif isinstance(cell, Refused | Noted):
        name = {"actor_train.strategy_args.strategy_name": f"{strategy}_train"}
        options = {"actor_train.strategy_args.strategy_config": {}}
        data = changed({**name, **options, cell.key: cell.value})
        if isinstance(cell, Refused):
            assert [problem for problem in mistakes(tmp_path, data) if cell.words in str(problem)] != []
        else:
            loaded: LoadedConfig = load(tmp_path, data)
            assert [notice for notice in loaded.warnings if cell.words in str(notice)] != []
