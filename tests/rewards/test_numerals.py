from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.answers import parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("72.", 72),
        ("72.00", 72),
        ("072", 72),
        ("+72", 72),
        ("-72", -72),
        ("−72", -72),
        ("$72", 72),
        ("\\$72", 72),
        ("€ 72", 72),
        ("-$72", -72),
        ("$-72", -72),
        ("1,234", 1234),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1,234,", 1234),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("1 / 3", Fraction(1, 3)),
        ("-1/3", Fraction(-1, 3)),
        ("25%", 25),
        ("25\\%", 25),
    ],
)
def test_numerals_have_their_exact_value(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", ".", "-", "$", ",", "12,34", "1,2345", "1.2.3", "1e3", "--1", "-$-1", "1/0", "7 apples", "x", "٣", "9" * 100],
)
def test_what_is_no_numeral_has_no_value(text: str) -> None:
    assert parse_number(text) is None


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
