"""Tables of translation rules, and the conversions that their rows name.

The tables and the form of their rows are :mod:`roll.config.words.rows`'. In the cell of the conversion:

- A conversion is a name (``whole``), a list of names that stay (``[cpu, nvme]``), a mapping of names
  (``{bfloat16: bf16}``), several in turn (``truth {true: fa2}``), or ``only [1, null]: reason``, which refuses every
  other value. ``whole?`` leaves null as it is, ``whole?0`` takes it for 0.
- ``= fact`` names the value for the arithmetic of :mod:`roll.translation.assembly`; with ``> fact`` that arithmetic
  alone sets our keys.

A default is written out where a whole run does not give the key. A note that begins with ``[fsdp]`` speaks of that
value only.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from itertools import groupby
from typing import Any

import yaml

from roll.config.reading.errors import closest
from roll.config.reading.schema import Mismatch, convert
from roll.config.strategies.deepspeed import numbers
from roll.config.words.rows import Row, read_rows
from roll.translation.rules import Convert, Rule, Section, as_written

# The reason why whole families of configurations are refused.
TURNS = "several turns, tools and agents have no translation: the agentic pipeline has keys of its own"
FACT = re.compile(r"(.*?)(?:(?:^| )([>=]) (\S+))?")


def read_table(
    name: str, conversions: Mapping[str, Convert], texts: Mapping[str, str] | None = None
) -> tuple[Section, ...]:
    """Sections of the file ``name.table``.

    Args:
        conversions: of this table alone, by name; those of :data:`CONVERSIONS` are known everywhere.
        texts: for ``$NAME``, besides those that every table knows and those that the table defines.
    """
    known = {**CONVERSIONS, **conversions}
    rows = groupby(read_rows(name, texts or {}), key=lambda row: row.title)
    return tuple(Section(title, tuple(_rule(row, known) for row in group)) for title, group in rows)


def _rule(row: Row, conversions: Mapping[str, Convert]) -> Rule:
    conversion, sign, fact = FACT.fullmatch(row.how).groups(default="")  # type: ignore[union-attr]
    about = re.match(r"\[(\w+)\] ", row.note)
    return Rule(
        row.theirs,
        row.ours,
        row.note[about.end() :] if about else row.note,
        conversion_of(conversion, conversions),
        fact,
        sign == ">",
        about[1] if about else None,
        row.default,
    )


def conversion_of(cell: str, known: Mapping[str, Convert]) -> Convert:
    """The conversion that a cell names."""
    if cell.startswith("only "):
        values, _, reason = cell.removeprefix("only ").partition("]: ")
        return refused(reason, *yaml.safe_load(f"{values}]"))
    if cell.startswith("["):
        return one_of({name: name for name in yaml.safe_load(cell)})
    if cell.startswith("{"):
        return one_of(yaml.safe_load(cell))
    name, _, then = cell.partition(" ")
    name, question, null = name.partition("?")
    first = known[name] if name else as_written
    following = conversion_of(then, known) if then else as_written
    of_null = yaml.safe_load(null) if null else None
    return lambda value: following(of_null if question and value is None else first(value))


def whole(value: object) -> int:
    return int(_converted(value, int))


def count(value: object) -> int:
    """A number of things of which there is one at least."""
    found = whole(value)
    if found < 1:
        raise ValueError("must be 1 at least")
    return found


def number(value: object) -> float | int:
    return float(_converted(value, float))


def pair(value: object) -> list[float | int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be two numbers")
    return [number(entry) for entry in value]


def truth(value: object) -> bool:
    return bool(_converted(value, bool))


def switched(value: object) -> bool:
    """The 0 or 1 of an environment variable."""
    if str(value).strip().lower() not in ("0", "1", "true", "false"):
        raise ValueError("must be 0 or 1")
    return str(value).strip().lower() in ("1", "true")


def _converted(value: object, hint: object) -> Any:
    try:
        return convert(value, hint)
    except Mismatch as error:
        raise ValueError(error.rule) from None


def listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# Megatron's names of layers, and those of Hugging Face's models.
LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def hugging_face_layers(value: object) -> object:
    return [name for layer in value for name in LAYERS.get(str(layer), (layer,))] if isinstance(value, list) else value


def one_of(names: Mapping[Any, Any], refusals: Mapping[Any, str] | None = None) -> Convert:
    """A conversion by a table of their names; those in ``refusals`` say why they have no translation."""

    def look_up(value: object) -> Any:
        name = value if isinstance(value, Hashable) else str(value)
        if name in names:
            return names[name]
        if refusals and name in refusals:
            raise ValueError(f"has no translation: {refusals[name]}")
        known = [str(name) for name in names]
        nearest = closest(str(value), known)
        hint = f"; the nearest is {nearest}" if nearest else ""
        raise ValueError(f"has no translation; known: {', '.join(known)}{hint}")

    return look_up


def refused(reason: str, *neutral: object) -> Convert:
    """A conversion that takes ``neutral`` values only."""

    def check(value: object) -> Any:
        if value not in neutral:
            raise ValueError(reason)
        return value

    return check


# Our trackers by their names. Trackers without a client here write to a file.
LOGGERS = {
    "console": "stdout",
    "stdout": "stdout",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "file": "jsonl",
    "mlflow": "mlflow",
    "clearml": "jsonl",
    "vemlp_wandb": "wandb",
}


# Conversions that every table knows.
CONVERSIONS: dict[str, Convert] = {
    **{f.__name__: f for f in (whole, count, number, pair, truth, switched, listed, numbers, hugging_face_layers)},
    "text": str,
    "yes": lambda value: True,
    "flipped": lambda value: not truth(value),
    # An interval in which 0 and -1 both mean never.
    "never_below_zero": lambda value: 0 if value is False else max(0, whole(value)),
    "weights": lambda value: [number(entry) for entry in listed(value)],
    "loggers": lambda value: list(dict.fromkeys(one_of(LOGGERS)(name) for name in listed(value))),
}
