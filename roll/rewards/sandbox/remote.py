"""The trusted side of calls: requests of the tests to a response's process, and what may come back from it."""

from __future__ import annotations

import builtins
import collections
import io
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from typing import Any

from roll.rewards.sandbox.proxies import AwaitableProxy, Proxy
from roll.rewards.sandbox.values import Channel, ChannelClosed, Encoded, MessageTooLarge, Side

_ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)
_INPUT = builtins.input
TEST_MODULES = ("tests", "test_solution")  # names of the modules that tests run in


class ResponseGone(BaseException):
    """The response's process has ended or does not answer in time; it takes no more requests.

    Not an ``Exception``: tests that expect one must not catch this. Where tests catch everything,
    :meth:`Remote.require_answers` raises it again.
    """

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class ResponseError(Exception):
    """An exception of a response's own class, or one that derives from no built-in class."""


class NotHandedOver(TypeError):
    """A value of the tests that cannot travel."""


class Remote(Side):
    """The response's process, at the other end of ``channel``.

    Args:
        object_operators: whether plain values may be handed to its operators.
        ends_iterations: whether a call may raise ``StopIteration``, which ``map`` takes for the end of its input: only
            for tests that expect it by name.
        classes: the tests' classes that only hold data, found by ``find_class``.
        copies: name of a source to the lines on which the response gets copies of its arguments.
    """

    def __init__(
        self,
        channel: Channel,
        object_operators: bool,
        ends_iterations: bool,
        classes: Sequence[str],
        find_class: Callable[[str], Any],
        copies: Mapping[str, Set[int]],
    ) -> None:
        super().__init__("t", classes, find_class)
        self._copies_on = {name: lines for name, lines in copies.items() if lines}
        self._handed_over: set[str] = set()
        self._channel = channel
        self._ends_iterations = ends_iterations
        self._turn = threading.RLock()
        self.object_operators = object_operators
        self.impossible: str | None = None
        """A request of the tests that this sandbox cannot serve: their failure says nothing about the response."""
        self.gone: ResponseGone | None = None
        self._named: set[int] = set()
        self._callbacks: list[Callable[..., Any]] = []
        self._proxies: dict[int, Any] = {}

    def set_deadline(self, seconds: float) -> None:
        """Require answers to all further requests within ``seconds``."""
        self._channel.deadline = time.monotonic() + seconds

    def ask(self, operation: str, *args: object, **kwargs: object) -> Any:
        """Perform an operation of :class:`roll.rewards.sandbox.candidate.Server` over there. Raises ``ResponseGone``:
        no answer; ``Exception``: what the response raised, as the built-in exception that it derives from."""
        try:
            request: dict[str, Any] = {"do": operation, "args": [self.encode(item) for item in args]}
            if kwargs:
                request["kwargs"] = {name: self.encode(item) for name, item in kwargs.items()}
        except NotHandedOver as reason:
            # A value that no function can receive is the row's mistake, unless the called object took the place of a
            # plain result.
            if operation == "call" and isinstance(args[0], Proxy) and args[0]._roll_number in self._named:
                self.impossible = self.impossible or str(reason)
            raise
        changes_come_back = operation == "call"
        if changes_come_back and self._gets_copies():
            request, changes_come_back = self.with_copies(request), False
        request |= {"instances": self._handed(), "in_place": changes_come_back}
        reply = self.exchange(request)
        try:
            if "raised" in reply:
                raised = reply["raised"]
                kind = self._exception_class(raised)
                # Some built-in exceptions have constructors of their own; this call stores the arguments for all.
                error = kind.__new__(kind, str(raised.get("text", "")))
                if hasattr(kind, "_roll_number"):
                    error.__dict__["_roll_error"] = self.decode({"t": "object", "id": raised["error"]})
            else:
                self._receive(reply.get("instances", {}))
                for key, item in reply.get("changed", []) if changes_come_back else ():
                    restore(kwargs[key] if isinstance(key, str) else args[key], self.decode(item))
                value = self.decode(reply["value"])
                # What the tests know by name: functions, classes and their instances, and their attributes.
                if isinstance(value, Proxy):
                    of = args[0] if args and isinstance(args[0], Proxy) else None
                    is_known = of is not None and of._roll_number in self._named
                    is_made = operation == "getattr" or (operation == "call" and of is not None and of._roll_class)
                    if operation == "get" or (is_known and is_made):
                        self._named.add(value._roll_number)
                return value
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as nonsense:
            raise self._give_up(f"the answer is no value: {nonsense}") from nonsense
        if isinstance(error, _ENDS_OF_ITERATION) and operation not in ("next", "anext") and not self._ends_iterations:
            raise RuntimeError(f"the response raised {type(error).__name__}")
        raise error

    def _gets_copies(self) -> bool:
        """True if a test computes what it expects from the arguments of the call in progress."""
        if not self._copies_on:
            return False
        found = False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            lines = self._copies_on.get(os.path.basename(frame.f_code.co_filename))
            if lines is not None and frame.f_lineno in lines:
                return True
            found = found or frame.f_globals.get("__name__") in TEST_MODULES
            frame = frame.f_back
        # A thread's stack does not show which statement it works for.
        return not found

    def _handed(self) -> dict[str, Any]:
        """Objects of the tests' data classes as the response gets them; it may change these and no others."""
        handed = self.attributes()
        self._handed_over |= handed.keys()
        return handed

    def _receive(self, sent: Mapping[str, Any]) -> None:
        foreign = [key for key in sent if key not in self._handed_over and not str(key).startswith("r")]
        if foreign:
            raise ValueError(f"no object of the response's: {foreign[0]!r}")
        self.update(sent)

    def require_answers(self) -> None:
        """Raise ``ResponseGone`` where a request had no answer: a late one would be read as that to the next."""
        if self.gone is not None:
            raise self.gone

    def _give_up(self, reason: str, timed_out: bool = False) -> ResponseGone:
        self.gone = ResponseGone(reason, timed_out)
        return self.gone

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request (the first is the tests' preparation), serve callbacks, and return the answer. Raises
        ``ResponseGone``: no answer."""
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
            self._receive(message.get("instances", {}))
            arguments = [self.decode(item) for item in message["args"]]
            value = self.encode(function(*arguments))
            return {"value": value, "instances": self._handed()}
        except Exception as error:  # the function's failure is the caller's to deal with
            return {"raised": type(error).__name__, "text": str(error)[:200]}

    def encode_foreign(self, value: object) -> Encoded:
        if isinstance(value, Proxy) or (isinstance(value, type) and hasattr(value, "_roll_number")):
            return {"t": "object", "id": value._roll_number}
        if isinstance(value, Iterator) and not isinstance(value, Coroutine | io.IOBase):
            self._callbacks.append(lambda: next(([item] for item in value), None))
            return {"t": "iterator", "id": len(self._callbacks) - 1}
        mock = sys.modules.get("unittest.mock")
        has_attributes = mock is not None and isinstance(value, mock.NonCallableMock) and bool(value._mock_children)
        if callable(value) and not has_attributes:
            self._callbacks.append(value)
            return {"t": "callback", "id": len(self._callbacks) - 1}
        kind = type(value).__name__
        raise NotHandedOver(f"a {kind} cannot be handed to the response: only data, functions and data classes")

    def decode_foreign(self, data: dict[str, Any]) -> Any:
        if data["t"] != "object":
            raise ValueError(f"no value: {data['t']!r}")
        if "bases" in data:
            return self._exception_class(data)
        number = int(data["id"])
        if number not in self._proxies:
            kind = AwaitableProxy if data.get("awaitable") is True else Proxy
            flags = [data.get(name) is True for name in ("plain", "class")]
            self._proxies[number] = kind(self, number, *flags)
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
            members = {"_roll_number": number, "__init__": lambda self, *args: None, "__getattr__": attribute_of_error}
            parents = dict.fromkeys(self._exception_class(parent) for parent in data["parents"])
            self._proxies[number] = type(str(data["name"]), tuple(parents) or (base,), members)
        found = self._proxies[number]
        return found if isinstance(found, type) else base


def attribute_of_error(error: BaseException, name: str) -> Any:
    """An attribute that only the exception in the response's process has."""
    if "_roll_error" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__["_roll_error"], name)


def restore(argument: object, after: Any) -> None:
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
    """The answer of the tests' own ``input``, if they have replaced it, else a line of their standard input. Raises
    ``EOFError``: there is no more."""
    if builtins.input is not _INPUT:
        return str(builtins.input(prompt))
    sys.stdout.write(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.removesuffix("\n")


INPUT: dict[str, Callable[..., Any]] = {"input": read_input, "readline": lambda: str(sys.stdin.readline())}
"""Requests that a response may make of the tests' process, by name."""
