"""Objects of a response's process, as the tests see them.

One rule keeps a response from deciding its own verdict: **the other side of a comparison never crosses**.  A result is
compared here, as plain data; an operator between an object of the response's own class and a plain value would hand the
expected value to the response's code, which could answer that it is equal to anything.  So ``object == 4`` is False,
and ``object - 4`` raises ``TypeError``, unless ``object_operators`` allows it.  Objects of classes derived from plain
ones (``int``, ``tuple``, ``dict``, ...) are compared by their plain data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_READABLE = frozenset(
    f"__{name}__"
    for name in "name doc dict bases mro qualname module annotations abstractmethods defaults".split()  # noqa: SIM905
)
"""Special attributes that tests may read of the response's objects."""


class Proxy:
    """An object of the response's process."""

    _roll_remote: Any  # the `roll.rewards.sandbox.remote.Remote`, whose module imports this one
    _roll_number: int
    _roll_plain: bool
    _roll_class: bool
    _roll_value: Any

    def __init__(self, remote: object, number: int, plain: bool, is_class: bool) -> None:
        # Past __setattr__, which sets attributes of the response's object.
        own = {"remote": remote, "number": number, "plain": plain, "class": is_class, "value": None}
        self.__dict__.update({f"_roll_{name}": value for name, value in own.items()})

    def __getattr__(self, name: str) -> Any:
        # What Python's own machinery looks for is not an attribute of the response's object.
        if name.startswith("__") and name.endswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self._roll_remote.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._roll_remote.ask("setattr", self, name, value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._roll_remote.ask("call", self, *args, **kwargs)

    def __len__(self) -> int:
        return int(self._roll_remote.ask("len", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._roll_remote.ask("iter", self)
        if not isinstance(iterator, Proxy):
            raise TypeError("the response's iterator is not one")
        return iterator

    def __next__(self) -> Any:
        return self._roll_remote.ask("next", self)

    def __contains__(self, item: object) -> bool:
        """By iteration: the item is probably an expected value, which must not cross."""
        return any(item == own for own in self)

    def __bool__(self) -> bool:
        return self._roll_remote.ask("bool", self) is True

    def __str__(self, operation: str = "str") -> str:
        text = self._roll_remote.ask(operation, self)
        if type(text) is not str:
            raise TypeError("the response's text is none")
        return text

    def __repr__(self) -> str:
        return self.__str__("repr")

    def __hash__(self) -> int:
        return hash(plain_of(self)) if self._roll_plain else hash(("roll", self._roll_number))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and self._roll_remote.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: object) -> bool:
        return isinstance(subclass, Proxy | type) and self._roll_remote.ask("issubclass", subclass, self) is True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._roll_remote.ask("deepcopy", self)

    async def __anext__(self) -> Any:
        return self._roll_remote.ask("anext", self)

    async def __aenter__(self) -> Any:
        return await self._roll_remote.ask("getattr", self, "__aenter__")()

    async def __aexit__(self, *details: object) -> Any:
        return await self._roll_remote.ask("getattr", self, "__aexit__")(None, None, None)

    def __enter__(self) -> Any:
        return self._roll_remote.ask("getattr", self, "__enter__")()

    def __exit__(self, *details: object) -> Any:
        return self._roll_remote.ask("getattr", self, "__exit__")(None, None, None)


class AwaitableProxy(Proxy):
    """A coroutine of the response's process; awaited, it runs there to its end."""

    def __await__(self) -> Any:
        yield from ()
        return self._roll_remote.ask("await", self)

    def send(self, value: object) -> Any:
        raise StopIteration(self._roll_remote.ask("await", self))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *details: Any) -> Any:
        raise details[0]

    def close(self) -> None:
        """It has run, or never will."""


# Not a base class: the machinery of abstract classes would take Proxy.__subclasscheck__ for its own.
Coroutine.register(AwaitableProxy)


def plain_of(value: object) -> Any:
    """Plain data of a proxy that has it (as it is now); other values as they are."""
    if not isinstance(value, Proxy) or not value._roll_plain:
        return value
    if value._roll_value is None:
        found = value._roll_remote.ask("plain", value)
        if isinstance(found, (dict, list, set)):
            return found
        # An immutable value is read once: the response cannot choose another for each comparison.
        object.__setattr__(value, "_roll_value", found)
    return value._roll_value


def _binary(name: str, reflected: bool) -> Callable[[Proxy, Any], Any]:
    local = getattr(operator, name)

    def operate(self: Proxy, other: object) -> Any:
        pair = (other, self) if reflected else (self, other)
        if isinstance(other, Proxy) or self._roll_remote.object_operators:
            return self._roll_remote.ask(name, *pair)
        if self._roll_plain:
            return local(*map(plain_of, pair))
        return NotImplemented

    return operate


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _binary(_name, reflected=False))
for _name in "add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift".split():  # noqa: SIM905
    setattr(Proxy, f"__{_name.strip('_')}__", _binary(_name, reflected=False))
    setattr(Proxy, f"__r{_name.strip('_')}__", _binary(_name, reflected=True))
for _name in ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "copy", "aiter"):
    setattr(Proxy, f"__{_name}__", lambda self, *args, _name=_name: self._roll_remote.ask(_name, self, *args))
