"""A few of the kills of ``make test-faults``, and the program that makes them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.chaos import BEGIN, END, Chain, table, tiny_world, write_table
from tests.faults.conftest import only_test_faults
from tests.support.tiny_runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("synchronous", ["saving", "weights"]),
        pytest.param("asynchronous", ["samples", "any"], marks=only_test_faults),
    ],
)
def test_a_run_that_is_killed_and_continued_is_the_run_that_was_not(
    tmp_path: Path, kind: str, moments: list[str]
) -> None:
    dice, world = random.Random(5), tiny_world(tmp_path / "world")
    undisturbed = Chain("synchronous", "tree", [], world, tmp_path / "undisturbed", dice)
    if kind == "synchronous":
        undisturbed.run()
    chain = Chain(kind, "tree", moments, world, tmp_path / "killed", dice)
    rows = chain.run()
    assert rows, "it was killed"
    assert chain.problems(FinishedRun(undisturbed.output)) == []


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    row = {"kind": "synchronous", "victim": "tree", "moment": "any", "lost_steps": 2, "seconds": 3.0, "equal": True}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(page, [row, row | {"lost_steps": 1, "seconds": 5.0}])
    assert "| process tree, at any moment | synchronous | 2 | 1.5 (2) | 0 | 4.0 (5.0) |" in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "1 of 1 runs differ" in table([json.loads(json.dumps(row | {"equal": False}))])
