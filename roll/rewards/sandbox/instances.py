"""Objects of the tests' own data classes, such as ``ListNode``, in both processes: they travel as their attributes.

Each side has objects of its own, known by a common key; every message brings the attributes of those it reaches, so a
change on one side arrives on the other, and cycles end.  Comparisons stay on the tests' side, with the tests' class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.rewards.sandbox.values import Encoded, decode, encode

Encoder = Callable[[Any], Encoded]
Decoder = Callable[[dict[str, Any]], Any]


class Instances:
    """One side's objects.

    Args:
        mark: begins the keys that this side gives.
        names: classes whose objects travel so.
        find_class: this side's class of a name.
    """

    def __init__(self, mark: str, names: Sequence[str], find_class: Callable[[str], Any]) -> None:
        self._mark = mark
        self._names = frozenset(names)
        self._find_class = find_class
        self._by_key: dict[str, Any] = {}
        self._keys: dict[int, str] = {}
        self._reached: list[str] = []

    def encode(self, value: Any) -> Encoded | None:
        """A reference to the object; None if it is of no such class."""
        kind = type(value)
        if kind.__name__ not in self._names or self._find_class(kind.__name__) is not kind:
            return None
        key = self._keys.get(id(value))
        if key is None:
            key = f"{self._mark}{len(self._by_key)}"
            self._add(key, value)
        self._reached.append(key)
        return {"t": "instance", "key": key}

    def _add(self, key: str, value: Any) -> None:
        self._by_key[key] = value
        self._keys[id(value)] = key

    def decode(self, data: Mapping[str, Any]) -> Any:
        return self._by_key[data["key"]]

    def attributes(self, other: Encoder, also: Sequence[str] = ()) -> dict[str, Any]:
        """Class and attributes of all objects that were encoded since the last call, and of what they refer to."""
        found: dict[str, Any] = {}
        self._reached += also
        while self._reached:
            key = self._reached.pop()
            if key not in found:
                value = self._by_key[key]
                found[key] = {}
                state = [[name, encode(item, other)] for name, item in state_of(value)]
                found[key] = {"class": type(value).__name__, "state": state}
        return found

    def update(self, sent: Mapping[str, Any], other: Decoder) -> None:
        """Make the objects of a message, and give them and the known ones their attributes.

        Raises:
            ValueError, KeyError, TypeError: it is nothing of the kind.
        """
        for key, item in sent.items():
            if key not in self._by_key:
                if item["class"] not in self._names:
                    raise ValueError(f"no class {item['class']!r}")
                kind = self._find_class(item["class"])
                self._add(str(key), kind.__new__(kind))
        for key, item in sent.items():
            value = self._by_key[key]
            for name, encoded in item["state"]:
                if not str(name).isidentifier() or str(name).startswith("__"):
                    raise ValueError(f"no attribute {name!r}")
                object.__setattr__(value, name, decode(encoded, other))


def state_of(value: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    present = [(name, getattr(value, name)) for name in slots if not name.startswith("__") and hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *present]
