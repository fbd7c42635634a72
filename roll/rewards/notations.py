"""Whole numbers that are not written in decimal digits: with a base (``1011_2``, ``0b101``), or in words."""

from __future__ import annotations

import re

_IN_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?([0-9]{1,2})\}?")
_PREFIXED = re.compile(r"0(?:[bB][01]{1,64}|[oO][0-7]{1,32}|[xX][0-9a-fA-F]{1,16})")
_LARGEST_BASE = 16
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{([^{}]*)\}")

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_UNITS |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}
_UNITS |= {
    f"{ten}-{_SMALL[digit]}": 10 * value + digit for value, ten in enumerate(_TENS, start=2) for digit in range(1, 10)
}
_SCALES = {"thousand": 1000, "million": 10**6}
_LONGEST = 120
"""Characters of a number in words."""


def value_in_base(expression: str) -> tuple[int, int] | None:
    """Value and base of an integer written with its base, such as ``1011_2``; None for anything else."""
    match = _IN_BASE.fullmatch(expression.strip())
    if match is None or not 2 <= int(match.group(2)) <= _LARGEST_BASE:
        return None
    try:
        return int(match.group(1), int(match.group(2))), int(match.group(2))
    except ValueError:
        return None


def other_notation(expression: str) -> int | None:
    """Value of ``1011_2``, ``0b101``, ``0o17``, ``0x1F`` or ``twenty-one``; None for anything else.

    A letter in front of an index, as in ``A_{12}``, is a name.
    """
    text = _TEXT.sub(r"\1", expression).strip()
    if _PREFIXED.fullmatch(text):
        return int(text, 0)
    in_base = value_in_base(text) if text[:1].isdigit() else None
    return in_base[0] if in_base else in_words(text)


def in_words(text: str) -> int | None:
    """Value of a cardinal number in English words below a billion, such as ``one hundred and five``."""
    if len(text) > _LONGEST:
        return None
    words = re.sub(r"\b([a-z]+ty) (?=(?:one|two|three|four|five|six|seven|eight|nine)\b)", r"\1-", text.lower()).split()
    negative = words[:1] in (["minus"], ["negative"])
    total = group = 0
    last_scale, state = 10**9, "start"
    for word in words[negative:]:
        if word in _UNITS and state in ("start", "hundred", "and", "scale"):
            group, state = group + _UNITS[word], "unit"
        elif word == "hundred" and state == "unit" and 0 < group < 10:
            group, state = 100 * group, "hundred"
        elif word == "and" and state in ("hundred", "scale"):
            state = "and"
        elif word in _SCALES and state in ("unit", "hundred") and group and _SCALES[word] < last_scale:
            last_scale = _SCALES[word]
            total, group, state = total + group * last_scale, 0, "scale"
        else:
            return None
    if state in ("start", "and"):
        return None
    return -(total + group) if negative else total + group
