"""Calls off the event loop: in daemon threads, and in child processes that may die."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import multiprocessing
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from roll.config import objects
from roll.environments.base import reset_arguments, resolved, says_instant

MOST_THREADS = 1024  # calls at a time; one that hangs keeps its thread
STOP_SECONDS = 1.0  # for a process to end by itself


class _DaemonThreads:
    """A pool of daemon threads, which end with the process whatever they are doing; started as needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_free = 0

    def run(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._num_free:
                self._num_free -= 1
            elif self._num_threads < self._most:
                self._num_threads += 1
                threading.Thread(target=self._serve, daemon=True, name="roll-environment").start()
            else:
                self._num_free -= 1  # the next free thread takes it
        self._work.put(call)

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._num_free += 1


_threads = _DaemonThreads(MOST_THREADS)


async def call_off_loop(function: Callable[..., Any], /, *args: object, **options: object) -> Any:
    """Call a coroutine function on the event loop, any other in a thread, so that it does not block the loop.

    Methods declared instant (:func:`says_instant`) are called directly.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*args, **options)
    owner = getattr(function, "__self__", None)
    if owner is not None and says_instant(type(owner), function.__name__):
        return await resolved(function(*args, **options))
    answer: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return  # cancelled at its deadline, before there was a thread for it
        try:
            answer.set_result(context.run(function, *args, **options))
        except BaseException as error:
            # A StopIteration cannot be raised into a coroutine; an exit, or a future's end, is not the run's.
            wrapped = not isinstance(error, Exception) or isinstance(error, StopIteration | CancelledError)
            answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}") if wrapped else error)

    _threads.run(run)
    return await resolved(await asyncio.wrap_future(answer))


class EnvironmentProcessDied(RuntimeError):
    """The process that an environment was in has ended."""


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def in_own_process() -> Iterator[None]:
    """Give environments built within the block a process of their own: no neighbour can make them fail again."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class EnvironmentProcesses:
    """Environments in child processes, up to ``per_process`` in each.

    Processes are started as needed and reused; one that has died, or in which a call hung, is replaced by the next
    :meth:`make`. Which of its environments was at fault is unknown: rebuilt under :func:`in_own_process`, only the one
    at fault fails again. ``make`` builds an environment, and must be picklable.
    """

    def __init__(self, make: Callable[[], Any], per_process: int = 1) -> None:
        self._make = make
        self._per_process = per_process
        self._processes: list[_Process] = []
        self.num_deaths = 0  # processes that died, or were killed because a call hung

    def make(self) -> RemoteEnvironment:
        """An environment in one of the processes with room."""
        alive = [one for one in self._processes if not one.has_ended]
        self.num_deaths += len(self._processes) - len(alive)
        self._processes = alive
        room = 1 if _alone.get() else self._per_process
        process = next((one for one in self._processes if len(one.environments) < min(room, one.room)), None)
        if process is None:
            process = _Process(self._make)
            self._processes.append(process)
        if not process.environments:
            process.room = room
        return RemoteEnvironment(process)

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


class RemoteEnvironment:
    def __init__(self, process: _Process) -> None:
        self._process = process
        self._number = next(process.numbers)
        process.environments.add(self._number)
        self._is_closed = False

    async def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> Any:
        return await self._process.call(self._number, "reset", seed, dict(task or {}))

    async def step(self, action: str) -> Any:
        return await self._process.call(self._number, "step", action)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                if not self._process.has_ended:
                    await self._process.call(self._number, "close")
            finally:
                self._process.environments.discard(self._number)


class _Process:
    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_serve, args=(theirs, make, objects.pickles()), daemon=True, name="roll-environment"
        )
        self._child.start()
        theirs.close()
        self._calls: dict[int, Future[Any]] = {}
        self.numbers = itertools.count()
        self.environments: set[int] = set()  # the numbers of those that live in it
        self._lock = threading.Lock()
        self.room = 1  # most environments at a time
        self.has_ended = False
        threading.Thread(target=self._listen, daemon=True, name="roll-environment-pipe").start()

    async def call(self, environment: int, method: str, *args: object) -> Any:
        """Call a method and return its answer; where this is cancelled at a deadline, the process is killed."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # it will be settled, also where its caller is cancelled
        number = next(self.numbers)
        with self._lock:
            if self.has_ended:
                raise self._death()
            self._calls[number] = answer
        try:
            self._pipe.send((number, environment, method, args))
        except (OSError, ValueError):
            self._over()
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            # The thread over there cannot be interrupted: only the end of its process frees what it holds.
            self.end()
            raise

    def end(self) -> None:
        self._over()
        self._child.kill()
        self._child.join(STOP_SECONDS)

    def _listen(self) -> None:
        while True:
            try:
                number, is_right, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                waiting = self._calls.pop(number, None)
            if waiting is not None and is_right:
                waiting.set_result(value)
            elif waiting is not None:
                waiting.set_exception(RuntimeError(value))
        # Joined before the callers hear of it, so that the exit code is known.
        self._child.join(STOP_SECONDS)
        self._over()

    def _over(self) -> None:
        with self._lock:
            self.has_ended = True
            waiting, self._calls = list(self._calls.values()), {}
        for answer in waiting:
            answer.set_exception(self._death())

    def _death(self) -> EnvironmentProcessDied:
        pid, code = self._child.pid, self._child.exitcode
        return EnvironmentProcessDied(f"the environment's process (pid {pid}) has ended, exit code {code}")


def _serve(pipe: Connection, make: Callable[[], Any], own_objects: Mapping[str, bytes]) -> None:
    """Main loop of the child: serves different environments concurrently, and the calls of each one in order."""
    objects.adopt(own_objects)
    environments: dict[int, Any] = {}
    lock = threading.Lock()

    def run(number: int, environment: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            if method == "reset":
                built = environments[environment] = make()
                positional, keywords = reset_arguments(built, *args)
                value = built.reset(*positional, **keywords)
            elif method == "close":
                close = getattr(environments.pop(environment, None), "close", None)
                value = None if close is None else close()
            else:
                value = getattr(environments[environment], method)(*args)
            reply = number, True, asyncio.run(resolved(value)) if inspect.isawaitable(value) else value
            # What cannot be sent is this call's error; the pipe would raise it only after half a message.
            pickle.dumps(reply)
        except BaseException as error:
            reply = number, False, f"{type(error).__name__}: {error}"
        with lock:
            pipe.send(reply)

    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            return
        _threads.run(partial(run, *call))
