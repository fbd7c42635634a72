"""Calls in flight: waiting with a deadline, the driver's event loop, and the diagnosis of failures."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self

import ray
from typing_extensions import TypeVar

from roll.distributed import diagnosis
from roll.distributed.actor import WorkerAddress, WorkerRaised
from roll.distributed.failures import DeadlineExceeded, RankReport, RemoteError, WorkerDied, WorkerFailed

logger = logging.getLogger(__name__)

R = TypeVar("R", default=Any)  # type of a call's result

_REPORTED_RANKS = 3
_GRACE_SECONDS = 2.0
"""Time for the other ranks to answer after the first failure: when a rank dies, its peers in a collective raise
"connection closed" at the same moment, and their answers may arrive first."""

_PEER_TROUBLE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|DistBackendError|socket timeout|timed out", re.IGNORECASE
)
"""Errors that a rank raises because another rank is in trouble."""
_PEER = 2  # gravity of such an error

_FAREWELL_SECONDS = 10.0  # time for coroutines to end after they have been cancelled
_PASSES_FOR_CALLBACKS = 16
"""Passes of the event loop: the end of a coroutine may begin another one only a few passes later."""


class PendingCall(Generic[R]):
    """A call to one or more ranks of a cluster: awaitable in a coroutine, :meth:`result` anywhere else.

    Its deadline runs from the moment of the call, so time spent waiting for an earlier call of the same worker
    counts. ``refs`` may be given to other calls in place of the results.
    """

    def __init__(
        self,
        cluster: str,
        method: str,
        refs: Mapping[int, ray.ObjectRef[Any]],
        deadline: float,
        addresses: Sequence[WorkerAddress],
        collect: Callable[[dict[int, Any]], R],
    ) -> None:
        self.cluster = cluster
        self.method = method
        self.deadline = deadline
        self._rank_of = {ref: rank for rank, ref in refs.items()}
        self._refs = dict(refs)
        self._addresses = addresses
        self._collect = collect
        self._answers: dict[int, Any] = {}
        self.error: RemoteError | None = None  # the first failure
        self.began = time.monotonic()

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """One reference a called rank, in rank order."""
        return [self._refs[rank] for rank in sorted(self._refs)]

    @property
    def unanswered(self) -> list[ray.ObjectRef[Any]]:
        return [ref for ref, rank in self._rank_of.items() if rank not in self._answers]

    @property
    def seconds_left(self) -> float:
        return self.began + self.deadline - time.monotonic()

    def within(self, seconds: float | None) -> Self:
        """Set the deadline, in seconds from the moment of the call; None leaves it."""
        if seconds is not None:
            self.deadline = seconds
        return self

    def done(self) -> bool:
        """True if :meth:`result` returns (or raises) at once."""
        if self.error is None and self.unanswered:
            ready, _ = ray.wait(self.unanswered, num_returns=len(self.unanswered), timeout=0)
            return len(ready) == len(self.unanswered)
        return True

    def result(self, timeout: float | None = None) -> R:
        """Wait for all ranks and join their results. The event loop of a driver (:class:`DriverLoop`) runs meanwhile.

        Args:
            timeout: Seconds from now; None: until the call's own deadline.

        Raises:
            WorkerFailed, WorkerDied: as soon as one rank raises or dies, whatever the others do.
            DeadlineExceeded: not done in time.
        """
        driver = DriverLoop.of_this_thread()
        # Inside a coroutine the loop runs already, and asyncio refuses to run it once more: then only this call is
        # waited for.
        if driver is not None and timeout is None and not driver._loop.is_running():
            return driver.run(self)
        wait_any([self], timeout)
        return self._collect(self._answers)

    def __await__(self) -> Generator[Any, None, R]:
        """Like :meth:`result`; other coroutines run meanwhile. Cancelling the wait does not cancel the call."""
        return self._result().__await__()

    async def _result(self) -> R:
        # Ray calls back when an answer is there, in a thread of its own, so that any number of calls in flight cost no
        # thread and no polling.
        if self.error is None and self.unanswered:
            answers = {ref: asyncio.wrap_future(ref.future()) for ref in self.unanswered}
            for answer in answers.values():
                # A failure is looked at, so that asyncio does not warn of one that comes when another has ended the
                # wait.
                answer.add_done_callback(lambda one: one.cancelled() or one.exception())
            limit = max(0.0, self.seconds_left)
            await asyncio.wait(answers.values(), timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for ref, answer in answers.items():
                if answer.done():
                    self.take(ref, answer.result)
            if self.error is None and self.unanswered:
                self.error = self.overdue()
        self.check()
        return self._collect(self._answers)

    def take(self, ref: ray.ObjectRef[Any], fetch: Callable[[], Any]) -> None:
        """Keep one rank's answer, which ``fetch`` returns at once. Raises ``WorkerFailed, WorkerDied``: it is a
        failure."""
        rank = self._rank_of[ref]
        try:
            self._answers[rank] = fetch()
        except ray.exceptions.RayError as error:
            self.error = self._failure(rank, error)
            raise self.error from None

    def check(self) -> None:
        """Raise what went wrong with the call so far, its deadline included."""
        if self.error is None and self.unanswered and self.seconds_left <= 0:
            self.error = self.overdue()
        if self.error is not None:
            raise self.error

    def _failure(self, rank: int, error: ray.exceptions.RayError) -> RemoteError:
        failures = {rank: error}
        # Further failures are collected for a moment: the end of a peer has its cause elsewhere, and beside a rank that
        # raised others may have failed at the same time.
        end = time.monotonic() + (_GRACE_SECONDS if _gravity(error)[0] == _PEER else 0.1)
        while waiting := [ref for ref in self.unanswered if self._rank_of[ref] not in failures]:
            ready, _ = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            further = self._rank_of[ready[0]]
            try:
                self._answers[further] = ray.get(ready[0])
            except ray.exceptions.RayError as failure:
                failures[further] = failure
        worst = sorted(failures, key=lambda r: (_gravity(failures[r]), r))
        died = not isinstance(failures[worst[0]], ray.exceptions.RayTaskError)
        # A worker that raised has sent its stack; only of a process that died is the log all that is left.
        reports = [self._report(r, failures[r], with_log=r == worst[0] and died) for r in worst]
        silent = [r for r in self._refs if r not in self._answers and r not in failures]
        kind = WorkerDied if died else WorkerFailed
        return kind(self.cluster, self.method, time.monotonic() - self.began, reports, silent)

    def _report(self, rank: int, error: ray.exceptions.RayError, with_log: bool) -> RankReport:
        address = self._address(rank)
        cause = _raised(error)
        if cause is not None:
            text, stack = cause.error, cause.stack
        elif isinstance(error, ray.exceptions.RayTaskError):
            text, stack = str(error.cause), str(error)
        else:
            text, stack = diagnosis.death_cause(error), ""
        return RankReport(
            *(rank, _where(address), text, stack),
            log_file=address.log_file if address else None,
            log_tail=diagnosis.on_node(address, diagnosis.log_tail) if address and with_log else [],
        )

    def overdue(self) -> DeadlineExceeded:
        """Diagnose a call that takes too long: which ranks are silent, and the stacks of the first few.

        A rank that waits for another host may be the only silent one: the other's data have left it, into a buffer.
        So hosts of ranks that have answered are named, too, where they are slow.
        """
        seconds = time.monotonic() - self.began
        silent = sorted(self._rank_of[ref] for ref in self.unanswered)
        waiting = {address.node_id for address in map(self._address, silent) if address}
        found = diagnosis.links(filter(None, map(self._address, self._rank_of.values())))
        links = [link for link in found if link.node_id in waiting or link.is_slow]
        # A node without a connection would answer no request for stacks either, and cost its time limit for each rank.
        cut_off = {link.node_id for link in links if not link.answers}
        reports: list[RankReport] = []
        for rank in silent[:_REPORTED_RANKS]:
            address = self._address(rank)
            if address is None:
                evidence = [] if reports else diagnosis.lines_of_ray()
            else:
                evidence = diagnosis.on_node(address, diagnosis.stacks) if address.node_id not in cut_off else []
            text = f"{len(self._answers)} of {len(self._refs)} ranks answered (deadline {self.deadline:g} s)"
            file = address.log_file if address else None
            reports.append(RankReport(rank, _where(address), text, log_file=file, log_tail=evidence))
        texts = [link.text for link in links]
        return DeadlineExceeded(self.cluster, self.method, seconds, reports, silent, links=texts)

    def _address(self, rank: int) -> WorkerAddress | None:
        return self._addresses[rank] if rank < len(self._addresses) else None


class DriverLoop:
    """The event loop of the driver's thread. It runs whenever that thread waits: in :meth:`run`, and in
    :meth:`PendingCall.result`.

    So a pipeline reads as plain statements, and what :meth:`spawn` has started continues while other roles compute. An
    error in it ends the wait, whatever is waited for. ``loop``: runs the coroutines (in tests and simulations one with
    a clock of its own).
    """

    _threads = threading.local()

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        assert self.of_this_thread() is None, "a thread has one loop"
        self._loop = loop or asyncio.new_event_loop()
        self._waited_for: asyncio.Future[Any] | None = None
        self._failure: BaseException | None = None
        # Signals' exceptions that have left the loop already, out of the middle of a task.
        self._left: list[BaseException] = []
        self._loop.set_exception_handler(self._report)
        self._threads.current = self

    @classmethod
    def of_this_thread(cls) -> DriverLoop | None:
        """Return this thread's loop, unless it is closed; None: there is none."""
        return getattr(cls._threads, "current", None)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, awaitable: Awaitable[R]) -> R:
        """Run the loop until ``awaitable`` is done, and return its result. Raises ``Exception``: of ``awaitable``,
        which is cancelled when something else fails; of anything spawned, now or since the last wait."""
        waited_for = asyncio.ensure_future(awaitable, loop=self._loop)
        self._waited_for = waited_for
        if self._failure is not None:
            waited_for.cancel()
        try:
            return self._run(waited_for)
        except asyncio.CancelledError:
            # _ended() cancels the wait when something spawned has failed: its failure is raised, not the cancellation.
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            self._waited_for = None

    def _run(self, waited_for: asyncio.Future[R]) -> R:
        """Run the loop until ``waited_for`` is done.

        A signal's handler may raise in the middle of any task. The exception leaves the loop at once, and would leave
        it again through each task that waits for that one, whenever the loop runs next: while a checkpoint is written
        because of the signal. It is raised once.
        """
        while True:
            try:
                return self._loop.run_until_complete(waited_for)
            except (SystemExit, KeyboardInterrupt) as error:
                is_of_this = waited_for.done() and not waited_for.cancelled() and waited_for.exception() is error
                if is_of_this or error not in self._left:
                    self._left.append(error)
                    raise

    def spawn(self, coroutine: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run a coroutine whenever the loop runs. Its failure ends the driver's current or next wait."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        # A signal's exception has left the loop already, and only the first failure is the cause.
        if error is not None and error not in self._left and self._failure is None:
            self._failure = error
            if self._waited_for is not None:
                self._waited_for.cancel()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Silent about tasks that a signal has ended: nobody awaits their results any more.
        if context.get("exception") not in self._left:
            loop.default_exception_handler(context)

    def close(self) -> None:
        """Cancel everything that is not done; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._threads.current = None
        try:
            self._run(self._loop.create_task(self._end_all()))
            self._run(self._loop.create_task(self._loop.shutdown_asyncgens()))
        finally:
            self._loop.close()

    async def _end_all(self) -> None:
        # Again and again: the end of a task may begin another one.
        end = time.monotonic() + _FAREWELL_SECONDS
        while True:
            for _ in range(_PASSES_FOR_CALLBACKS):
                await asyncio.sleep(0)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=max(0.0, end - time.monotonic()))
            for task in tasks - late:
                if not task.cancelled():
                    task.exception()  # looked at, so that nothing warns of it: the run ends already
            if late:
                logger.warning("cancelled, but not ended within %g s: %s", _FAREWELL_SECONDS, late)
                return


def wait_any(calls: Sequence[PendingCall], timeout: float | None = None) -> list[PendingCall]:
    """Wait until at least one call is answered by all its ranks; the calls of which that is true, in order.

    Args:
        timeout: Seconds from now within which one must be done; None: as long as the calls' own deadlines allow.

    Raises:
        WorkerFailed, WorkerDied: of the first call that fails, even while others are in flight.
        DeadlineExceeded: a call is past its deadline, or ``timeout`` is over (then of the call that waits longest).
        ValueError: there is nothing to wait for.
    """
    if not calls:
        raise ValueError("nothing to wait for: no call is pending")
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        refs = {ref: call for call in calls for ref in call.unanswered}
        if refs:
            limits = [call.seconds_left for call in calls] + ([] if end is None else [end - time.monotonic()])
            is_done = any(not call.unanswered for call in calls)
            # One call that is done already, or one answer, ends the wait; then all that are there are fetched.
            if ray.wait(list(refs), num_returns=1, timeout=0.0 if is_done else max(0.0, min(limits)))[0]:
                for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]:
                    refs[ref].take(ref, partial(ray.get, ref))
        for call in calls:
            call.check()
        if done := [call for call in calls if not call.unanswered]:
            return done
        if end is not None and time.monotonic() >= end:
            raise min(calls, key=lambda call: call.began).overdue()


def _raised(error: Exception) -> WorkerRaised | None:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, WorkerRaised) else None


def is_peer_trouble(text: str) -> bool:
    """True if an error reads like one that another rank has caused."""
    return bool(_PEER_TROUBLE.search(text))


def _gravity(error: Exception) -> tuple[int, float]:
    """Sorts the cause before its consequences: deaths, then a worker's own errors, then trouble with a peer; among
    equals the earliest."""
    cause = _raised(error)
    if cause is None:
        return (0, 0.0)
    return (_PEER if is_peer_trouble(cause.error) else 1, cause.when)


def _where(address: WorkerAddress | None) -> str:
    if address is None:
        return ""
    host = "" if address.node_ip.startswith("127.") else f"{address.hostname}, "
    return f"pid {address.pid} on {host}{address.node_ip}"
