"""The generation engines of a role as one: a shared queue, least-loaded first, a prompt's samples together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from roll.distributed import Cluster, PendingCall, RemoteError, wait_any
from roll.rollout.engine_account import EngineAccount, num_unfinished
from roll.rollout.messages import EngineReport, FinishedGroup, lane_of
from roll.rollout.routing import PromptAffinityRouter, Router
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)


class EnginePool:
    """Routes requests to engines and keeps one turn in flight on every engine that has work.

    All samples of a request go to one engine, which computes the prompt once. Requests given together are spread by
    load alone (unless the router is another), so which engine gets which prompt does not depend on timing, as long as
    they fit under the limit.

    An engine is lost when its process dies, when it raises (out of memory), or when it does not answer in time: every
    answer stands for at least one token of each sample that it runs. It is killed and left out; the requests that it
    had go to the others, as they were given to it. The loss of the last one ends the run. A new process may take the
    place of a lost one (:meth:`readmit`).

    Args:
        max_running_requests: requests that one engine has in hand at a time; further ones wait here.
        slice_seconds: how long a turn lasts before finished groups are reported.
        router: chooses among the engines that have room; None: the one with the fewest samples.
        report_refusals: a request that an engine refuses comes back as a group with an ``error``.
        max_restarts: how often an engine that was lost is started again.
        turn_timeout: seconds after which an engine that has not answered is lost; None: as long as a call may take.
    """

    def __init__(
        self,
        cluster: Cluster,
        max_running_requests: int,
        slice_seconds: float = 0.05,
        router: Router | None = None,
        report_refusals: bool = False,
        max_restarts: int = 0,
        turn_timeout: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._turn_timeout = turn_timeout
        self._router = router or PromptAffinityRouter()
        self._max_running_requests = max_running_requests
        self._waiting: deque[GenerationRequest] = deque()
        self._slice_seconds = slice_seconds
        self._report_refusals = report_refusals
        self._engines = [EngineAccount(rank) for rank in range(cluster.world_size)]
        self._restarts_left = [max_restarts] * cluster.world_size
        self._restarting: dict[int, PendingCall] = {}
        self._engine_of_turn: dict[PendingCall, EngineAccount] = {}
        self._ready: list[FinishedGroup] = []
        self._recalled: list[GenerationRequest] = []
        self._paused = False
        self._progress: dict[str, list[GenerationOutput]] = {}
        self.watched: dict[str, None] = {}
        """Requests whose samples are reported as they grow (:meth:`take_progress`)."""
        self.busy_seconds = 0.0
        """Seconds of generation, summed over engines, since the pool was made."""
        self.num_deaths = 0
        """Engines that were lost since then."""
        self.num_reissued = 0
        """Requests that were given to another engine because theirs was lost."""

    @property
    def pending(self) -> list[PendingCall]:
        return list(self._engine_of_turn)

    @property
    def num_engines(self) -> int:
        """Engines that are not lost, as far as is known."""
        return len(self._engines)

    @property
    def num_outstanding(self) -> int:
        """Unfinished samples asked for that have not come back."""
        return sum(engine.num_samples for engine in self._engines) + sum(
            num_unfinished(request) for request in self._waiting
        )

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Give each request to the engine that the router chooses; idle engines start at once."""
        self._waiting.extend(requests)
        self._start_turns()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Throw requests away; each engine hears of it with its next turn."""
        unwanted = set(request_ids)
        self._withdraw(unwanted)
        for engine in self._engines:
            mine = sorted(unwanted & engine.outstanding.keys())
            for request_id in mine:
                engine.release(request_id)
            engine.to_abort += mine
        self._start_turns()

    def recall(
        self, request_ids: Sequence[str] | None = None, deadline: float | None = None
    ) -> list[GenerationRequest]:
        """Stop requests (None: all) and take them back, with everything that their samples have so far.

        A request that is given to :meth:`submit` again goes on where it was, on whatever engine. One that is finished
        in the meantime is not among them but a group for :meth:`take`; unknown ids are passed over. Works in a pause
        as well.

        Args:
            deadline: seconds to wait for the turns in flight; None: as long as a call may take.

        Returns:
            The requests in the order of ``request_ids`` (None: engine by engine, then those that wait).

        Raises:
            RemoteError: the last engine was lost.
        """
        if request_ids is None:
            request_ids = [id_ for engine in self._engines for id_ in engine.outstanding]
            request_ids += [request.request_id for request in self._waiting]
        wanted = set(request_ids)
        held = self._withdraw(wanted)
        while any(wanted & engine.outstanding.keys() for engine in self._engines):
            for engine in self._engines:
                engine.to_recall = sorted(wanted & engine.outstanding.keys())
            self._start_turns()
            for call in self.wait(timeout=deadline):
                self._end_turn(call)
            held += self._withdraw(wanted)  # those that come from a lost engine
        for engine in self._engines:
            engine.to_recall = []
        held += self._recalled
        self._recalled = []
        self._start_turns()
        place = {request_id: index for index, request_id in enumerate(request_ids)}
        return sorted(held, key=lambda request: place[request.request_id])

    def pause(self, deadline: float | None = None) -> None:
        """Let the turns in flight end and start no others, so that weights can be exchanged. Samples stay at their
        engines, half done, and go on after :meth:`resume`; requests given meanwhile wait.

        Args:
            deadline: seconds to wait; None: as long as a call may take.
        """
        self._paused = True
        while self._engine_of_turn:
            for call in self.wait(timeout=deadline):
                self._end_turn(call)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._paused = False
        self._start_turns()

    def wait(self, others: Sequence[PendingCall] = (), timeout: float | None = None) -> list[PendingCall]:
        """Wait until a turn or one of ``others`` is done, in the manner of :func:`roll.distributed.wait_any`; the calls
        of which that is true. An engine's loss is dealt with; where no call is left then, the list is empty.

        Raises:
            RemoteError: what became of the last engine, or of one of ``others``; nothing was done within ``timeout``.
        """
        while True:
            try:
                return wait_any([*self._engine_of_turn, *others], timeout)
            except RemoteError as loss:
                self._lose(loss)
                if not self._engine_of_turn and not others:
                    return []

    def take(self, call: PendingCall, lane: str = "") -> list[FinishedGroup]:
        """End a turn that is done and start the engine's next one; then as :meth:`take_ready`. Calls that are no turns,
        or that another lane has taken, are welcome, too."""
        self._end_turn(call)
        self._start_turns()
        return self.take_ready(lane)

    def take_ready(self, lane: str = "") -> list[FinishedGroup]:
        """The groups of a lane (:func:`~roll.rollout.messages.lane_of`) that turns have reported and nobody has
        taken."""
        ready = [group for group in self._ready if lane_of(group.request_id) == lane]
        if ready:
            self._ready = [group for group in self._ready if lane_of(group.request_id) != lane]
        return ready

    def take_progress(self) -> dict[str, list[GenerationOutput]]:
        """What the samples of :attr:`watched` requests have, of those of which turns have said more since the last
        call; samples that are over are among them, requests that are not."""
        progress, self._progress = self._progress, {}
        return progress

    def readmit(self) -> None:
        """Take back the engines that have been started again and are ready. They have the weights of the run's start:
        to be called right before an exchange of weights, with no turn in flight."""
        ready = {rank: call for rank, call in self._restarting.items() if call.done()}
        for rank, call in ready.items():
            del self._restarting[rank]
            try:
                call.result()
            except RemoteError as error:
                logger.warning("engine %d did not start again: %s", rank, error)
                self._restart(rank)
                continue
            self._cluster.rejoin(rank)
            self._engines = sorted([*self._engines, EngineAccount(rank)], key=lambda engine: engine.rank)
            logger.info("engine %d is back", rank)

    def _restart(self, rank: int) -> None:
        if self._restarts_left[rank]:
            self._restarts_left[rank] -= 1
            self._restarting[rank] = self._cluster.restart(rank)

    def drain(self, deadline: float) -> None:
        """Wait until nothing is left to do (in a pause: until no turn is in flight); ``deadline`` in seconds."""
        while self._engine_of_turn:
            for call in self.wait(timeout=deadline):
                self._end_turn(call)
            self._start_turns()

    def _end_turn(self, call: PendingCall) -> None:
        engine = self._engine_of_turn.pop(call, None)
        if engine is None:
            return
        engine.turn = None
        report: EngineReport = call.result()
        self.busy_seconds += report.busy_seconds
        self._progress |= report.progress
        self._ready += [group for group in report.groups if engine.release(group.request_id) is not None]
        self._recalled += [request for request in report.recalled if engine.release(request.request_id) is not None]

    def _lose(self, loss: RemoteError) -> None:
        """Give what a lost engine had to the others; raise ``loss`` where there is none, or it is not an engine's."""
        engine = next((e for e in self._engines if e.turn is not None and e.turn.error is loss), None)
        if engine is None or engine.turn is None:
            raise loss
        del self._engine_of_turn[engine.turn]
        self._engines.remove(engine)
        if not self._engines:
            raise loss
        self._cluster.leave_out(engine.rank)
        self._restart(engine.rank)
        self.num_deaths += 1
        self.num_reissued += len(engine.outstanding)
        logger.warning(
            "an engine is lost: its %d requests go to the other %d\n%s",
            len(engine.outstanding),
            self.num_engines,
            loss,
        )
        self._waiting.extendleft(reversed(engine.outstanding.values()))
        self._start_turns()

    def _withdraw(self, request_ids: set[str]) -> list[GenerationRequest]:
        """Take back those requests that no engine has heard of yet."""
        unheard = [request for engine in self._engines for request in engine.withdraw(request_ids)]
        unheard += [request for request in self._waiting if request.request_id in request_ids]
        self._waiting = deque(request for request in self._waiting if request.request_id not in request_ids)
        return unheard

    def _route_waiting(self) -> None:
        while self._waiting:
            free = [engine for engine in self._engines if engine.num_requests < self._max_running_requests]
            if not free:
                return
            rank = self._router.choose(self._waiting[0], free)
            chosen = next((engine for engine in free if engine.rank == rank), None)
            if chosen is None:
                raise ValueError(
                    f"the router chose engine {rank} for request {self._waiting[0].request_id!r}; those with room are "
                    f"{', '.join(str(engine.rank) for engine in free)}"
                )
            chosen.accept(self._waiting.popleft())

    def _start_turns(self) -> None:
        if not self._paused:
            self._route_waiting()
        for engine in self._engines:
            has_work = engine.to_recall or (not self._paused and (engine.outstanding or engine.to_abort))
            if engine.turn is None and has_work:
                command = engine.command(self._slice_seconds, not self._paused, self._report_refusals, self.watched)
                engine.turn = self._cluster.submit(engine.rank, "advance", command, deadline=self._turn_timeout)
                self._engine_of_turn[engine.turn] = engine
