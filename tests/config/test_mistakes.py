"""What a user may write wrongly, or for nothing: the key that is named, and the words, of every row of a table."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from roll.config.reading.errors import ConfigError, Problem
from roll.preflight import check_parts
from tests.config.good import BASES, changed, load, mistakes, read_table, write_rows


class Row(NamedTuple):
    base: Mapping[str, Any]
    changes: Mapping[str, Any]
    key: str
    words: str
    example: Any = ...
    alone: bool = True  # nothing else is blamed
    model: Mapping[str, Any] = {}  # the config.json of the model's folder

    def problems(self, folder: Path) -> tuple[Problem, ...]:
        data = changed(self.changes, self.base)
        if not self.model:
            return mistakes(folder, data)
        (folder / "config.json").write_text(json.dumps(self.model))
        write_rows(folder)
        with contextlib.chdir(folder):
            return mistakes(folder, data | {"pretrain": "."}, check_files=True)


def rows(group: str) -> Iterator[Row]:
    for table in read_table("mistakes")[group]:
        base = changed(table.get("with", {}), BASES[table["of"]])
        for changes, key, words, *example in ((*row, "=", "")[: max(3, len(row))] for row in table["rows"]):
            named = next(iter(changes)) + key[1:] if key.startswith("=") else key
            yield Row(base, changes, named, words, *(example or [...]), not table.get("also"), table.get("model", {}))


MISTAKES = list(rows("mistakes"))


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.key)
def test_a_mistake_is_named(tmp_path: Path, row: Row) -> None:
    problems = row.problems(tmp_path)
    named = [problem for problem in problems if problem.key == row.key and row.words in str(problem)]
    assert named and (len(problems) == 1 or not row.alone), problems
    assert "config.yaml" in named[0].source
    assert row.example is ... or named[0].example == row.example


@pytest.mark.parametrize("row", [*rows("parts")], ids=lambda row: row.key)
def test_what_parts_refuse_is_named_before_the_start(tmp_path: Path, row: Row) -> None:
    loaded = load(tmp_path, changed(row.changes, row.base))
    with pytest.raises(ConfigError) as caught:
        check_parts(loaded)
    assert {problem.key for problem in caught.value.problems} == {row.key}
    assert row.words in str(caught.value)


@pytest.mark.parametrize("base", ["rlvr", "sft", "rm", "agentic"])
def test_parts_of_the_good_ones_are_there(tmp_path: Path, base: str) -> None:
    check_parts(load(tmp_path, BASES[base]))


@pytest.mark.parametrize("row", [*rows("notes")], ids=lambda row: row.key)
def test_what_has_no_effect_is_said(tmp_path: Path, row: Row) -> None:
    notices = load(tmp_path, changed(row.changes, row.base)).warnings
    assert any(notice.key == row.key and row.words in notice.text for notice in notices), notices


@pytest.mark.parametrize("base", BASES)
def test_the_good_ones_are_good(tmp_path: Path, base: str) -> None:
    assert mistakes(tmp_path, BASES[base]) == ()


@pytest.mark.parametrize("row", [*rows("works")], ids=lambda row: row.key)
def test_what_is_beside_a_mistake_works(tmp_path: Path, row: Row) -> None:
    assert row.problems(tmp_path) == ()
