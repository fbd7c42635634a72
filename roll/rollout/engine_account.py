"""The pool's books of one engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from roll.distributed import PendingCall
from roll.rollout.messages import EngineCommand
from roll.strategies.engines.requests import GenerationRequest


@dataclass(slots=True)
class EngineAccount:
    """What one engine has been given and is to be told."""

    rank: int
    outstanding: dict[str, GenerationRequest] = field(default_factory=dict)
    """Requests that were given to the engine and have not come back, as they were given."""
    num_samples: int = 0
    """Their samples that were unfinished then."""
    to_add: list[GenerationRequest] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    to_recall: list[str] = field(default_factory=list)
    turn: PendingCall | None = None

    @property
    def num_requests(self) -> int:
        return len(self.outstanding)

    def accept(self, request: GenerationRequest) -> None:
        self.outstanding[request.request_id] = request
        self.num_samples += num_unfinished(request)
        self.to_add.append(request)

    def release(self, request_id: str) -> GenerationRequest | None:
        """Take a request off the engine's account; None where it is not on it."""
        request = self.outstanding.pop(request_id, None)
        if request is not None:
            self.num_samples -= num_unfinished(request)
        return request

    def withdraw(self, request_ids: set[str]) -> list[GenerationRequest]:
        """Take back those requests that the engine has not heard of yet."""
        unheard = [request for request in self.to_add if request.request_id in request_ids]
        self.to_add = [request for request in self.to_add if request.request_id not in request_ids]
        for request in unheard:
            self.release(request.request_id)
        return unheard

    def command(
        self, slice_seconds: float, work: bool, report_refusals: bool, watched: Collection[str] = ()
    ) -> EngineCommand:
        """What the next turn is to do."""
        command = EngineCommand(
            tuple(self.to_add),
            tuple(self.to_abort),
            tuple(self.to_recall),
            slice_seconds,
            work and not self.to_recall,
            tuple(request_id for request_id in watched if request_id in self.outstanding),
            report_refusals,
        )
        self.to_add, self.to_abort, self.to_recall = [], [], []
        return command


def num_unfinished(request: GenerationRequest) -> int:
    """Samples of a request that are still to be generated."""
    return request.num_samples - len(request.finished)
