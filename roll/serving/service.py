"""The engines of a cluster for many independent callers on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roll.distributed import PendingCall
from roll.distributed.failures import RemoteError
from roll.rollout.engines import EnginePool
from roll.rollout.messages import FinishedGroup
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)


Listener = Callable[[Sequence[GenerationOutput]], None]


class Overloaded(RuntimeError):
    """As many requests are waiting as may; ask again later."""


class Unavailable(RuntimeError):
    """The engines have failed, or were told to drop what they had."""


class Refused(ValueError):
    """The engine cannot answer this request, whenever it is asked."""


@dataclass
class ServiceCounts:
    """What became of all requests since the start."""

    finished: int = 0
    refused: int = 0
    turned_away: int = 0
    """For lack of room."""
    cancelled: int = 0
    """Whoever asked had gone."""


class EngineService:
    """Hands requests to an engine pool and each answer to whoever waits for it.

    Everything happens on one event loop, so neither the pool nor this class needs a lock; engines compute in other
    processes meanwhile.

    Args:
        pool: with ``report_refusals``; nobody else may use it.
        max_open_requests: requests under way, those that wait for an engine included.
    """

    def __init__(self, pool: EnginePool, max_open_requests: int = 1024) -> None:
        self._pool = pool
        self._max_open_requests = max_open_requests
        self._answers: dict[str, asyncio.Future[FinishedGroup]] = {}
        self._listeners: dict[str, Listener] = {}
        self._num_held = 0
        self._turns: dict[PendingCall, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._awake = asyncio.Event()
        self._awake.set()
        self.failure: RemoteError | None = None
        """What ended the engines."""
        self.counts = ServiceCounts()

    @property
    def num_open(self) -> int:
        """Requests under way, those held by a pause included."""
        return len(self._answers) + self._num_held

    @property
    def num_engines(self) -> int:
        return 0 if self.failure is not None else self._pool.num_engines

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        num_samples: int = 1,
        listener: Listener | None = None,
    ) -> FinishedGroup:
        """All samples of one prompt. Whoever stops waiting (cancellation) has the request dropped.

        Args:
            listener: is told what the samples have so far, about every turn of an engine that can tell.

        Raises:
            Overloaded, Unavailable, Refused: see there.
        """
        if self.num_open >= self._max_open_requests:
            self.counts.turned_away += 1
            raise Overloaded(f"{self.num_open} requests are under way, which is the most")
        self._num_held += 1
        try:
            await self._awake.wait()
        finally:
            self._num_held -= 1
        if self.failure is not None:
            raise Unavailable(f"the engines have failed: {self.failure}")
        request = GenerationRequest(f"http-{next(self._numbers)}", prompt_token_ids, params, num_samples)
        if listener is not None:
            self._listeners[request.request_id] = listener
            self._pool.watched[request.request_id] = None
        group = await self._ask(request)
        if group.error is not None:
            self.counts.refused += 1
            raise Refused(group.error)
        self.counts.finished += 1
        return group

    async def _ask(self, request: GenerationRequest) -> FinishedGroup:
        answer: asyncio.Future[FinishedGroup] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        self._pool.submit([request])
        self._watch()
        try:
            return await answer
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            self._pool.abort([request.request_id])
            self._watch()
            raise
        finally:
            del self._answers[request.request_id]
            self._listeners.pop(request.request_id, None)
            self._pool.watched.pop(request.request_id, None)

    async def pause(self) -> None:
        """Drop what is under way and return when no engine works; later requests wait for :meth:`resume`."""
        self._awake.clear()
        under_way = list(self._answers)
        self._fail("the engines are needed for something else")
        self._pool.abort(under_way)
        self._watch()
        while self._turns:
            await asyncio.wait(list(self._turns.values()))

    async def resume(self) -> None:
        """Take requests again."""
        self._awake.set()

    def _watch(self) -> None:
        """Wait for the turns that nobody waits for yet."""
        for turn in self._pool.pending:
            if turn not in self._turns:
                self._turns[turn] = asyncio.create_task(self._await_turn(turn))

    async def _await_turn(self, turn: PendingCall) -> None:
        try:
            await turn.wait()
        finally:
            del self._turns[turn]
        try:
            # A turn that ended together with another one has been taken with it.
            for done in self._pool.wait() if turn in self._pool.pending else []:
                self._deliver(self._pool.take(done))
                self._report(self._pool.take_progress())
        except RemoteError as error:
            logger.error("the engines behind the HTTP endpoint have failed: %s", error)
            self.failure = error
            self._fail(f"the engines have failed: {error}")
            return
        self._watch()

    def _deliver(self, groups: Sequence[FinishedGroup]) -> None:
        for group in groups:
            answer = self._answers.get(group.request_id)
            if answer is not None and not answer.done():
                answer.set_result(group)

    def _report(self, progress: Mapping[str, Sequence[GenerationOutput]]) -> None:
        for request_id, samples in progress.items():
            if request_id in self._listeners:
                self._listeners[request_id](samples)

    def _fail(self, message: str) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable(message))
