"""Simulated time: an event loop on which waiting takes no time, and calls that are done at a known moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Generator
from typing import Any, Self


class Clock(asyncio.SelectorEventLoop):
    """An event loop with a time of its own: where nothing can run, it is at once the time of the next timer.

    Raises:
        RuntimeError: while it runs, nothing would ever happen again.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass in which nothing happens."""
        self.now += seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("nothing would ever happen again")
        if not events and timeout is not None:
            self._clock.now += timeout
        return events


class SimulatedCall:
    """In place of :class:`roll.distributed.PendingCall`: done ``seconds`` from now, however late it is awaited."""

    def __init__(self, clock: Clock, seconds: float, answer: Any = None) -> None:
        self._clock = clock
        self._done_at = clock.now + seconds
        self._answer = answer

    def within(self, seconds: float | None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(max(0.0, self._done_at - self._clock.now)).__await__()
        return self._answer
