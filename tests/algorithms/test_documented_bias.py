"""The measured biases in the documentation are those of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.algorithms.tabular import TABLES, Row, markdown

PAGE = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES)
def test_rows_stand_in_the_documentation(table: Callable[[], Mapping[str, Row]]) -> None:
    missing = [line for line in markdown(table()) if line not in PAGE]
    assert not missing, "python -m tests.algorithms.tabular prints the tables: " + "; ".join(missing)
