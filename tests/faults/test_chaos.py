"""A few of the kills of ``make test-faults``, and the program that makes them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import Chain, tiny_world
from tests.faults.conftest import only_test_faults
from tests.support.tiny_runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("synchronous", ["saving"]),
        pytest.param("synchronous", ["saving", "weights"], marks=only_test_faults),
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
