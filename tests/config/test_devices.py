"""``device_mapping`` is parsed, never evaluated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.reading.fields import parse_device_mapping

FORMS = [
    ([0, 1], [0, 1]),
    (3, [3]),
    ("[6, 7]", [6, 7]),
    ("(6, 7)", [6, 7]),
    ("list(range(0,8))", list(range(8))),
    ("list(range(8))", list(range(8))),
    ("range(2, 4)", [2, 3]),
    (" list(range(0, 8, 2)) ", [0, 2, 4, 6]),
    ("list(range(3,-1,-1))", [3, 2, 1, 0]),
    ("list(range(0,2)) + [5] + list(range(6,8))", [0, 1, 5, 6, 7]),
]


@pytest.mark.parametrize(("written", "ids"), FORMS)
def test_forms(written: object, ids: list[int]) -> None:
    assert parse_device_mapping(written) == ids


REFUSED = [
    "",
    "0-7",
    "[0, 1",
    "list(range(0,8)) * 2",
    "list(range(0,10**9))",
    "list(range(0,1000000000))",
    "list(range(0,8,0))",
    "list(range(*[8]))",
    "list(range(0, stop=8))",
    "list(map(int, '01'))",
    "__import__('os').system('true')",
    "[x for x in range(3)]",
    "lambda: 0",
    "[True]",
    "[0.0]",
    "['0']",
    "[-1]",
    "[]",
    "[0] + [0]",
    None,
    True,
    1.0,
    {"0": 1},
    "(" * 500,
    "[0]" + "+[0]" * 20_000,
]


@pytest.mark.parametrize("written", REFUSED)
def test_refused(written: object) -> None:
    with pytest.raises(ValueError):
        parse_device_mapping(written)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 9))
def test_ranges_are_python_ranges(start: int, stop: int, step: int) -> None:
    written = f"list(range({start}, {stop}, {step}))"
    expected = list(range(start, stop, step))
    if expected:
        assert parse_device_mapping(written) == expected
    else:
        with pytest.raises(ValueError, match="at least one device"):
            parse_device_mapping(written)
