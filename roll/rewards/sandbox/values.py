"""Python values as JSON and back, exactly: what two processes that do not trust each other hand to each other.

Only plain data travels; unlike a pickle, a message cannot make its reader run anything.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import importlib
import sys
from collections.abc import Callable
from typing import Any

Encoded = Any
_TAG = "t"
_EXACT_INTEGERS = 2**53
_SIZED: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque"}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "complex": (complex, str, complex),
}
_SHARED_MODULES = ("builtins", "abc", "collections", "collections.abc", "enum", "numbers", "typing")
"""Classes of these are the same in both processes, and travel by their names."""
_ARRAY_KINDS = "biufcU"
"""Kinds of NumPy arrays that travel by value; arrays of objects do not."""


def encode(value: Any, other: Callable[[Any], Encoded]) -> Encoded:
    """
    Args:
        value: anything.
        other: encodes what is no plain data, or raises.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_EXACT_INTEGERS <= value <= _EXACT_INTEGERS else {_TAG: "int", "v": hex(value)}
    if kind is list:
        return [encode(item, other) for item in value]
    if kind in _SIZED:
        return {_TAG: _SIZED[kind], "v": [encode(item, other) for item in value]}
    if kind in _MAPPINGS:
        return {_TAG: "dict", "v": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "v": base64.b64encode(value).decode()}
    for tag, (exact, to_text, _) in _AS_TEXT.items():
        if kind is exact:
            return {_TAG: tag, "v": to_text(value)}
    if kind is range:
        return {_TAG: "range", "v": [value.start, value.stop, value.step]}
    return _encode_array(value, other)


def _encode_array(value: Any, other: Callable[[Any], Encoded]) -> Encoded:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)) or value.dtype.kind not in _ARRAY_KINDS:
        return other(value)
    if isinstance(value, numpy.generic):
        return encode(value.item(), other)
    data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
    return {_TAG: "array", "v": data, "dtype": value.dtype.str, "shape": list(value.shape)}


def encode_class(kind: type) -> Encoded | None:
    """One of Python's classes that both processes have, exceptions aside; None for any other."""
    if kind.__module__ not in _SHARED_MODULES or issubclass(kind, BaseException):
        return None
    known = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return {_TAG: "type", "module": kind.__module__, "name": kind.__name__} if known else None


def shared_class(module: str, name: str) -> type:
    """
    Raises:
        ValueError: it is none of those.
    """
    public = module in _SHARED_MODULES and not name.startswith("_")
    found = getattr(importlib.import_module(module), name, None) if public else None
    if not isinstance(found, type):
        raise ValueError(f"no class {module}.{name}")
    return found


def decode(data: Encoded, other: Callable[[dict[str, Any]], Any]) -> Any:
    """
    Args:
        data: what :func:`encode` gave, or what a hostile process pretends that it gave.
        other: decodes what ``other`` of :func:`encode` encoded.

    Raises:
        ValueError, TypeError, KeyError, RecursionError, ...: it is nothing of the kind.
    """
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    tag = data.get(_TAG)
    if tag == "int":
        return int(data["v"], 16)
    if tag in _BUILD:
        return _BUILD[tag]([decode(item, other) for item in data["v"]])
    if tag == "dict":
        return {decode(key, other): decode(item, other) for key, item in data["v"]}
    if tag in ("bytes", "bytearray"):
        raw = base64.b64decode(data["v"])
        return raw if tag == "bytes" else bytearray(raw)
    if tag in _AS_TEXT:
        return _AS_TEXT[tag][2](data["v"])
    if tag == "range":
        start, stop, step = data["v"]
        return range(start, stop, step)
    if tag == "array":
        return _decode_array(data)
    return other(data)


def _decode_array(data: dict[str, Any]) -> Any:
    import numpy

    dtype = numpy.dtype(str(data["dtype"]))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype}")
    flat = numpy.frombuffer(base64.b64decode(data["v"]), dtype=dtype)
    return flat.reshape([int(length) for length in data["shape"]]).copy()
