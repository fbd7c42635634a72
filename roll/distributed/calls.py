"""Calls in flight: waiting with a deadline, and turning what goes wrong into a diagnosis."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self

import ray
from typing_extensions import TypeVar

from roll.distributed import diagnosis
from roll.distributed.actor import WorkerAddress, WorkerRaised
from roll.distributed.failures import DeadlineExceeded, RankReport, RemoteError, WorkerDied, WorkerFailed

R = TypeVar("R", default=Any)
"""Of the result of a call."""

_REPORTED_RANKS = 3
_GRACE_SECONDS = 2.0
"""How long the other ranks are listened to after the first failure: when a rank dies, its peers in a collective raise
"connection closed" at the same moment, and may be heard first."""

_PEER_TROUBLE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|DistBackendError|socket timeout|timed out", re.IGNORECASE
)
"""Errors that a rank raises because another rank is in trouble."""


class PendingCall(Generic[R]):
    """A call to one or more ranks of a cluster.

    Its deadline runs from the moment of the call, so time spent waiting behind an earlier call of the same worker
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
        self._error: RemoteError | None = None
        self.began = time.monotonic()
        self.meanwhile: Callable[[PendingCall], None] | None = None
        """What the caller does in :meth:`result` until the call is answered."""

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

    @property
    def error(self) -> RemoteError | None:
        """What has gone wrong with it; None: nothing yet."""
        return self._error

    def within(self, seconds: float | None) -> Self:
        """Set the deadline, in seconds from the moment of the call; None leaves it."""
        if seconds is not None:
            self.deadline = seconds
        return self

    def done(self) -> bool:
        """Whether :meth:`result` returns (or raises) at once."""
        if self._error is None and self.unanswered:
            ready, _ = ray.wait(self.unanswered, num_returns=len(self.unanswered), timeout=0)
            return len(ready) == len(self.unanswered)
        return True

    def result(self, timeout: float | None = None) -> R:
        """Wait for all ranks and join their results.

        Args:
            timeout: Seconds from now; None: until the call's own deadline.

        Raises:
            WorkerFailed, WorkerDied: as soon as one rank raises or dies, whatever the others do.
            DeadlineExceeded: not done in time.
        """
        if self.meanwhile is not None and timeout is None:
            self.meanwhile(self)
        wait_any([self], timeout)
        return self._collect(self._answers)

    async def wait(self) -> None:
        """Return when :meth:`result` would return or raise at once; other coroutines go on meanwhile."""
        answers = [asyncio.wrap_future(ref.future()) for ref in self.unanswered]
        if answers:
            done, _ = await asyncio.wait(answers, timeout=max(0.0, self.seconds_left))
            for answer in done:
                answer.exception()  # looked at here, raised by result()

    def take(self, ref: ray.ObjectRef[Any]) -> None:
        """Fetch one rank's answer, which is there.

        Raises:
            WorkerFailed, WorkerDied: it is a failure.
        """
        rank = self._rank_of[ref]
        try:
            self._answers[rank] = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._error = self._failure(rank, error)
            raise self._error from None

    def check(self) -> None:
        """Raise what went wrong with the call so far, its deadline included."""
        if self._error is None and self.unanswered and self.seconds_left <= 0:
            self._error = self.overdue()
        if self._error is not None:
            raise self._error

    @property
    def answered(self) -> bool:
        return not self.unanswered

    def _failure(self, rank: int, error: ray.exceptions.RayError) -> RemoteError:
        failures = {rank: error}
        self._listen(failures, _GRACE_SECONDS if _is_peer_trouble(error) else 0.1)
        worst = sorted(failures, key=lambda r: (_gravity(failures[r]), r))
        died = not isinstance(failures[worst[0]], ray.exceptions.RayTaskError)
        reports = [self._report(r, failures[r], with_log=r == worst[0] and died) for r in worst]
        silent = [r for r in self._refs if r not in self._answers and r not in failures]
        kind = WorkerDied if died else WorkerFailed
        return kind(self.cluster, self.method, time.monotonic() - self.began, reports, silent)

    def _listen(self, failures: dict[int, ray.exceptions.RayError], seconds: float) -> None:
        """Collect failures of further ranks for a moment; a death or a plain error ends it, being the cause."""
        end = time.monotonic() + seconds
        while True:
            waiting = [ref for ref in self.unanswered if self._rank_of[ref] not in failures]
            ready = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))[0] if waiting else []
            if not ready:
                return
            rank = self._rank_of[ready[0]]
            try:
                self._answers[rank] = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                failures[rank] = error

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
            rank=rank,
            where=_where(address),
            error=text,
            stack=stack,
            log_file=address.log_file if address else None,
            log_tail=diagnosis.log_tail(address) if address and with_log else [],
        )

    def overdue(self) -> DeadlineExceeded:
        """The diagnosis of a call that takes too long: which ranks are silent, and where the first few stand."""
        silent = sorted(self._rank_of[ref] for ref in self.unanswered)
        reports = []
        for rank in silent[:_REPORTED_RANKS]:
            address = self._address(rank)
            frames = diagnosis.stacks(address) if address else []
            text = f"{len(self._answers)} of {len(self._refs)} ranks answered (deadline {self.deadline:g} s)"
            reports.append(
                RankReport(rank, _where(address), text, log_file=address.log_file if address else None, log_tail=frames)
            )
        return DeadlineExceeded(self.cluster, self.method, time.monotonic() - self.began, reports, silent)

    def _address(self, rank: int) -> WorkerAddress | None:
        return self._addresses[rank] if rank < len(self._addresses) else None


def wait_any(calls: Sequence[PendingCall], timeout: float | None = None) -> list[PendingCall]:
    """Wait until at least one call is answered by all its ranks; the calls of which that is true, in order.

    Args:
        timeout: Seconds from now within which one must be done; None: as long as the calls' own deadlines allow.

    Raises:
        WorkerFailed, WorkerDied: of the first call that goes wrong, even while others go on.
        DeadlineExceeded: a call is past its deadline, or ``timeout`` is over (then of the call that waits longest).
        ValueError: there is nothing to wait for.
    """
    if not calls:
        raise ValueError("nothing to wait for: no call is pending")
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        refs = {ref: call for call in calls for ref in call.unanswered}
        for ref in _ready(refs, _patience(calls, end)):
            refs[ref].take(ref)
        for call in calls:
            call.check()
        if done := [call for call in calls if call.answered]:
            return done
        if end is not None and time.monotonic() >= end:
            raise min(calls, key=lambda call: call.began).overdue()


def _patience(calls: Sequence[PendingCall], end: float | None) -> float:
    """Seconds until a deadline or ``end``; 0 when something is done already."""
    if any(call.answered for call in calls):
        return 0.0
    limits = [call.seconds_left for call in calls] + ([] if end is None else [end - time.monotonic()])
    return max(0.0, min(limits))


def _ready(refs: Mapping[ray.ObjectRef[Any], PendingCall], patience: float) -> list[ray.ObjectRef[Any]]:
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=1, timeout=patience)
    return ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if ready else []


def _raised(error: Exception) -> WorkerRaised | None:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, WorkerRaised) else None


def _is_peer_trouble(error: Exception) -> bool:
    cause = _raised(error)
    return cause is not None and is_peer_trouble(cause.error)


def is_peer_trouble(text: str) -> bool:
    """Whether an error reads like one that another rank has caused."""
    return bool(_PEER_TROUBLE.search(text))


def _gravity(error: Exception) -> tuple[int, float]:
    """Sorts the cause before its consequences: deaths, then a worker's own errors, then trouble with a peer."""
    cause = _raised(error)
    if cause is None:
        return (0, 0.0)
    return (2 if _is_peer_trouble(error) else 1, cause.when)


def _where(address: WorkerAddress | None) -> str:
    return f"pid {address.pid} on {address.node_ip}" if address else ""
