"""The trusted side of calls: objects of a response's process, as the tests see them.

One rule keeps a response from deciding its own verdict: **the other side of a comparison never crosses**.  A result is
compared here, as plain data; an operator between an object of the response's own class and a plain value would hand the
expected value to the response's code, which could answer that it is equal to anything.  So ``object == 4`` is False,
and ``object - 4`` raises ``TypeError``, unless ``object_operators`` allows it.  Objects of classes derived from plain
ones (``int``, ``tuple``, ``dict``, ...) take part with their plain data.
"""

from __future__ import annotations

import builtins
import collections
import io
import operator
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from roll.rewards.sandbox.values import Channel, ChannelClosed, Encoded, MessageTooLarge, Side

_SPECIAL = ("name", "doc", "dict", "bases", "mro", "qualname", "module", "annotations", "abstractmethods", "defaults")
_READABLE = frozenset(f"__{name}__" for name in _SPECIAL)
"""Special attributes that tests may read of the response's objects."""
_ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)
_INPUT = builtins.input


class ResponseGone(BaseException):
    """The response's process has ended or does not answer in time; nothing more can be asked of it.

    Not an ``Exception``: tests that expect one must not take this for it. Where tests catch everything,
    :meth:`Remote.require_answers` raises it again.
    """

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class ResponseError(Exception):
    """An exception of a response's own class, or one with no place among the built-in ones."""


class Remote(Side):
    """The response's process.

    Args:
        channel: to it.
        object_operators: whether plain values may be handed to its operators.
        ends_iterations: whether a call may raise ``StopIteration``, which ``map`` takes for the end of its input: only
            for tests that expect it by name.
        classes: the tests' classes that only hold data.
        find_class: finds them by name.
    """

    def __init__(
        self,
        channel: Channel,
        object_operators: bool = False,
        ends_iterations: bool = False,
        classes: Sequence[str] = (),
        find_class: Callable[[str], Any] = lambda name: None,
    ) -> None:
        super().__init__("t", classes, find_class)
        self._channel = channel
        self._ends_iterations = ends_iterations
        self._turn = threading.RLock()
        self.object_operators = object_operators
        self.impossible: str | None = None
        """A request of the tests that this sandbox cannot serve: their failure says nothing about the response."""
        self.gone: ResponseGone | None = None
        self._callbacks: list[Callable[..., Any]] = []
        self._proxies: dict[int, Any] = {}

    def set_deadline(self, seconds: float) -> None:
        """Require answers to all further requests within ``seconds``."""
        self._channel.deadline = time.monotonic() + seconds

    def wait_ready(self, preparation: dict[str, Any] | None = None) -> dict[str, Any]:
        """Let the source run; how it went: ``ready``, ``compile_error`` or ``raised``.

        Args:
            preparation: the tests' data ``classes``, the ``prelude`` that defines them, and whether changed arguments
                come back from functions that return something (``in_place``).
        """
        return self._exchange(preparation or {})

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Perform an operation of :class:`roll.rewards.sandbox.candidate.Server` over there.

        Raises:
            ResponseGone: no answer.
            Exception: what the response raised, as the built-in exception that it derives from.
        """
        request: dict[str, Any] = {"do": operation, "args": [self.encode(item) for item in args]}
        if kwargs:
            request["kwargs"] = {name: self.encode(item) for name, item in kwargs.items()}
        request["instances"] = self.attributes()
        reply = self._exchange(request)
        try:
            if "raised" in reply:
                raised = reply["raised"]
                kind = self._exception_class(raised)
                # Some built-in exceptions have constructors of their own; all keep their arguments at this one.
                error = kind.__new__(kind, str(raised.get("text", "")))
                if hasattr(kind, "_roll_number"):
                    error.__dict__["_roll_error"] = self.decode({"t": "object", "id": raised["error"]})
            else:
                self.update(reply.get("instances", {}))
                for key, item in reply.get("changed", []):
                    restore(kwargs[key] if isinstance(key, str) else args[key], self.decode(item))
                return self.decode(reply["value"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as nonsense:
            raise self._give_up(f"the answer is no value: {nonsense}") from nonsense
        if isinstance(error, _ENDS_OF_ITERATION) and operation not in ("next", "anext") and not self._ends_iterations:
            raise RuntimeError(f"the response raised {type(error).__name__}")
        raise error

    def require_answers(self) -> None:
        """
        Raises:
            ResponseGone: a request had no answer, whatever the tests did about it. Nothing more is asked: a late answer
                would be taken for that to the next request.
        """
        if self.gone is not None:
            raise self.gone

    def _give_up(self, reason: str, timed_out: bool = False) -> ResponseGone:
        self.gone = ResponseGone(reason, timed_out)
        return self.gone

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        self.require_answers()
        try:
            with self._turn:
                self._channel.send(request)
                while True:
                    reply = self._channel.receive()
                    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                        if isinstance(reply.get(name), str):
                            stream.write(reply[name])
                    if "callback" not in reply:
                        return reply
                    self._channel.send(self._run_callback(reply))
        except TimeoutError as error:
            raise self._give_up("no answer in time", timed_out=True) from error
        except (ChannelClosed, MessageTooLarge) as error:
            raise self._give_up(str(error) or "the process is gone") from error

    def _run_callback(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            which = message["callback"]
            function = INPUT[which] if isinstance(which, str) else self._callbacks[which]
            self.update(message.get("instances", {}))
            arguments = [self.decode(item) for item in message["args"]]
            value = self.encode(function(*arguments))
            return {"value": value, "instances": self.attributes()}
        except Exception as error:  # the function's failure is the caller's to deal with
            return {"raised": type(error).__name__, "text": str(error)[:200]}

    def encode_foreign(self, value: Any) -> Encoded:
        if isinstance(value, Proxy) or (isinstance(value, type) and hasattr(value, "_roll_number")):
            return {"t": "object", "id": value._roll_number}
        if isinstance(value, Iterator) and not isinstance(value, Coroutine | io.IOBase):
            self._callbacks.append(lambda: next(([item] for item in value), None))
            return {"t": "iterator", "id": len(self._callbacks) - 1}
        if callable(value) and not is_mock_with_attributes(value):
            self._callbacks.append(value)
            return {"t": "callback", "id": len(self._callbacks) - 1}
        reason = f"a {type(value).__name__} cannot be handed to the response: only data, functions and data classes"
        self.impossible = self.impossible or reason
        raise TypeError(reason)

    def decode_foreign(self, data: dict[str, Any]) -> Any:
        if data["t"] != "object":
            raise ValueError(f"no value: {data['t']!r}")
        if "bases" in data:
            return self._exception_class(data)
        number = int(data["id"])
        if number not in self._proxies:
            kind = AwaitableProxy if data.get("awaitable") is True else Proxy
            self._proxies[number] = kind(self, number, bool(data.get("plain")), bool(data.get("module")))
        return self._proxies[number]

    def _exception_class(self, data: dict[str, Any]) -> type[Exception]:
        """A local class for one of the response's exceptions, derived from those of its bases; for a built-in one (or
        the nearest) that itself. A test may expect any of them."""
        base: type[Exception] = ResponseError
        for name in data["bases"]:
            found = getattr(builtins, str(name), None)
            if isinstance(found, type) and issubclass(found, Exception):
                base = found
                break
        if "id" not in data:
            return base
        number = int(data["id"])
        if number not in self._proxies:
            members = {
                "_roll_number": number,
                "__init__": lambda self, *args: None,
                "__getattr__": attribute_of_error,
            }
            parents = dict.fromkeys(self._exception_class(parent) for parent in data["parents"])
            self._proxies[number] = type(str(data["name"]), tuple(parents) or (base,), members)
        found = self._proxies[number]
        return found if isinstance(found, type) else base


def attribute_of_error(error: BaseException, name: str) -> Any:
    """An attribute that only the exception in the response's process has."""
    if "_roll_error" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__["_roll_error"], name)


def is_mock_with_attributes(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock) and bool(value._mock_children)


def restore(argument: Any, after: Any) -> None:
    """A function that returns None has worked on its arguments in place: so the tests see them."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(argument, numpy.ndarray) and isinstance(after, numpy.ndarray):
        if argument.shape == after.shape:
            argument[...] = after
    elif isinstance(argument, (list, bytearray)) and type(argument) is type(after):
        argument[:] = after
    elif isinstance(argument, collections.deque) and isinstance(after, collections.deque):
        argument.clear()
        argument.extend(after)
    elif (isinstance(argument, dict) and isinstance(after, dict)) or (
        isinstance(argument, set) and isinstance(after, set)
    ):
        argument.clear()
        argument.update(after)


def read_input(prompt: str) -> str:
    """As the tests would: what they have put in place of ``input``, else a line of what they have put as input."""
    return str(builtins.input(prompt)) if builtins.input is not _INPUT else next_line(prompt)


def next_line(prompt: str) -> str:
    """
    Raises:
        EOFError: there is no more.
    """
    sys.stdout.write(prompt)
    line = read_line()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.removesuffix("\n")


def read_line() -> str:
    return str(sys.stdin.readline())


INPUT: dict[str, Callable[..., Any]] = {"input": read_input, "readline": read_line}
"""Requests that a response may make of the tests' process, by name."""


class Proxy:
    """An object of the response's process."""

    def __init__(self, remote: Remote, number: int, plain: bool, module: bool) -> None:
        object.__setattr__(self, "_roll_remote", remote)
        object.__setattr__(self, "_roll_number", number)
        object.__setattr__(self, "_roll_plain", plain)
        object.__setattr__(self, "_roll_module", module)

    _roll_remote: Remote
    _roll_number: int
    _roll_plain: bool
    _roll_module: bool

    def __getattr__(self, name: str) -> Any:
        # What Python's own machinery looks for is not an attribute of the response's object.
        if name.startswith("__") and name.endswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self._roll_remote.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._roll_remote.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._roll_remote.ask("call", self, *args, **kwargs)

    def __len__(self) -> int:
        return int(self._roll_remote.ask("len", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._roll_remote.ask("iter", self)
        if not isinstance(iterator, Proxy):
            raise TypeError("the response's iterator is none")
        return iterator

    def __next__(self) -> Any:
        return self._roll_remote.ask("next", self)

    def __contains__(self, item: Any) -> bool:
        """By iteration: the item, probably an expected one, does not cross."""
        return any(item == own for own in self)

    def __bool__(self) -> bool:
        return self._roll_remote.ask("bool", self) is True

    def __str__(self) -> str:
        return exactly_text(self._roll_remote.ask("str", self))

    def __repr__(self) -> str:
        return exactly_text(self._roll_remote.ask("repr", self))

    def __hash__(self) -> int:
        return hash(plain_of(self)) if self._roll_plain else hash(("roll", self._roll_number))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._roll_remote.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
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

    def send(self, value: Any) -> Any:
        raise StopIteration(self._roll_remote.ask("await", self))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *details: Any) -> Any:
        raise details[0]

    def close(self) -> None:
        """It has run, or never will."""


# Not a base class: the machinery of abstract classes would take Proxy.__subclasscheck__ for its own.
Coroutine.register(AwaitableProxy)


def exactly_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("the response's text is none")
    return value


def plain_of(value: Any) -> Any:
    """Plain data of a proxy that has it (as it is now); other values as they are."""
    return value._roll_remote.ask("plain", value) if isinstance(value, Proxy) and value._roll_plain else value


def _binary(name: str, reflected: bool) -> Callable[[Proxy, Any], Any]:
    local = getattr(operator, name)

    def operate(self: Proxy, other: Any) -> Any:
        pair = (other, self) if reflected else (self, other)
        if isinstance(other, Proxy) or self._roll_remote.object_operators:
            return self._roll_remote.ask(name, *pair)
        if self._roll_plain:
            return local(*map(plain_of, pair))
        return NotImplemented

    return operate


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._roll_remote.ask(name, self, *args)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift"
for _name in _COMPARISONS:
    setattr(Proxy, f"__{_name}__", _binary(_name, reflected=False))
for _name in _ARITHMETIC.split():
    setattr(Proxy, f"__{_name.strip('_')}__", _binary(_name, reflected=False))
    setattr(Proxy, f"__r{_name.strip('_')}__", _binary(_name, reflected=True))
for _name in ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "copy", "aiter"):
    setattr(Proxy, f"__{_name}__", _forwarded(_name))
