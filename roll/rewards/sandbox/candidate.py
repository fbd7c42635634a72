"""Programs of a confined process: a script, a server of calls (the untrusted side of tests), or a command.

They may use names that they do not import, because ROLL, verl and LiveCodeBench put these imports in front. The names
are added to the built-in functions of the response's process, so that a program's own names go before them and tests
never see them: a response that defines no ``gcd`` is not judged by that of ``math``.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import copy
import functools
import importlib
import inspect
import io
import operator
import os
import signal
import sys
import threading
import traceback
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from roll.rewards.sandbox.values import Channel, ChannelClosed, Encoded, MessageTooLarge, Side

MODULE = "solution"
MAX_TEXT = 2000  # characters of an error's text
_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_EXACT: dict[Any, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}
_MUTABLE = (list, dict, set, bytearray, deque, defaultdict, Counter, OrderedDict)
_OPERATORS = """
    add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift neg pos abs invert eq ne lt le gt ge
    getitem setitem delitem
"""


def serve_calls(request: dict[str, Any]) -> None:
    """Run the source as the module ``solution``, report how that went, and answer requests of another process for calls
    of its functions until that process closes the channel."""
    source = read_all(SOURCE, MAX_SOURCE)
    open_streams()
    channel = Channel(CHANNEL, request["max_message"])
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    preparation = channel.receive()
    server = Server(channel, module, preparation.get("classes", []))
    exec(preparation.get("prelude", ""), module.__dict__)  # noqa: S102  the tests' classes that only hold data
    # For responses that define none of that name.
    server.classes = {name: module.__dict__.get(name) for name in server.classes}
    try:
        code = compile(source, f"{MODULE}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        channel.send({"compile_error": str(error)[:MAX_TEXT]})
        os._exit(0)
    open_for_program()
    try:
        exec(code, module.__dict__)  # noqa: S102  this process exists to run it
    except BaseException as error:  # reported to the other side, whatever it is
        server.send({"raised": server.describe(error)})
        os._exit(0)
    server.send({"ready": True})
    with contextlib.suppress(ChannelClosed):
        while True:
            server.answer(channel.receive())
    os._exit(0)


class Server(Side):
    """The response's side of calls: holds the objects that the tests know by number."""

    def __init__(self, channel: Channel, module: types.ModuleType, classes: list[str]) -> None:
        # The response's own class of a name is preferred to the tests'.
        def find(name: str) -> Any:
            own = module.__dict__.get(name)
            return own if isinstance(own, type) else self.classes[name]

        super().__init__("r", classes, find)
        self._channel = channel
        self.classes: dict[str, Any] = dict.fromkeys(classes)  # the tests' data classes by name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._output = {"out": io.StringIO(), "err": io.StringIO()}
        sys.stdout, sys.stderr = self._output.values()
        sys.stdin = TestsInput(self)
        builtins.input = lambda prompt="", /: str(self.call_back("input", [str(prompt)]))
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._namespace = module.__dict__
        self._operations: dict[str, Callable[..., Any]] = {
            "get": self._namespace.__getitem__,
            "names": lambda: [
                name
                for name, value in self._namespace.items()
                if not name.startswith("_") and not isinstance(value, types.ModuleType)
            ],
            "call": lambda function, *args, **kwargs: function(*args, **kwargs),
            "plain": as_plain,
            **{name: getattr(operator, name) for name in _OPERATORS.split()},
            **{f.__name__: f for f in (getattr, setattr, delattr, len, iter, next, reversed, str, repr, bool)},
            **{f.__name__: f for f in (isinstance, issubclass, copy.copy, copy.deepcopy, aiter)},
            "await": self._await,
            "anext": lambda iterator: self._await(iterator.__anext__()),
        }

    def send(self, message: dict[str, Any]) -> None:
        """Send a message with what has been printed since the last message."""
        for name, stream in self._output.items():
            if stream.tell():
                message[name] = stream.getvalue()
                stream.seek(0)
                stream.truncate()
        self._channel.send(message)

    def _await(self, awaitable: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await awaitable

        return self._loop.run_until_complete(wait())

    def answer(self, request: dict[str, Any]) -> None:
        """Perform one request and send its result, what it did to the arguments, or what it raised."""
        try:
            reply = self._perform(request)
        except ChannelClosed:
            raise
        except BaseException as error:  # also SystemExit: a program that leaves in a call has raised, no more
            reply = {"raised": self.describe(error)}
        try:
            self.send(reply)
        except MessageTooLarge:
            self._channel.send({"raised": {"name": "ResultTooLarge", "bases": [], "text": "the result is too large"}})

    def _perform(self, request: dict[str, Any]) -> dict[str, Any]:
        handed_over = request.get("instances", {})
        self.update(handed_over)
        arguments = [self.decode(item) for item in request["args"]]
        options = {name: self.decode(item) for name, item in request.get("kwargs", {}).items()}
        result = self._operations[request["do"]](*arguments, **options)
        reply: dict[str, Any] = {"value": self.encode(result)}
        if request.get("in_place"):
            before = {**dict(enumerate(request["args"])), **request.get("kwargs", {})}
            named = [*enumerate(arguments), *options.items()]
            numpy = sys.modules.get("numpy")
            mutable = _MUTABLE if numpy is None else (*_MUTABLE, numpy.ndarray)
            after = [[key, self.encode(item)] for key, item in named if type(item) in mutable]
            reply["changed"] = [[key, item] for key, item in after if item != before[key]]
        reply["instances"] = self.attributes(list(handed_over))
        return reply

    def describe(self, error: BaseException) -> dict[str, Any]:
        """An exception as data: text and class, and a number by which attributes of the response's own are read."""
        try:
            text = str(error)[:MAX_TEXT]
        except BaseException:  # its own __str__ may do anything
            text = ""
        described = {"text": text, **self._describe_class(type(error))}
        # Without its traceback: that would keep everything that its frames hold.
        return described | ({"error": self._number(error.with_traceback(None))} if "id" in described else {})

    def _describe_class(self, kind: type) -> dict[str, Any]:
        """The name of an exception's class and the built-in classes it derives from; of a response's own class also a
        number and the classes that it names as its bases."""
        bases = [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]
        described: dict[str, Any] = {"name": kind.__name__, "bases": bases}
        if getattr(builtins, kind.__name__, None) is not kind:
            parents = [self._describe_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
            described |= {"id": self._number(kind), "parents": parents}
        return described

    def _number(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def encode_foreign(self, value: object) -> Encoded:
        if isinstance(value, _PLAIN) and type(value).__module__ != MODULE and type(value) not in _PLAIN:
            return self.encode(as_plain(value))
        encoded: dict[str, Any] = {"t": "object", "id": self._number(value)}
        if inspect.isawaitable(value):
            encoded["awaitable"] = True
        if isinstance(value, type) and issubclass(value, BaseException):
            encoded |= self._describe_class(value)
        elif isinstance(value, type):
            encoded["class"] = True
        elif isinstance(value, _PLAIN):
            encoded["plain"] = True
        return encoded

    def decode_foreign(self, data: dict[str, Any]) -> Any:
        """A stand-in for a function or an iterator of the tests, or an object of this side."""
        number = data["id"]
        if data["t"] == "callback":
            return lambda *args: self.call_back(number, args)
        if data["t"] == "iterator":
            return (found[0] for found in iter(lambda: self.call_back(number, ()), None))
        return self._objects[number]

    def call_back(self, which: int | str, args: Sequence[Any]) -> Any:
        """Call a function of the tests, by number, or read their input."""
        message = {"callback": which, "args": [self.encode(item) for item in args]}
        self.send({**message, "instances": self.attributes()})
        while True:
            answer = self._channel.receive()
            if "do" not in answer:
                break
            self.answer(answer)
        if "raised" in answer:
            raise getattr(builtins, answer["raised"], RuntimeError)(answer.get("text", ""))
        self.update(answer.get("instances", {}))
        return self.decode(answer["value"])


class TestsInput(io.TextIOBase):
    """Standard input that is read from the tests' process."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return str(self._server.call_back("readline", []))

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self.readline, ""))


def as_plain(value: object) -> Any:
    """The plain data inside an instance of a class derived from a plain one."""
    for kind in _PLAIN:
        if isinstance(value, kind):
            # Past the class's own methods: str() of a member of an enumeration is its name.
            return _EXACT.get(kind, kind)(value)
    return value


MODULES = """
    string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
"""
"""Imported for every program, after all their public names have been, in this order; those of ``typing`` come last."""
_installed: list[str] = []
RECURSION_LIMIT = 50_000  # LiveCodeBench's; recursion through C functions fits into the stack this often
_STREAMS = ("stdin", "stdout", "stderr")


def public(module: types.ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name: getattr(module, name) for name in names}


@functools.cache
def usual_names() -> dict[str, Any]:
    """Names and values that the imports bind, ``sys``'s own names aside: its streams are not open yet."""
    modules = {name: importlib.import_module(name) for name in MODULES.split()}
    found: dict[str, Any] = {}
    for name, module in modules.items():
        found |= {} if name == "sys" else public(module)
    return found | public(importlib.import_module("typing")) | modules


def install_names() -> None:
    """Add them to the built-in functions of this process and of those forked from it, which then pay nothing."""
    for name, value in {**public(sys), **usual_names()}.items():
        if name not in vars(builtins) and name not in _STREAMS:
            setattr(builtins, name, value)
            _installed.append(name)


def open_for_program() -> None:
    """Prepare the process that is about to run a program: its streams are open now."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    for name in _STREAMS:
        setattr(builtins, name, getattr(sys, name))


def remove_names() -> None:
    """Leave the tests' process with Python's own built-in functions."""
    for name in _installed:
        delattr(builtins, name)
    _installed.clear()


COMPILE_STATUS = 121
"""Exit status of a script that is not valid Python. Others may exit with it too: it only feeds a metric."""
SOURCE, CHANNEL, VERDICTS = 3, 4, 5  # descriptors after those of the standard streams
MAX_SOURCE = 4 * 2**20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The order of sets of texts would differ from run to run, and a reward with it.
    "PYTHONHASHSEED": "0",
}
"""All that a sandboxed process knows of its surroundings, besides the path of its private folder."""


def forget_surroundings() -> None:
    """Set environment, arguments and search path to what a program on its own would find."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["solution.py"]
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != own]
    sys.dont_write_bytecode = True
    atexit._clear()


def read_all(descriptor: int, most: int = -1) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read(most)


def open_streams() -> None:
    """Open new streams on the standard descriptors; those of the parent would carry its state."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  they live as long as we do
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def run_script(request: dict[str, Any]) -> None:
    """Run the source as ``__main__``, like ``python solution.py``."""
    source = read_all(SOURCE, MAX_SOURCE)
    open_streams()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status = 0
    try:
        code = compile(source, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(COMPILE_STATUS)
    open_for_program()
    try:
        exec(code, main.__dict__)  # noqa: S102  this process exists to run it
    except SystemExit as leaving:
        status = 0 if leaving.code is None else leaving.code & 0xFF if isinstance(leaving.code, int) else 1
    except BaseException:  # whatever a program ends with, Python prints it and goes on to its exit
        traceback.print_exc()
        status = 1
    # Exit as Python does: wait for threads, then call exit functions, then flush the buffers.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_command(request: dict[str, Any]) -> None:
    """Write the source to a file in the working folder and execute the command that runs it."""
    with open(request["file_name"], "wb") as file:
        file.write(read_all(SOURCE, MAX_SOURCE))
    # Python ignores these, and a program executed from here would too.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    command = request["command"]
    os.execvpe(command[0], command, dict(os.environ))
