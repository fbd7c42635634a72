"""What a configuration means: of every row of a table what becomes of it in the configuration, in the plan, in the
typed options of its strategies, and what is said."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from roll.config.loader import LoadedConfig
from roll.config.plan.render import render_plan
from tests.config.good import BASES, changed, load, read_table
from tests.support.meanings import at, meaning, plain


class Row(NamedTuple):
    base: Mapping[str, Any]
    changes: Mapping[str, Any]
    words: Sequence[str]
    """Overrides of the command line."""
    means: Mapping[str, Any]


def rows() -> Iterator[Row]:
    for table in read_table("meanings"):
        base = changed(table.get("with", {}), BASES[table["of"]])
        for changes, means, *words in table["rows"]:
            yield Row(base, changes, words, means)


def shown_plan(loaded: LoadedConfig[Any]) -> str:
    output = io.StringIO()
    render_plan(loaded, Console(width=200, file=output))
    return output.getvalue()


@pytest.mark.parametrize("row", [*rows()], ids=lambda row: " ".join([*row.changes, *row.words])[:80] or "as it is")
def test_what_a_configuration_means(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_PLATFORM", "cpu")
    loaded = load(tmp_path, changed(row.changes, row.base), *row.words)
    said: dict[str, str] = {}
    for notice in loaded.warnings:
        said[notice.key] = said.get(notice.key, "") + notice.text
    for path, expected in row.means.items():
        if path == "said":
            for key, words in expected.items():
                assert words in said[key] if words is not None else key not in said, said
        elif path == "shown":
            assert [words for words in expected if words not in shown_plan(loaded)] == []
        else:
            found = plain(at(meaning(loaded), path))
            assert found == expected and type(found) is type(expected), (path, found)
