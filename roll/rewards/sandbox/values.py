"""Python values as JSON and back, exactly: what two processes that do not trust each other hand to each other, over a
socket, and how a value is compared with the expected one. Data only, never code."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import importlib
import json
import math
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Encoded = Any
_TAG = "t"
_EXACT_INTEGERS = 2**53
_SIZED: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque"}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_BUILD: dict[str, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _SIZED.items()}
_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "complex": (complex, str, complex),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "bytearray": (
        bytearray,
        lambda value: base64.b64encode(value).decode(),
        lambda text: bytearray(base64.b64decode(text)),
    ),
    "ellipsis": (types.EllipsisType, lambda value: "", lambda text: Ellipsis),
}
_SHARED_MODULES = ("builtins", "abc", "collections", "collections.abc", "enum", "numbers", "typing")
"""Classes of these are the same in both processes, and travel by their names."""
_ARRAY_KINDS = "biufcU"  # kinds of NumPy arrays that travel by value; arrays of objects do not


def encode(value: Any, other: Callable[[Any], Encoded]) -> Encoded:
    """The value as JSON; ``other`` encodes what is not plain data, or raises."""
    # Exact types: an instance of a subclass would come back as one of its base.
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        # In hexadecimal, since Python refuses to read decimal integers of more than 4,300 digits.
        return value if -_EXACT_INTEGERS <= value <= _EXACT_INTEGERS else {_TAG: "int", "v": hex(value)}
    if kind is list:
        return [encode(item, other) for item in value]
    if kind in _SIZED:
        return {_TAG: _SIZED[kind], "v": [encode(item, other) for item in value]}
    if kind in _MAPPINGS:
        return {_TAG: "dict", "v": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    for tag, (exact, to_text, _) in _AS_TEXT.items():
        if kind is exact:
            return {_TAG: tag, "v": to_text(value)}
    if kind in (range, slice):
        return {_TAG: kind.__name__, "v": [encode(each, other) for each in (value.start, value.stop, value.step)]}
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
    """The class of :func:`encode_class`; ``ValueError`` for any other."""
    public = module in _SHARED_MODULES and not name.startswith("_")
    found = getattr(importlib.import_module(module), name, None) if public else None
    if not isinstance(found, type):
        raise ValueError(f"no class {module}.{name}")
    return found


def decode(data: Encoded, other: Callable[[dict[str, Any]], Any]) -> Any:
    """The value of what :func:`encode` gave, or what a hostile process pretends that it gave; ``other`` decodes what
    that of :func:`encode` encoded."""
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
    if tag in _AS_TEXT:
        return _AS_TEXT[tag][2](data["v"])
    if tag in ("range", "slice"):
        start, stop, step = (decode(each, other) for each in data["v"])
        return (range if tag == "range" else slice)(start, stop, step)
    if tag == "array":
        import numpy

        dtype = numpy.dtype(str(data["dtype"]))
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"an array of {dtype}")
        flat = numpy.frombuffer(base64.b64decode(data["v"]), dtype=dtype)
        # A copy, since an array over bytes is read-only.
        return flat.reshape([int(length) for length in data["shape"]]).copy()
    return other(data)


class Side:
    """One side of a channel: its values as data and back. Objects of the tests' data classes (``names``, here found by
    ``find_class``) keep their identity, by keys that begin with this side's ``mark``."""

    def __init__(self, mark: str, names: Sequence[str], find_class: Callable[[str], Any]) -> None:
        self._mark = mark
        self._names = frozenset(names)
        self._find_class = find_class
        self._by_key: dict[str, Any] = {}
        self._keys: dict[int, str] = {}
        self._reached: list[str] = []
        self._copies = 0

    def encode(self, value: object) -> Encoded:
        return encode(value, self._encode_other)

    def decode(self, data: Encoded) -> Any:
        return decode(data, self._decode_other)

    def encode_foreign(self, value: object) -> Encoded:
        """Data for a value that is neither plain nor of a class that both sides have."""
        raise TypeError(f"no data: {value!r}")

    def decode_foreign(self, data: dict[str, Any]) -> Any:
        """The opposite of the other side's :meth:`encode_foreign`."""
        raise ValueError(f"no value: {data['t']!r}")

    def _encode_other(self, value: object) -> Encoded:
        kind = type(value)
        if kind.__name__ in self._names and self._find_class(kind.__name__) is kind:
            key = self._keys.get(id(value))
            if key is None:
                key = f"{self._mark}{len(self._by_key)}"
                self._by_key[key], self._keys[id(value)] = value, key
            self._reached.append(key)
            return {"t": "instance", "key": key}
        if isinstance(value, type) and (shared := encode_class(value)) is not None:
            return shared
        return self.encode_foreign(value)

    def _decode_other(self, data: dict[str, Any]) -> Any:
        if data["t"] == "instance":
            return self._by_key[data["key"]]
        if data["t"] == "type":
            return shared_class(data["module"], data["name"])
        return self.decode_foreign(data)

    def attributes(self, also: Sequence[str] = ()) -> dict[str, Any]:
        """Class and attributes of all objects that were encoded since the last call, and of what they refer to."""
        found: dict[str, Any] = {}
        self._reached += also
        while self._reached:
            key = self._reached.pop()
            if key not in found:
                value = self._by_key[key]
                found[key] = {}
                slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
                present = [name for name in slots if not name.startswith("__") and hasattr(value, name)]
                held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in present}}
                state = [[name, self.encode(item)] for name, item in held.items()]
                found[key] = {"class": type(value).__name__, "state": state}
        return found

    def with_copies(self, encoded: Encoded) -> Encoded:
        """The same data, with copies of the objects that were just encoded in place of the objects themselves."""
        if not self._reached:
            return encoded
        self._copies += 1
        suffix = f".{self._copies}"
        copies = {
            key + suffix: {**item, "state": with_suffix(item["state"], suffix)}
            for key, item in self.attributes().items()
        }
        self.update(copies)
        self._reached += copies
        return with_suffix(encoded, suffix)

    def update(self, sent: Mapping[str, Any]) -> None:
        """Make the objects of a message, and give them and the known ones their attributes."""
        for key, item in sent.items():
            if key not in self._by_key:
                if item["class"] not in self._names:
                    raise ValueError(f"no class {item['class']!r}")
                kind = self._find_class(item["class"])
                made = kind.__new__(kind)
                self._by_key[str(key)], self._keys[id(made)] = made, str(key)
        for key, item in sent.items():
            value = self._by_key[key]
            for name, encoded in item["state"]:
                # Not __class__ or __dict__, by which a response could turn an object of the tests into one of another
                # class.
                if not str(name).isidentifier() or str(name).startswith("__"):
                    raise ValueError(f"no attribute {name!r}")
                object.__setattr__(value, name, self.decode(encoded))


def with_suffix(data: Encoded, suffix: str) -> Encoded:
    """The same data, with other keys for all objects."""
    if isinstance(data, list):
        return [with_suffix(item, suffix) for item in data]
    if not isinstance(data, dict):
        return data
    if data.get(_TAG) == "instance":
        return {**data, "key": data["key"] + suffix}
    return {name: with_suffix(item, suffix) for name, item in data.items()}


_HEADER = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other process is gone, or sent what is no message."""


class MessageTooLarge(Exception):
    """More bytes than a message may have."""


class Channel:
    """One end of a socket that carries JSON messages, each preceded by its length."""

    def __init__(self, descriptor: int, max_message: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._max_message = max_message
        self.deadline: float | None = None  # monotonic time after which sending and receiving raise `TimeoutError`

    def _limit_time(self) -> None:
        if self.deadline is None:
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def send(self, message: dict[str, Any]) -> None:
        """Send; ``MessageTooLarge`` where nothing was sent, ``ChannelClosed`` where nobody is there."""
        data = json.dumps(message).encode()
        if len(data) > self._max_message:
            raise MessageTooLarge
        self._limit_time()
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> dict[str, Any]:
        """The next message; ``ChannelClosed`` where nobody is there, or what came is no message."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > self._max_message:
            # The size is the other process's claim: nothing is read or allocated for it before it has been checked.
            raise ChannelClosed(f"a message of {size} bytes")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise ChannelClosed("what came is no message") from error
        if not isinstance(message, dict):
            raise ChannelClosed("what came is no message")
        return message

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            self._limit_time()
            try:
                part = self._socket.recv(min(size, 1 << 16))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed("the process is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


MAX_NUMERAL = 40  # characters; nobody expects a longer decimal fraction


def equal_output(printed: str, expected: str, tolerance: float) -> bool:
    """Line by line without white space at the ends; decimal fractions within ``tolerance``, as contests judge."""
    found, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    if len(found) != len(wanted):
        return False
    for line, other in zip(found, wanted, strict=True):
        tokens = line.split(), other.split()
        if line != other and (
            len(tokens[0]) != len(tokens[1])
            or not all(one == two or equal_decimals(one, two, tolerance) for one, two in zip(*tokens, strict=True))
        ):
            return False
    return True


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


def equal_values(given: object, wanted: object, tolerance: float) -> bool:
    """Compare a result with a value from a JSON file, which has no tuples and only strings as keys."""
    if isinstance(wanted, list):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            return False
        return all(equal_values(one, other, tolerance) for one, other in zip(given, wanted, strict=True))
    if isinstance(wanted, Mapping):
        if not isinstance(given, Mapping):
            return False
        keyed = {str(key): value for key, value in given.items()}
        if len(keyed) != len(given) or keyed.keys() != {str(key) for key in wanted}:
            return False
        return all(equal_values(keyed[str(key)], value, tolerance) for key, value in wanted.items())
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
