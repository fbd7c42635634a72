"""The generation engines of a role as one: a shared queue, least-loaded first, a prompt's samples together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.distributed import Cluster, PendingCall, wait_any
from roll.rollout.messages import EngineCommand, EngineReport, FinishedGroup
from roll.strategies.generation import GenerationRequest


@dataclass(slots=True)
class _Engine:
    rank: int
    outstanding: dict[str, int] = field(default_factory=dict)
    """Samples by request that were given to the engine and have not come back."""
    to_add: list[GenerationRequest] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    turn: PendingCall | None = None
    busy_seconds: float = 0.0

    @property
    def load(self) -> int:
        return sum(self.outstanding.values())


class EnginePool:
    """Routes requests to engines and keeps one turn in flight on every engine that has work.

    Requests given together are spread by load alone, so which engine gets which prompt does not depend on timing, as
    long as they fit under the limit.

    Args:
        max_running_requests: requests that one engine has in hand at a time; further ones wait here.
        slice_seconds: how long a turn lasts before finished groups are reported.
    """

    def __init__(self, cluster: Cluster, max_running_requests: int, slice_seconds: float = 0.05) -> None:
        self._cluster = cluster
        self._max_running_requests = max_running_requests
        self._waiting: deque[GenerationRequest] = deque()
        self._slice_seconds = slice_seconds
        self._engines = [_Engine(rank) for rank in range(cluster.world_size)]
        self._engine_of_turn: dict[PendingCall, _Engine] = {}

    @property
    def pending(self) -> list[PendingCall]:
        return list(self._engine_of_turn)

    @property
    def num_outstanding(self) -> int:
        """Samples asked for that have not come back."""
        return sum(engine.load for engine in self._engines) + sum(request.num_samples for request in self._waiting)

    @property
    def busy_seconds(self) -> float:
        """Seconds of generation, summed over engines, since the pool was made."""
        return sum(engine.busy_seconds for engine in self._engines)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Give each request to the engine with the fewest samples in hand; idle engines start at once."""
        self._waiting.extend(requests)
        self._start_turns()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; each engine hears of it with its next turn."""
        unwanted = set(request_ids)
        self._waiting = deque(request for request in self._waiting if request.request_id not in unwanted)
        for engine in self._engines:
            mine = unwanted & engine.outstanding.keys()
            for request_id in mine:
                del engine.outstanding[request_id]
            queued = {request.request_id for request in engine.to_add} & mine
            engine.to_add = [request for request in engine.to_add if request.request_id not in queued]
            engine.to_abort += sorted(mine - queued)
        self._start_turns()

    def take(self, call: PendingCall) -> list[FinishedGroup]:
        """The groups that a finished turn reported; the engine's next turn starts. Other calls give nothing."""
        engine = self._engine_of_turn.pop(call, None)
        if engine is None:
            return []
        engine.turn = None
        report: EngineReport = call.result()
        engine.busy_seconds += report.busy_seconds
        wanted = [group for group in report.groups if engine.outstanding.pop(group.request_id, None) is not None]
        self._start_turns()
        return wanted

    def drain(self, deadline: float) -> None:
        """Wait until no turn is in flight, so that weights can be exchanged; ``deadline`` in seconds."""
        while self._engine_of_turn:
            for call in wait_any(self.pending, timeout=deadline):
                self.take(call)

    def _route_waiting(self) -> None:
        while self._waiting:
            engine = min(self._engines, key=lambda e: e.load)
            if len(engine.outstanding) >= self._max_running_requests:
                return
            request = self._waiting.popleft()
            engine.outstanding[request.request_id] = request.num_samples
            engine.to_add.append(request)

    def _start_turns(self) -> None:
        self._route_waiting()
        for engine in self._engines:
            if engine.turn is None and (engine.outstanding or engine.to_abort):
                command = EngineCommand(tuple(engine.to_add), tuple(engine.to_abort), self._slice_seconds)
                engine.to_add, engine.to_abort = [], []
                engine.turn = self._cluster.submit(engine.rank, "advance", command)
                self._engine_of_turn[engine.turn] = engine
