"""The diagnosis of recorded runs: seeded pathologies and healthy ones, as ``benchmarks/pathologies`` has kept them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.pathologies.cases import HEALTHY, PATHOLOGIES
from roll.report.diagnosis import diagnose
from roll.report.run_files import read_run

RECORDS = Path(__file__).parent / "records"
LEAST_RIGHT = 18 / 20


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The causes named for each run, in order."""
    found = {}
    for archive in sorted(RECORDS.glob("*.tar.xz")):
        folder = tmp_path_factory.mktemp(archive.name)
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        found[archive.name.removesuffix(".tar.xz")] = [finding.cause for finding in diagnose(read_run(folder))]
    return found


def test_the_right_cause_is_named_first(causes: dict[str, list[str]]) -> None:
    assert len(PATHOLOGIES) >= 20
    wrong = {case.name: causes[case.name] for case in PATHOLOGIES if causes[case.name][:1] != [case.cause]}
    assert 1 - len(wrong) / len(PATHOLOGIES) >= LEAST_RIGHT, wrong


def test_nothing_is_named_in_healthy_runs(causes: dict[str, list[str]]) -> None:
    assert len(HEALTHY) >= 10
    assert {case.name: causes[case.name] for case in HEALTHY if causes[case.name]} == {}


def test_every_rule_has_a_pathology() -> None:
    """But the last one, which repeats the error of a run that has said its cause itself."""
    page = (Path(__file__).parents[2] / "docs/diagnosis.md").read_text(encoding="utf-8")
    named = {case.cause for case in PATHOLOGIES}
    assert all(f"| `{cause}` |" in page for cause in named)
    assert len(named) == 19
