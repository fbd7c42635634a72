"""Tables of the names that a key of the YAML may have, with what is known of each before its code is imported.

A table is the only list of its names: the loader, the checks, "did you mean", ``roll schema``, ``roll explain`` and the
registry of the functions read it. It is live, so that a name that is added later is known to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other spellings."""


Row = TypeVar("Row", bound=Named)


class Table(Mapping[str, Row]):
    """Rows by name and alias, in the order in which they were added.

    Args:
        key: of the YAML, for messages.
        rows: what comes with this package; rows that are added later are a user's own.
    """

    def __init__(self, key: str, *rows: Row) -> None:
        self.key = key
        self._rows: dict[str, Row] = {}
        for row in rows:
            self.add(row)
        self._shipped = frozenset(self._rows)

    def add(self, row: Row) -> None:
        """Add a row.

        Raises:
            ValueError: a name that is taken.
        """
        for name in (row.name, *row.aliases):
            if name in self._rows:
                raise ValueError(f"{self.key} {name!r} is registered already; choose another name")
        self._rows |= dict.fromkeys((row.name, *row.aliases), row)

    def remove(self, name: str) -> None:
        """Take a user's own row out again."""
        row = self._rows[name]
        assert row.name not in self._shipped, name
        for spelling in (row.name, *row.aliases):
            del self._rows[spelling]

    def is_own(self, name: str) -> bool:
        """True for a row that a user has added."""
        return name in self._rows and name not in self._shipped

    def where(self, holds: Callable[[Row], bool]) -> tuple[str, ...]:
        """Names and aliases of the rows for which ``holds``."""
        return tuple(name for name, row in self._rows.items() if holds(row))

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
