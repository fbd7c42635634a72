"""How a configuration field states its own rules: bounds, allowed names, aliases, a parser for special spellings.

The rules stand in the field's metadata, so that the reader that checks a YAML file, the generated reference page and
the error messages all speak from the same place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RULES = "roll.rules"


@dataclass(frozen=True)
class FieldRules:
    """What a value must satisfy beyond its type."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] | None = None
    dotted_path: bool = False
    """With ``choices``: a dotted path ``package.module.name`` is allowed too (a user's own function or class)."""
    endings: tuple[str, ...] = ()
    """With ``choices``: the name of a file with one of these endings is allowed too."""
    planned: tuple[str, ...] = ()
    """Names that are known and not available yet."""
    aliases: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    """Turns the written value into one of the field's type; raises ValueError with the rule that was broken."""
    example: Any = None
    """A value that would work, for error messages."""
    inert: str | None = None
    """For a key that is accepted and changes nothing: what decides instead, told to the user in one line."""
    read_if: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Keys of the section (or at the top), each with the values under one of which this key is read; no values: where
    the other key is set. Empty: it is always read."""

    def bounds(self) -> str:
        """The numeric bounds in words, empty if there are none."""
        parts = (("at least", self.ge), ("greater than", self.gt), ("at most", self.le), ("less than", self.lt))
        return " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)

    def violates(self, value: float) -> bool:
        return (
            (self.ge is not None and value < self.ge)
            or (self.gt is not None and value <= self.gt)
            or (self.le is not None and value > self.le)
            or (self.lt is not None and value >= self.lt)
        )


NO_RULES = FieldRules()


def rules(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[str] | None = None,
    dotted_path: bool = False,
    endings: Sequence[str] = (),
    planned: Sequence[str] = (),
    aliases: Sequence[str] = (),
    parse: Callable[[Any], Any] | None = None,
    example: Any = None,
    inert: str | None = None,
    read_if: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, FieldRules]:
    """Metadata for :func:`dataclasses.field` that holds these :class:`FieldRules`."""
    allowed = tuple(choices) if choices is not None else None
    names = (tuple(endings), tuple(planned), tuple(aliases))
    readers = tuple((key, tuple(values)) for key, values in (read_if or {}).items())
    return {RULES: FieldRules(ge, gt, le, lt, allowed, dotted_path, *names, parse, example, inert, readers)}


def setting(default: Any, **options: Any) -> Any:
    """A field with a default and the :func:`rules` given by name."""
    return field(default=default, metadata=rules(**options))


DOTTED_PATH = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")


def parse_dotted_path(value: Any) -> str | None:
    """``package.module.function`` or null."""
    if value is not None and not DOTTED_PATH.fullmatch(str(value)):
        raise ValueError("must be the dotted path of your own function, such as my_package.weights.weigh")
    return value


LOWEST_TEMPERATURE = 1e-4
"""Logits divided by less leave the range of float32."""


def parse_temperature(value: Any) -> Any:
    """0, or a temperature that logits can be divided by."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value  # the type is checked elsewhere
    if 0 < number < LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LOWEST_TEMPERATURE:g}")
    return value


DTYPE_NAMES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
}


def parse_dtype(value: Any) -> str:
    """``bf16``, ``fp16`` or ``fp32`` from any of the usual spellings (``bfloat16``, ``torch.float32`` ...)."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ValueError(f"must be one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]
