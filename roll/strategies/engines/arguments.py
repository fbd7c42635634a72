"""Engine arguments that a configuration adds, read by the types that the installed engine declares."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import reduce
from inspect import signature
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from roll.config.reading.errors import did_you_mean
from roll.config.reading.schema import Mismatch, convert


def typed_arguments(arguments: Mapping[str, Any], declared: type, role: str) -> dict[str, Any]:
    """``engine_args`` of a role with the types of their fields in ``declared``, the engine's own class.

    Raises:
        ValueError: no such field, or a value of another type. Types of the engine's own making are left to it.
    """
    declarations = {name: argument.annotation for name, argument in signature(declared).parameters.items()}
    typed = dict(arguments)
    for key, value in arguments.items():
        path = f"{role}.strategy_args.strategy_config.engine_args.{key}"
        if key not in declarations:
            hint = did_you_mean(key, declarations, "; did you mean {!r}?")
            raise ValueError(f"{path} = {value!r}: the installed engine's {declared.__name__} has no such field{hint}")
        plain = _plain(_resolved(declarations[key], declared.__module__))
        try:
            typed[key] = value if plain is None else convert(value, plain)
        except Mismatch as error:
            raise ValueError(f"{path} = {value!r}: {error.rule}; for example {key}: {error.example}") from None
    return typed


def _resolved(declaration: object, module: str) -> Any:
    """The type that a field's annotation names; None: it is only there for type checkers."""
    one = type("One", (), {"__annotations__": {"field": declaration}, "__module__": module})
    try:
        return get_type_hints(one)["field"]
    except NameError:
        return None


def _plain(hint: Any) -> Any:
    """The type in terms that ``convert`` reads; None where it is made of others."""
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return Literal[tuple(int(member) for member in hint)]
    if hint in (bool, int, float, str, NoneType) or get_origin(hint) is Literal:
        return hint
    if get_origin(hint) in (Union, UnionType):
        parts = [_plain(part) for part in get_args(hint)]
        return None if None in parts else reduce(or_, parts)
    return None
