"""Requests that wait for the one thread that computes, and their results until the client has them.

Requests of a model are computed in the order of their ``seq_id``, whatever order they arrive in. Which client is next
is decided by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the one whose requests have taken the least
time, where time without requests earns no credit. A pass is computed in slices, between which others may come first, so
neither many requests nor long passes hold up another client for longer than a slice or a batch of samples.

A request that is sent again (the client has lost the answer) is the same request. Everything but the computation
happens on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from roll.serving.http import Overloaded, Refusal
from roll.training_service.checkpoints import missing

logger = logging.getLogger(__name__)

# Results that are kept for clients that ask again; the oldest leave first.
MAX_RESULTS, MAX_RESULT_BYTES = 20_000, 1 << 30
WAIT_SECONDS = 30.0  # most seconds that a question for a result waits; the limit of the client is 45
MAX_GROUP = 64  # requests of one sampling session that the engine works on together
# Seconds without a sign of life (the SDK gives one every 10) after which a client waits for all others.
ABSENT_SECONDS = 60.0


@dataclass(frozen=True)
class Failure:
    """Why a request has failed; ``user``: another request may do better."""

    message: str
    user: bool = True


Result = bytes | dict[str, Any] | Failure  # a protobuf message, a JSON body, or a failure
Slices = Generator[None, None, Result]  # a computation that lets others come first at every `yield`


@dataclass(eq=False)
class Session:
    """A client, between whose lines and those of other clients computing time is shared."""

    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    used: float = 0.0  # seconds of computing, on the queue's clock
    seen: float = field(default_factory=time.monotonic)  # its last sign of life


@dataclass(eq=False)
class Job:
    """A request under way or done."""

    request_id: str
    compute: Callable[[], Result | Slices] | None  # runs in the computing thread; None for a part of a group
    # A function that computes many such requests together, and this one's argument.
    group: tuple[Callable[[Sequence[Any]], dict[str, Result]], Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    size: int = 0  # of the result, in bytes
    slices: Slices | None = None  # rest of a computation that has begun


@dataclass
class _Line:
    """Requests of a model or a sampling session."""

    owner: Session
    next_seq: int | None = None  # of a model, the number of the request that is next; None: any order
    waiting: dict[int, Job | None] = field(default_factory=dict)  # by number; None: refused, and passed over
    ready: deque[Job] = field(default_factory=deque)


class Queue:
    """The lines of all models and sampling sessions. ``max_open``: requests of one line that wait; further ones are
    turned away with status 429."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self.jobs: OrderedDict[str, Job] = OrderedDict()  # by request, those that are done too, the oldest first
        self._bytes = 0
        self._clock = 0.0  # `used` of the owner who was served last, as it was then
        self._wakes = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="computing")
        self._task = asyncio.get_running_loop().create_task(self._run())

    def open_line(self, name: str, owner: Session, next_seq: int | None) -> None:
        """Begin a line; ``next_seq``: number of its first request, None for one without order."""
        self._lines.setdefault(name, _Line(owner, next_seq))

    def close_line(self, name: str) -> None:
        """End a line; what waits in it fails."""
        line = self._lines.pop(name, None)
        for job in [*line.waiting.values(), *line.ready] if line is not None else ():
            if job is not None:
                self._finish(job, Failure(f"{name} has been unloaded"))

    def add(self, line_name: str, seq_id: int | None, job: Job) -> None:
        """Accept a request. Raises ``Refusal``: no such line, or too many wait."""
        line = self._lines.get(line_name)
        if line is None:
            raise missing(f"model or sampling session {line_name}: it was unloaded, or the service was started again")
        if len(line.waiting) + len(line.ready) >= self._max_open:
            raise Overloaded(f"{line_name}: {self._max_open} requests wait, which is the most")
        self.jobs[job.request_id] = job
        line.owner.seen = time.monotonic()
        if not any(other.ready for other in self._lines.values() if other.owner is line.owner):
            line.owner.used = max(line.owner.used, self._clock)
        if line.next_seq is None or seq_id is None:
            line.ready.append(job)
            self._wakes.set()
        else:
            self._place(line, seq_id, job)

    def skip(self, line_name: str, seq_id: int) -> None:
        """Pass over the number of a request that is refused: later ones do not wait for it."""
        line = self._lines.get(line_name)
        if line is not None and line.next_seq is not None and seq_id >= line.next_seq:
            self._place(line, seq_id, None)

    def _place(self, line: _Line, seq_id: int, job: Job | None) -> None:
        assert line.next_seq is not None
        if seq_id < line.next_seq:
            if job is not None:
                self._finish(job, Failure(f"seq_id: {seq_id} is past; the model's next request is {line.next_seq}"))
            return
        line.waiting.setdefault(seq_id, job)
        while line.next_seq in line.waiting:
            found = line.waiting.pop(line.next_seq)
            line.next_seq += 1
            if found is not None:
                line.ready.append(found)
        self._wakes.set()

    async def result(self, request_id: str) -> Result | None:
        """A result, waited for; None: not done yet. Raises ``Refusal``: an unknown request (404), or one whose result
        is no longer kept (410)."""
        job = self.jobs.get(request_id)
        if job is None:
            raise missing(f"request {request_id[:200]}: its result is no longer kept, or the service was started again")
        with suppress(TimeoutError):
            await asyncio.wait_for(job.done.wait(), WAIT_SECONDS)
        return job.result

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ready = {name: line for name, line in self._lines.items() if line.ready}
            if not ready:
                self._wakes.clear()
                await self._wakes.wait()
                continue
            latest = time.monotonic() - ABSENT_SECONDS
            for line in ready.values():
                if line.owner.seen < latest:  # Nor does absence earn credit.
                    line.owner.used = max(line.owner.used, self._clock)
            name = min(ready, key=lambda one: (ready[one].owner.seen < latest, ready[one].owner.used))
            self._lines.move_to_end(name)  # Lines of one owner take turns: the first of equals is chosen.
            line = ready[name]
            self._clock = max(self._clock, line.owner.used)
            jobs = [line.ready.popleft()]
            while jobs[0].group is not None and line.ready and len(jobs) < MAX_GROUP:
                jobs.append(line.ready.popleft())
            started = time.monotonic()
            results = await loop.run_in_executor(self._thread, _computed, jobs)
            line.owner.used += time.monotonic() - started
            for job in jobs:
                if job.request_id in results:
                    self._finish(job, results[job.request_id])
                elif self._lines.get(name) is line:
                    line.ready.appendleft(job)
                else:
                    self._finish(job, Failure(f"{name} has been unloaded"))

    def _finish(self, job: Job, result: Result) -> None:
        job.result, job.compute, job.group, job.slices = result, None, None, None
        job.done.set()
        job.size = len(result) if isinstance(result, bytes) else 256
        self._bytes += job.size
        while len(self.jobs) > MAX_RESULTS or self._bytes > MAX_RESULT_BYTES:
            name, old = next(iter(self.jobs.items()))
            if old.result is None or old is job:
                break
            self._bytes -= old.size
            del self.jobs[name]

    async def close(self) -> None:
        """Compute nothing more."""
        self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _computed(jobs: Sequence[Job]) -> dict[str, Result]:
    """Results by request, none of one that has further slices; runs in the computing thread."""
    try:
        if jobs[0].group is not None:
            function = jobs[0].group[0]
            return function([job.group[1] for job in jobs if job.group is not None])
        job = jobs[0]
        assert job.compute is not None
        found = job.slices or job.compute()
        if isinstance(found, Generator):
            job.slices = found
            try:
                next(found)
            except StopIteration as end:
                return {job.request_id: end.value}
            return {}
        return {job.request_id: found}
    except (ValueError, Refusal) as error:
        failure = Failure(str(error))
    except Exception as error:  # fails these requests only; details go to the log
        logger.exception("request %s has failed", jobs[0].request_id)
        failure = Failure(f"the request has failed ({type(error).__name__}); see the server's log", user=False)
    return {job.request_id: failure for job in jobs}
