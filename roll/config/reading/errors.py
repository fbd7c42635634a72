"""Mistakes in a configuration: collected, located in their file, and shown all at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.reading.masking import MASK, masked, masked_text

MAX_VALUE_LENGTH = 120
SHORTEST_PREFIX = 3
# Least likeness (`difflib`) of a misspelt word and the known one that is named. Below, a guess misleads.
LEAST_LIKENESS = 0.75
LIKENESS_ANYWHERE = 0.85  # the same to one of all keys of all sections, of which many are a little like it


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, what was written, the rule, and a value that would work."""

    key: str
    value: Any
    rule: str
    example: Any = None
    source: str = ""
    has_value: bool = True

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        name = self.key.rsplit(".", 1)[-1]
        is_hidden = isinstance(self.value, str) and masked({name: self.value})[name] == MASK
        is_plain = self.value is None or isinstance(self.value, bool)
        value = MASK if is_hidden else plain_words(self.value) if is_plain else repr(masked(self.value))
        value = value if len(value) <= MAX_VALUE_LENGTH else f"{value[: MAX_VALUE_LENGTH - 3]}..."
        written = f" = {value}" if self.has_value else ""
        example = plain_words(self.example)
        is_whole = self.key.startswith("(") or (isinstance(self.example, str) and ":" in example and example[0] != "{")
        works = f"; for example {example if is_whole else f'{name}: {example}'}" if self.example is not None else ""
        # Apart: a quoted value and what follows it would read as a name and its value, {'token': ...}.
        return f"{masked_text(f'{where}{self.key}{written}')}: {masked_text(f'{self.rule}{works}')}"


@dataclass(frozen=True)
class Notice:
    """Something accepted that the user should know of."""

    key: str
    text: str

    def __str__(self) -> str:
        return masked_text(f"{self.key}: {self.text}")


class ConfigError(ValueError):
    """A configuration that cannot be run. ``problems`` holds every mistake that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  - {item}" for item in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


@dataclass
class Problems:
    """Collector that the reader and the checks write into."""

    errors: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    rename: Callable[[str], str] = field(default=str)  # from a key as the checks know it to what the file has

    def add(self, key: str, value: object, rule: str, example: object = None) -> None:
        self.errors.append(Problem(key, value, rule, example))

    def missing(self, key: str, rule: str, example: object = None) -> None:
        """A key that is not there but must be."""
        self.errors.append(Problem(key, None, rule, example, has_value=False))

    def not_available(self, key: str, value: object, feature: str, example: object = None) -> None:
        """A key whose feature this version does not have."""
        self.errors.append(Problem(key, value, f"not available yet: {key} ({feature})", example))

    def note(self, key: str, text: str) -> None:
        notice = Notice(key, text)
        if notice not in self.notices:
            self.notices.append(notice)

    def noted(self, key: str) -> bool:
        return any(notice.key == key for notice in self.notices)


def plain_words(value: object) -> str:
    """A value as YAML has it: ``null``, ``true``; texts without quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``2,048 rows``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def closest(word: str, known: Iterable[str], likeness: float = LEAST_LIKENESS) -> str | None:
    """The nearest of ``known`` to a misspelt word, or None when nothing is near."""
    lowered = {item.lower(): item for item in known}
    swapped = [item for item in lowered if sorted(item) == sorted(word.lower())]  # "tsi" is a third unlike "tis"
    matches = swapped or difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=likeness)
    return lowered[matches[0]] if matches else None


def closest_value(word: str, known: Iterable[str]) -> str | None:
    """The nearest of the values that a key may have, else the first that begins ``word`` or begins with it."""
    values = list(known)
    short = word.lower()
    begun = (value for value in values if value.lower().startswith(short) or short.startswith(value.lower()))
    return closest(word, values) or (next(begun, None) if len(word) >= SHORTEST_PREFIX else None)


def did_you_mean(word: str, known: Iterable[str], form: str = "did you mean {!r}? ") -> str:
    """``form`` with the nearest of ``known`` to a misspelt word; empty when nothing is near."""
    near = closest(word, known)
    return form.format(near) if near else ""
