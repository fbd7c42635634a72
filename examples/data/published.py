"""Rows of published data sets in this project's columns: what the converters share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.datasets.columns import with_system
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError


@dataclass(frozen=True)
class PrepareOptions:
    """Options of the command line, for all rows."""

    tag: str
    instruction: str = ""
    """Appended to every prompt; empty: none."""
    system: str | None = None
    """A system message before every conversation; None: none."""


Convert = Callable[[SourceRow, str, PrepareOptions], Row]
"""(row, id, options) -> row in this project's columns; raises DataError where the row cannot be converted."""

_LEVEL = re.compile(r"(?:level\s*)?([0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)


def one_of(source: SourceRow, columns: Sequence[str]) -> tuple[str, Any]:
    """The first of ``columns`` that the row has, with its value.

    Raises:
        DataError: it has none.
    """
    for column in columns:
        if source.row.get(column) is not None:
            return column, source.row[column]
    raise DataError(f"{source.place}: expected one of the columns {', '.join(columns)}; found {sorted(source.row)}")


def text_of(source: SourceRow, columns: Sequence[str]) -> str:
    """The value of the first of ``columns`` that the row has, which must be a non-empty text."""
    column, value = one_of(source, columns)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{source.place}: {column} must be a non-empty text, found {str(value)[:60]!r}")
    return value


def json_of(source: SourceRow, column: str) -> Any:
    """A column that holds JSON, as text or already read."""
    value = source.row[column]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{source.place}: {column} is not valid JSON: {error.msg}") from error


def prompt_columns(prompt: str, options: PrepareOptions, separator: str = "\n\n") -> Row:
    """``messages`` and ``prompt``, instruction appended."""
    text = f"{prompt}{separator}{options.instruction}" if options.instruction else prompt
    return {"messages": with_system([{"role": "user", "content": text}], options.system), "prompt": text}


def difficulty(source: SourceRow, words: Sequence[str] = ()) -> Row:
    """``difficulty`` as a number, from a column ``difficulty`` or ``level`` that is one, reads ``Level 3``, or is one
    of ``words`` (from easy to hard, any case); no column where the row does not say."""
    value = next((source.row[name] for name in ("difficulty", "level") if source.row.get(name) is not None), None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"difficulty": value}
    text = str(value).strip().lower()
    if text in words:
        return {"difficulty": list(words).index(text)}
    found = _LEVEL.fullmatch(text)
    return {"difficulty": float(found[1])} if found else {}


def others(source: SourceRow, used: Sequence[str]) -> Row:
    """The columns that were not turned into something else; rewards and filters may ask for them."""
    return {name: value for name, value in source.row.items() if name not in used}
