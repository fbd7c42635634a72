"""Work on the texts of requests, in a thread of its own: clients take turns, and what cannot fit is not tokenised."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_MARGIN = 64
"""Tokens by which a beginning of a text may have more than the text itself has there."""


class ClientTurns:
    """One thread that serves clients in turn, so that a client with a thousand long texts delays another by one.

    Tokenizers are not to be used by two threads at a time, and hold the interpreter's lock for most of their work.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._wakes = threading.Condition()
        threading.Thread(target=self._serve, daemon=True, name="tokenizing").start()

    async def run(self, client: str, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)``, when it is the client's turn; left out where the caller is cancelled before."""
        result: Future[T] = Future()
        with self._wakes:
            self._queues.setdefault(client, deque()).append((result, partial(function, *arguments)))
            self._wakes.notify()
        return await asyncio.wrap_future(result)

    def _serve(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._queues)
                client, queue = next(iter(self._queues.items()))
                result, work = queue.popleft()
                del self._queues[client]
                if queue:  # to the end of the line
                    self._queues[client] = queue
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except Exception as error:
                    result.set_exception(error)


def fits(encode: Callable[[str], list[int]], text: str, limit: int) -> list[int] | None:
    """Token ids of ``text``; None where they are more than ``limit``, which a beginning of it shows.

    Twice as much is tokenised at most as a text of ``limit`` tokens has, however long the text is.
    """
    for shift in itertools.count(2):
        length = limit << shift
        if length >= len(text):
            return encode(text)
        if len(encode(text[:length])) > limit + _MARGIN:
            return None
    raise AssertionError("unreachable")
