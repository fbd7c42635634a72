"""Units of numbers: which texts are units, and that equal quantities are equal in every unit of their dimension."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.math_rule import compare_quickly, readings
from roll.rewards.units import quantity, unit_of

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


@pytest.mark.parametrize("text", ["", "x", "apples", "ab", "m/x", "metersx", "sin", "k", "5", "m" * 100])
def test_other_texts_are_no_units(text: str) -> None:
    assert unit_of(text) is None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (r"\sqrt{2}\text{ m}", r"\sqrt{2}"),
        ("1 hour 30 minutes", "3/2"),
        ("3 dozen", "36"),
        ("2.5 million", "2500000"),
        (r"\$5", "5"),
        ("2x", "2x"),
        ("x m", "x m"),
        ("3 apples", "3 apples"),
        ("m", "m"),
    ],
)
def test_values_in_front_of_units(expression: str, value: str) -> None:
    assert quantity(expression)[0] == value
