"""Tables of the names that a key of the YAML may have, with what is known of each before its code is imported.

A table is the only list of its names: the loader, the checks, "did you mean", ``roll schema``, ``roll explain`` and the
registry of the functions read it. It is live, so that a name that is added later is known to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Row(Protocol):
    """A row of a table."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that a file may write for it."""


@dataclass(frozen=True)
class Named:
    """A row with one name and perhaps other spellings."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


R = TypeVar("R", bound=Row)


class Table(Mapping[str, R]):
    """Rows by each of their names, in the order in which they were added.

    Args:
        key: of the YAML, for messages.
        rows: what comes with this package; rows that are added later are a user's own.
    """

    def __init__(self, key: str, *rows: R) -> None:
        self.key = key
        self._rows: dict[str, R] = {}
        for row in rows:
            self.add(row)
        self._shipped = frozenset(self._rows)

    def add(self, row: R) -> None:
        """Add a row.

        Raises:
            ValueError: a name that is taken.
        """
        for name in row.names:
            if name in self._rows:
                raise ValueError(f"{self.key} {name!r} is registered already; choose another name")
        self._rows |= dict.fromkeys(row.names, row)

    @property
    def rows(self) -> tuple[R, ...]:
        """The rows, each once."""
        return tuple(dict.fromkeys(self._rows.values()))

    def is_own(self, name: str) -> bool:
        """True for a name that a user has added."""
        return name in self._rows and name not in self._shipped

    def where(self, holds: Callable[[R], bool]) -> tuple[str, ...]:
        """Names of the rows for which ``holds``."""
        return tuple(name for name, row in self._rows.items() if holds(row))

    def __getitem__(self, name: str) -> R:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
