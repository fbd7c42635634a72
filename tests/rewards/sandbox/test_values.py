"""Values travel exactly; outputs are compared as contests compare them."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.sandbox.values import Side, decode, encode, encode_class, equal_output, equal_values, shared_class


def refuse(value: Any) -> Any:
    raise TypeError(f"not plain: {value!r}")


def travelled(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


NUMBERS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
LEAVES = st.none() | NUMBERS | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=40, deadline=None)
def test_plain_values_travel_exactly(value: Any) -> None:
    arrived = travelled(value)
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, (set, dict, list, tuple))


def test_further_kinds_travel() -> None:
    for value in (
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 12, 30),
        collections.deque([1, (2,)]),
        range(1, 9, 2),
        bytearray(b"ab"),
        float("inf"),
    ):
        assert travelled(value) == value
        assert type(travelled(value)) is type(value)
    assert travelled(collections.Counter("aab")) == {"a": 2, "b": 1}


def test_arrays_travel() -> None:
    import numpy

    for array in (numpy.arange(6.0).reshape(2, 3).T, numpy.array([True]), numpy.array(["a", "bc"])):
        arrived = travelled(array)
        assert arrived.dtype == array.dtype
        assert numpy.array_equal(arrived, array)
    assert travelled(numpy.float64(0.5)) == 0.5
    with pytest.raises(TypeError):
        travelled(numpy.array([object()]))
    with pytest.raises(ValueError, match="an array of object"):
        decode({"t": "array", "v": "", "dtype": "O", "shape": [0]}, refuse)


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333334", True),
        ("0.34", "0.33", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("1000000", "1000001", False),
        ("nan", "1.0", False),
        ("YES", "Yes", False),
        ("", "", True),
        ("x", "", False),
        ("a 1.0000000001", "a 1.0", True),
        ("1e400", "1.0", False),
    ],
)
def test_outputs(printed: str, expected: str, equal: bool) -> None:
    assert equal_output(printed, expected, 1e-6) is equal


@pytest.mark.parametrize(
    ("given_value", "wanted", "equal"),
    [
        ((1, 2), [1, 2], True),
        ([(1, 2), [3]], [[1, 2], [3]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", "1": "b"}, {"1": "a"}, False),
        (1, True, False),
        (True, 1, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        ("1", 1, False),
        (None, [], False),
        (10**400, 1.0, False),
        ("ab", ["a", "b"], False),
        (float("nan"), 1.0, False),
    ],
)
def test_results(given_value: Any, wanted: Any, equal: bool) -> None:
    assert equal_values(given_value, wanted, 1e-6) is equal


class Node:
    def __init__(self, val: Any, after: Any = None) -> None:
        self.val, self.after = val, after


def sides() -> tuple[Side, Side]:
    return Side("t", ["Node"], {"Node": Node}.get), Side("r", ["Node"], {"Node": Node}.get)


def hand_over(value: Any, here: Side, there: Side) -> Any:
    """The value that the other side gets, through JSON."""
    reference = here.encode(value)
    sent = json.loads(json.dumps({"value": reference, "instances": here.attributes()}))
    there.update(sent["instances"])
    return there.decode(sent["value"])


def test_objects_of_data_classes_keep_their_identity() -> None:
    here, there = sides()
    first = Node(1)
    first.after = Node([first, {"x": 2}], first)
    copy = hand_over(first, here, there)
    assert copy is not first
    assert copy.after.after is copy
    assert copy.after.val == [copy, {"x": 2}]
    copy.after.val = 3
    copy.after = Node(4, copy.after)
    assert hand_over(copy, there, here) is first, "it comes back as itself"
    assert (first.after.val, first.after.after.val, first.after.after.after) == (4, 3, first)


def test_long_chains_of_objects() -> None:
    here, there = sides()
    head = None
    for number in range(20_000):
        head = Node(number, head)
    found, count = hand_over(head, here, there), 0
    while found is not None:
        found, count = found.after, count + 1
    assert count == 20_000


@pytest.mark.parametrize(
    "sent",
    [
        {"r0": {"class": "Node", "state": [["__class__", 1]]}},
        {"r0": {"class": "Node", "state": [["a b", 1]]}},
        {"r0": {"class": "int", "state": []}},
        {"r0": {"state": []}},
        {"r0": {"class": "Node", "state": [["val", {"t": "instance", "key": "r9"}]]}},
    ],
)
def test_objects_that_are_none(sent: dict[str, Any]) -> None:
    here, _ = sides()
    with pytest.raises((ValueError, KeyError)):
        here.update(sent)


def test_classes_that_both_sides_have() -> None:
    for kind in (int, dict, collections.OrderedDict, object):
        sent = encode_class(kind)
        assert sent is not None
        assert shared_class(sent["module"], sent["name"]) is kind
    assert encode_class(Node) is None
    assert encode_class(ValueError) is None, "exceptions have a way of their own"
    for module, name in (("os", "popen"), ("builtins", "print"), ("builtins", "__loader__"), ("subprocess", "Popen")):
        with pytest.raises(ValueError, match="no class"):
            shared_class(module, name)
