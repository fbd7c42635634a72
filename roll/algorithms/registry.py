"""Registries: the functions that a key of the YAML selects by name, or by the dotted path of a user's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar

from roll.config.objects import imported
from roll.config.reading.errors import Problems, did_you_mean
from roll.config.reading.fields import Choice, Row, Table
from roll.config.reading.schema import SchemaReader, build

F = TypeVar("F", bound=Callable[..., Any])
_options: dict[Callable[..., Any], type] = {}


def with_options(options: type) -> Callable[[F], F]:
    """Decorator: declare the dataclass of options of a loss or an estimator that is chosen by its dotted path."""

    def decorate(function: F) -> F:
        _options[function] = options
        return function

    return decorate


class Registry(Generic[F]):
    """Functions of one kind, found by name or by dotted path.

    ``name`` may be a registered name, an alias, or the path of a function in an importable module
    (``my_package.losses.my_loss`` or ``my_package.losses:my_loss``).

    Args:
        kind: the key of the YAML, for messages.
        table: the configuration's table of these names, where there is one: it knows their aliases, and learns names
            that are registered in addition.
        options: of functions that declare none (:func:`with_options`).
        row: makes a row of the table, of a name, its aliases, its options and further traits.
    """

    def __init__(
        self,
        kind: str,
        table: Table[Any] | None = None,
        options: type | None = None,
        row: Callable[..., Row] | None = None,
    ) -> None:
        self.kind = kind
        self._row = row
        self._default = options
        self._table = table
        self._entries: dict[str, F] = {}
        self._names: list[str] = []

    def add(self, function: F, name: str, aliases: tuple[str, ...] = (), row: Row | None = None) -> None:
        """Register ``function``; raises ``ValueError`` when a name is taken by another function.

        Args:
            row: added to the table for a name that it does not have.
        """
        known = self._table.get(name) if self._table is not None else None
        for key in (name, *aliases) if known is None else known.names:
            if key in self._entries and self._entries[key] is not function:
                raise ValueError(f"{self.kind} {key!r} is registered already; choose another name")
            self._entries[key] = function
        if name not in self._names:
            self._names.append(name)
        if row is not None and known is None and self._table is not None:
            self._table.add(row)

    def register(
        self, name: str, *, options: type | None = None, aliases: tuple[str, ...] = (), **traits: Any
    ) -> Callable[[F], F]:
        """Decorator: make the function below selectable by ``name``.

        A name of the configuration's table has everything there; another one is added to it, with these ``traits``.

        Args:
            options: the dataclass of its options; None: those of the registry.
        """

        def decorate(function: F) -> F:
            row = None if self._row is None else self._row(name, aliases, options or self._default, **traits)
            self.add(function, name, aliases, row)
            return function if options is None else with_options(options)(function)

        return decorate

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names in order of registration, without aliases."""
        return tuple(self._names)

    def resolve(self, name: str) -> F:
        """The function called ``name``; raises ``ValueError``: no such name (the message has the nearest known one), or
        a path at which no function can be imported."""
        if name in self._entries:
            return self._entries[name]
        if "." not in name and ":" not in name:
            nearest = did_you_mean(name, self._entries, "nearest known: {!r}; ")
            raise ValueError(
                f"unknown {self.kind} {name!r}; {nearest}known: {', '.join(self._names)}; "
                "or the dotted path of your own function"
            )
        try:
            function = imported(name)
        except ImportError as error:
            raise ValueError(
                f"{self.kind} {name!r} cannot be imported: {error}; give package.module.function"
            ) from error
        if not callable(function):
            raise ValueError(f"{self.kind} {name!r} is a {type(function).__name__}, not a function")
        return function

    def options_of(self, choice: Choice) -> Any:
        """The options as the function takes them.

        Raises:
            ValueError: an unknown function, or an option that it does not have.
        """
        if not isinstance(choice.options, Mapping):
            return choice.options
        row = self._table.get(choice.name) if self._table is not None else None
        cls: Any = (row and row.options) or _options.get(self.resolve(choice.name), self._default)
        # Flat keys are shared by all losses; a function of the user's own gets those that its dataclass names.
        known = [option.name for option in fields(cls)]
        written = {name: value for name, value in choice.shared.items() if name in known} | dict(choice.options)
        problems = Problems()
        options = build(cls, SchemaReader(problems).read(cls, written, self.kind))
        if problems.errors:
            raise ValueError(str(problems.errors[0]))
        return options
