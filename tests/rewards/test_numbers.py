"""Numbers as they are written (numerals, other notations, with units): their values, and that another stays wrong."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.answers import in_words, other_notation
from roll.rewards.base import parse_number
from roll.rewards.math_rule import compare_quickly, readings
from roll.rewards.units import quantity, unit_of
from tests.rewards.stated_cases import rows_of

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
ONES_TO_NINETEEN = [*ONES.split(), "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spelled(number: int, joined: str = "-", middle: str = " and ") -> str:
    """Words of a number from 0 to 999,999,999, the plain way."""
    if number >= 10**6:
        rest = number % 10**6
        return f"{spelled(number // 10**6, joined, middle)} million" + (f" {spelled(rest, joined)}" if rest else "")
    if number >= 1000:
        rest = number % 1000
        return f"{spelled(number // 1000, joined, middle)} thousand" + (f" {spelled(rest, joined)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{ONES_TO_NINETEEN[number // 100]} hundred" + (f"{middle}{spelled(rest, joined)}" if rest else "")
    if number >= 20:
        rest = number % 10
        return TENS[number // 10 - 2] + (f"{joined}{ONES_TO_NINETEEN[rest]}" if rest else "")
    return ONES_TO_NINETEEN[number]


def in_base(number: int, base: int) -> str:
    digits = ""
    while number or not digits:
        digits, number = "0123456789ABCDEF"[number % base] + digits, number // base
    return digits


def ways(number: int) -> list[str]:
    """The number in every notation."""
    words = [spelled(number, joined, middle) for joined in "- " for middle in (" ", " and ")]
    return [
        *words,
        spelled(number).capitalize(),
        f"\\text{{{spelled(number)}}}",
        *(f"{digits}_{{{base}}}" for base in range(2, 17) if (digits := in_base(number, base))[0].isdigit()),
        *(f"{number:#{kind}}" for kind in "box"),
    ]


@pytest.mark.long
@given(st.integers(0, 10**9 - 1), st.integers(-(10**9), 10**9))
@settings(deadline=None, max_examples=300)
def test_every_notation_is_right_for_its_number_and_for_no_other(number: int, other: int) -> None:
    for text in ways(number):
        assert compare_quickly(str(number), text) is True, text
        assert compare_quickly(str(other), text) is (other == number), text
    assert in_words(f"minus {spelled(number)}") == -number


@given(
    st.lists(st.sampled_from([*ONES_TO_NINETEEN, *TENS, "hundred", "thousand", "million", "and", "half"]), max_size=7)
)
@settings(deadline=None, max_examples=500)
def test_words_have_a_value_only_where_they_spell_it(words: list[str]) -> None:
    """Spelling the value again gives the same words, but for hyphens and ``and``."""
    value = in_words(" ".join(words))
    if value is not None:
        assert spelled(value, " ", " ").split() == [word for word in words if word != "and"]


@pytest.mark.parametrize(("text", "none"), rows_of("number_cases", "no notation"))
def test_other_texts_have_no_value(text: str, none: None) -> None:
    assert other_notation(text) is none


@pytest.mark.parametrize(
    ("text", "value"), [*rows_of("number_cases", "numeral"), *rows_of("number_cases", "no numeral")]
)
def test_numerals_have_their_exact_value(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Fraction(value))


@given(st.integers(min_value=-(10**15), max_value=10**15))
@settings(deadline=None)
def test_grouping_and_money_do_not_change_an_integer(number: int) -> None:
    sign, digits = ("-" if number < 0 else ""), abs(number)
    for written in (f"{number}", f"{number:,}", f"{sign}${digits:,}", f"{number}.", f"{number:,}.0"):
        assert parse_number(written) == number


@given(st.text(max_size=80))
@settings(deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_number(text)


LENGTH = ["m", "meters", "metre", "cm", "km", "mm", "nm", "in", "inches", "ft", "feet", "yards", "miles", "µm"]
TIME = ["s", "seconds", "min", "minutes", "h", "hrs", "hours", "days", "weeks", "ms"]
SPEED = ["m/s", "km/h", "kilometers per hour", "mph", "m s^-1"]
VOLUME = ["L", "mL", "liters", "m^3", "cubic centimeters", "cm3", "dm^3"]
MONEY = ["dollars", "cents", "USD", "million dollars"]
FAMILIES = [LENGTH, TIME, SPEED, VOLUME, MONEY]


@given(st.data(), st.fractions(min_value=0, max_value=10**6, max_denominator=1000))
def test_a_quantity_is_equal_to_itself_in_other_units_and_to_nothing_else(
    data: st.DataObject, number: Fraction
) -> None:
    family, other = data.draw(st.lists(st.sampled_from(FAMILIES), min_size=2, max_size=2, unique_by=id))
    one, two = data.draw(st.sampled_from(family)), data.draw(st.sampled_from(family))
    sizes = [unit.size * unit.count for unit in (unit_of(one), unit_of(two)) if unit is not None]
    written, same = rf"{number} \text{{ {one}}}", rf"{number * sizes[0] / sizes[1]} \text{{ {two}}}"
    different = rf"{number * sizes[0] / sizes[1] + 1} \text{{ {two}}}"
    assert [compare_quickly(*pair) for pair in readings(written, same)] == [True]
    assert [compare_quickly(*pair) for pair in readings(written, different)] == [False]
    assert readings(written, rf"{number} \text{{ {data.draw(st.sampled_from(other))}}}") == []
    assert [compare_quickly(*pair) for pair in readings(written, str(number))] == ["million" not in one or not number]


@pytest.mark.parametrize(("text", "none"), rows_of("number_cases", "no unit"))
def test_other_texts_are_no_units(text: str, none: None) -> None:
    assert unit_of(text) is none


@pytest.mark.parametrize(("expression", "value"), rows_of("number_cases", "quantity"))
def test_values_in_front_of_units(expression: str, value: str) -> None:
    assert quantity(expression)[0] == value
