"""Calls of the clients: futures, the loop that they run on, and turns of roles that share devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future as ThreadFuture
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

from roll.distributed import DriverLoop
from roll.pipelines.run_context import Residency
from roll.strategies.base import StateKind

R = TypeVar("R")
Needs = Mapping[str, frozenset[StateKind]]
"""By role, the states that a call must find on its devices."""


class Future(Generic[R]):
    """The result of a call that is under way; awaitable in a coroutine, :meth:`result` anywhere else."""

    def __init__(self, future: ThreadFuture[R]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result.

        Args:
            timeout: seconds; None: as long as the call's own deadline (``rpc_timeout``).

        Raises:
            TimeoutError: not done in time; the call goes on.
            RemoteError: a worker has failed or died.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """True if :meth:`result` returns (or raises) at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self._future).__await__()


class CallLoop:
    """An event loop in a thread of its own, which all calls of the clients run on: they go on whatever the program
    does meanwhile, in Jupyter as well."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)
        self._under_way: set[ThreadFuture[Any]] = set()

    def _serve(self) -> None:
        driver = DriverLoop(self._loop)
        self._loop.run_forever()
        driver.close()

    def begin(self, call: Coroutine[Any, Any, R]) -> Future[R]:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return Future(future)

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end of the block wait for what is under way; where the block fails, cancel it."""
        self._thread.start()
        try:
            yield
            # A copy: calls leave the set as they end.
            for future in list(self._under_way):
                future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class Turns:
    """Turns of roles that share devices: a call waits until the calls that need other states there are done."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._changed = asyncio.Condition()
        self._present: Needs = {}
        self._users = 0

    @asynccontextmanager
    async def needing(self, needs: Needs) -> AsyncIterator[None]:
        """Keep these states on their devices for the length of the block."""
        needs = {role: states for role, states in needs.items() if self._residency.moves(role)}
        if not needs:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users or self._present == needs)
            if not self._users:
                # Under the lock: no call may start while states are moving.
                await asyncio.to_thread(self._residency.bring, needs)
            self._present, self._users = needs, self._users + 1
        try:
            yield
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()
