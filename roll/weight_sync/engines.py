"""The engines as the sender sees them: whom a message of the update goes to, and what they answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from roll.distributed.calls import is_peer_trouble
from roll.weight_sync.messages import WeightSyncError


class Question(ABC):
    """A method in progress on every engine."""

    @abstractmethod
    def answers(self, update: str, end: float) -> list[Any]:
        """One answer an engine, all there by ``end`` (on the monotonic clock).

        Args:
            update: how a message names the update.

        Raises:
            WeightSyncError: an engine died, failed or did not answer; it is named.
        """


class Engines(ABC):
    """A fixed number of engines."""

    members: Sequence[Any]
    """Their identities: equal ones are the same engine, with what it holds."""
    ranks: Sequence[int]
    """Their names in messages."""

    @abstractmethod
    def ask(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> Question:
        """Call ``method`` of the workers of all engines; ``arguments(i)`` are those of the i-th engine."""

    def ask_alike(self, method: str, *arguments: Any) -> Question:
        return self.ask(method, lambda _: arguments)


class RayEngines(Engines):
    """Args:
    workers: actor handles of generation workers, by rank.
    """

    def __init__(self, workers: Mapping[int, Any]) -> None:
        self._workers = workers
        self.ranks = list(workers)
        self.members = [worker._actor_id for worker in workers.values()]

    def ask(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> Question:
        calls = enumerate(self._workers.items())
        refs = {rank: worker.call.remote(method, (), *arguments(index)) for index, (rank, worker) in calls}
        return _RayQuestion(method, refs)


_GRACE_SECONDS = 2.0
"""How long the other engines are listened to after the first failure."""


@dataclass(frozen=True)
class _RayQuestion(Question):
    method: str
    refs: dict[int, Any]

    def answers(self, update: str, end: float) -> list[Any]:
        found: dict[int, Any] = {}
        while waiting := {ref: rank for rank, ref in self.refs.items() if rank not in found}:
            ready, late = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            answered = {waiting[ref]: self._answer(update, waiting[ref], ref) for ref in ready or late}
            found |= answered
            if any(isinstance(answer, _Failure) for answer in answered.values()):
                # The first to fail is not always the one to blame: a broken connection has two ends.
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        in_order = [found[rank] for rank in self.refs]
        failures = sorted((f for f in in_order if isinstance(f, _Failure)), key=lambda failure: failure.gravity)
        if failures:
            to_blame = [rank for rank in self.refs if _gravity(found[rank]) == failures[0].gravity]
            raise WeightSyncError(failures[0].text, lost=to_blame)
        return in_order

    def _answer(self, update: str, engine: int, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            return _Failure(2, f"{update}: engine {engine} was not done with {self.method!r} in time")
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error.cause, "error", error.cause)
            gravity = 3 if is_peer_trouble(str(cause)) else 1
            return _Failure(gravity, f"{update}: engine {engine} failed in {self.method!r}: {cause}")
        except ray.exceptions.RayActorError:
            return _Failure(0, f"{update}: engine {engine} died in {self.method!r}")


@dataclass(frozen=True)
class _Failure:
    gravity: int
    """0: the most probable to have made others fail; 3: most probably made to fail by another."""
    text: str


def _gravity(answer: Any) -> int | None:
    return answer.gravity if isinstance(answer, _Failure) else None
