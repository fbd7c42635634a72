"""Whether what a program printed, or a function returned, is what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_NUMERAL = 40
"""Characters; nobody expects a longer decimal fraction."""


def equal_output(printed: str, expected: str, tolerance: float) -> bool:
    """Line by line without white space at the ends; decimal fractions within ``tolerance``, as contests judge."""
    given, wanted = lines_of(printed), lines_of(expected)
    if given == wanted:
        return True
    if len(given) != len(wanted):
        return False
    return all(
        one == other or equal_tokens(one.split(), other.split(), tolerance)
        for one, other in zip(given, wanted, strict=True)
    )


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def equal_tokens(given: list[str], wanted: list[str], tolerance: float) -> bool:
    if len(given) != len(wanted):
        return False
    return all(one == other or equal_decimals(one, other, tolerance) for one, other in zip(given, wanted, strict=True))


def equal_decimals(given: str, wanted: str, tolerance: float) -> bool:
    """Two numerals, where a decimal fraction is wanted: whole numbers must be exact."""
    if max(len(given), len(wanted)) > MAX_NUMERAL or not ({".", "e", "E"} & set(wanted)):
        return False
    try:
        return within(float(given), float(wanted), tolerance)
    except ValueError:
        return False


def within(given: float, wanted: float, tolerance: float) -> bool:
    both_undefined = math.isnan(given) and math.isnan(wanted)
    return both_undefined or math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance)


def equal_values(given: Any, wanted: Any, tolerance: float) -> bool:
    """Whether a returned value is the expected one of a JSON file, which knows no tuples and only texts as keys."""
    if isinstance(wanted, list):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            return False
        return all(equal_values(one, other, tolerance) for one, other in zip(given, wanted, strict=True))
    if isinstance(wanted, Mapping):
        return isinstance(given, Mapping) and equal_mappings(given, wanted, tolerance)
    if isinstance(wanted, bool) or isinstance(given, bool):
        return type(given) is type(wanted) and given == wanted
    if isinstance(wanted, int) and isinstance(given, float):
        return given == wanted  # 5.0 is 5; a whole number has no tolerance
    if isinstance(wanted, float):
        try:
            return isinstance(given, (int, float)) and within(given, wanted, tolerance)
        except OverflowError:
            return False
    return type(given) is type(wanted) and bool(given == wanted)


def equal_mappings(given: Mapping[Any, Any], wanted: Mapping[Any, Any], tolerance: float) -> bool:
    keyed = {str(key): value for key, value in given.items()}
    if len(keyed) != len(given) or keyed.keys() != {str(key) for key in wanted}:
        return False
    return all(equal_values(keyed[str(key)], value, tolerance) for key, value in wanted.items())
