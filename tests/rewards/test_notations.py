"""Numbers in other notations than decimal digits: their values, and that another number stays wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.answers import in_words, other_notation
from roll.rewards.math_rule import compare_quickly

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


@pytest.mark.parametrize(
    "text",
    ["", "A_{12}", "x_2", "12_2", "0b12", "0x", "one half", "three apples", "one third", "first", "a", "1e3", "10_1"],
)
def test_other_texts_have_no_value(text: str) -> None:
    assert other_notation(text) is None
