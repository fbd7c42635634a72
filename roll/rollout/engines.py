"""The generation engines of a role as one client: admission, routing, one turn in flight per engine, lost engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from roll.distributed import Cluster, PendingCall, RemoteError
from roll.rollout.groups import EngineCommand, EngineReport
from roll.rollout.routing import EngineAccount, Generation, Listener, PromptAffinityRouter, Router
from roll.strategies.engines.requests import GenerationRequest, PromptScore

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.05
"""Length of an engine's turn, after which finished groups are reported, where nothing else is chosen."""
PASSES_BEFORE_TURN = 4
"""Passes of the event loop between the first reason for a turn of an engine and its start: coroutines that wait for the
same thing continue in one pass, those that wait by ``asyncio.gather`` a few later, and their requests join the turn."""


class EngineWorker(Protocol):
    """An engine's worker (:class:`roll.workers.generation.GenerationWorker`)."""

    def advance(self, command: EngineCommand) -> EngineReport: ...

    def prompt_score(self, asked: tuple[Sequence[int], int]) -> PromptScore | str: ...


@dataclass(eq=False)
class EngineClient:
    """The engines of a cluster for any number of coroutines on one event loop.

    All samples of a request go to one engine, which computes the prompt once. Requests that are submitted in the same
    pass of the loop are spread by load alone (unless the router is another), so which engine gets which prompt does not
    depend on timing, as long as they fit under the limit.

    An engine is lost when its process dies, when it raises (out of memory), or when it does not answer in time: every
    answer means at least one token of each sample that it runs. It is killed and left out; the requests that it
    had go to the others, as they were given to it. The loss of the last one is raised by everything that waits. A new
    process may take the place of a lost one (:meth:`readmit`).
    """

    cluster: Cluster
    max_running_requests: int  # that one engine holds at a time; further requests wait here
    slice_seconds: float = SLICE_SECONDS  # a turn's length, before finished groups are reported
    router: Router | None = None  # chooses among the engines that have room; None: the one with the fewest samples
    report_refusals: bool = False  # a request that an engine refuses comes back as a group with an ``error``
    max_restarts: int = 0  # how often an engine that was lost is started again
    turn_timeout: float | None = None
    """Seconds after which an engine that has not answered is lost; None: as long as a call may take."""
    fixed_weights: bool = False
    """The weights never change, so that an engine that has been started again takes part as soon as it is ready, and
    even the last one may be lost and come back."""

    def __post_init__(self) -> None:
        cluster = self.cluster
        self._returns: dict[int, asyncio.Task[None]] = {}
        self._router = self.router or PromptAffinityRouter()
        self._engines = [EngineAccount(rank) for rank in range(cluster.world_size)]
        self._restarts_left = [self.max_restarts] * cluster.world_size
        self._restarting: dict[int, PendingCall] = {}
        self._waiting: OrderedDict[str, GenerationRequest] = OrderedDict()
        self._numbers = itertools.count()
        # By the ids that engines get, each of which is used once.
        self._generations: dict[str, Generation] = {}
        self._recalled: list[GenerationRequest] = []
        self._watched: dict[str, Generation] = {}
        self._paused = False
        self._wakes_in = 0
        self.failure: Exception | None = None  # that ended the last engine
        self.busy_seconds = 0.0  # of generation, summed over engines
        self.counts: Counter[str] = Counter()  # of all engines: `GenerationStrategy.counts`
        self.num_turns = 0  # that engines have ended
        self.num_deaths = 0  # of engines
        self.num_reissued = 0  # requests that went to another engine because theirs was lost

    @property
    def num_engines(self) -> int:
        """Engines that are not lost, as far as is known."""
        return len(self._engines)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def prompt_score(self, token_ids: Sequence[int], top: int) -> PromptScore | str:
        """Log-probs of a prompt's own tokens, from the engine with the fewest samples; or why there are none. Raises
        ``RemoteError``: the engine is lost."""
        self._check()
        while not self._engines:  # the last engine is being started again
            await self._some_turn()
        engine = min(self._engines, key=lambda one: one.num_samples)
        return await self.cluster.submit(engine.rank, EngineWorker.prompt_score, (token_ids, top))

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> Generation:
        """Have a request generated in the background. Awaiting the result raises :class:`RemoteError` where the last
        engine is lost. ``listener`` is called with what the samples have so far, after every turn of an engine that can
        tell."""
        # The number keeps names apart: a late report about an aborted request must not end a later one of its name.
        request_id = f"{request.request_id}#{next(self._numbers)}"
        finished = tuple(replace(output, request_id=request_id) for output in request.finished)
        named = replace(request, request_id=request_id, finished=finished)
        generation = Generation(self.abort, request.request_id, named, listener)
        if self.failure is not None:
            generation.finish(None, self.failure)
            return generation
        self._generations[request_id] = generation
        if listener is not None:
            self._watched[request_id] = generation
        self._waiting[request_id] = named
        self._wake()
        return generation

    def resubmit(self, generations: Iterable[Generation]) -> None:
        """Give requests that were recalled to the engines again: they continue where they were, on whatever engine.
        Those aborted in the meantime are passed over."""
        self._waiting.update((one.request.request_id, one.request) for one in generations if not one.done)
        self._wake()

    def abort(self, generations: Iterable[Generation]) -> None:
        """Discard requests; each engine hears of it with its next turn. Finished ones stay finished."""
        for generation in generations:
            request_id = generation.request.request_id
            if self._generations.pop(request_id, None) is None:
                continue
            self._watched.pop(request_id, None)
            generation.finish(None)
            if self._waiting.pop(request_id, None) is None:
                for engine in self._engines:
                    # What is still in the next command was never sent, so that the engine has nothing to abort.
                    if not engine.withdraw(request_id) and engine.release(request_id):
                        engine.to_abort.append(request_id)
        self._wake()

    async def recall(self, generations: Iterable[Generation] | None = None) -> list[Generation]:
        """Stop requests (None: all) and take them back, with everything that their samples have so far
        (``Generation.request``). Works in a pause as well.

        Returns:
            Those for :meth:`resubmit`, in the order given (None: engine by engine, then those that wait). One that is
            finished in the meantime is not among them.

        Raises:
            RemoteError: the last engine is lost.
        """
        self._check()
        if generations is None:
            ids = [id_ for engine in self._engines for id_ in engine.outstanding] + list(self._waiting)
        else:
            ids = [one.request.request_id for one in generations]
        wanted = set(ids)
        held = self._withdraw(wanted)
        while any(wanted & engine.outstanding.keys() for engine in self._engines):
            for engine in self._engines:
                # Set again before every turn: a turn in flight was given its command earlier, and each command empties
                # the list.
                engine.to_recall = sorted(wanted & engine.outstanding.keys())
            self._start_turns()
            await self._some_turn()
            held += self._withdraw(wanted)  # those that come from a lost engine
        for engine in self._engines:
            engine.to_recall = []
        held += [request for request in self._recalled if request.request_id in wanted]
        self._recalled = [request for request in self._recalled if request.request_id not in wanted]
        self._wake()
        requests = {request.request_id: request for request in held if request.request_id in self._generations}
        taken = [self._generations[request_id] for request_id in ids if request_id in requests]
        for generation in taken:
            generation.request = requests[generation.request.request_id]
        return taken

    async def pause(self) -> None:
        """Let the turns in flight end and start no others, so that weights can be exchanged. Samples stay at their
        engines, partial, and continue after :meth:`resume`; requests submitted meanwhile wait. Raises ``RemoteError``:
        the last engine is lost."""
        self._paused = True
        while any(engine.turn is not None for engine in self._engines):
            await self._some_turn()
        self._check()

    def hold(self) -> None:
        """Start no further turns until :meth:`resume`."""
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def dispatched(self) -> None:
        """Return when the turns that are due have been given to their engines."""
        # One pass for new coroutines to submit, those of the count-down, and one for the turns' tasks to send commands.
        await asyncio.sleep(0)
        while self._wakes_in:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def drain(self) -> None:
        """Wait until nothing is left to do (in a pause: until no turn is in flight)."""
        self._start_turns()
        while any(engine.turn is not None for engine in self._engines):
            await self._some_turn()
            self._start_turns()
        self._check()

    def readmit(self) -> None:
        """Take back the engines that have been started again and are ready. They have the weights of the run's start:
        to be called right before an exchange of weights, with no turn in flight."""
        # Engines that still load join at a later exchange: waiting for them here would stop all the others.
        ready = {rank: call for rank, call in self._restarting.items() if call.done()}
        for rank, call in ready.items():
            del self._restarting[rank]
            try:
                call.result()
            except RemoteError as error:
                logger.warning("engine %d did not start again: %s", rank, error)
                self._restart(rank)
            else:
                self._rejoin(rank)

    def _rejoin(self, rank: int) -> None:
        self.cluster.rejoin(rank)
        self._engines = sorted([*self._engines, EngineAccount(rank)], key=lambda engine: engine.rank)
        logger.info("engine %d is back", rank)

    def _restart(self, rank: int) -> None:
        if self._restarts_left[rank]:
            self._restarts_left[rank] -= 1
            self._restarting[rank] = self.cluster.restart(rank)

    # Turns

    def _wake(self) -> None:
        """Start turns soon, when the coroutines that can continue now have submitted their requests."""
        if not self._wakes_in and self.failure is None:
            self._wakes_in = PASSES_BEFORE_TURN
            asyncio.get_running_loop().call_soon(self._count_down)

    def _count_down(self) -> None:
        self._wakes_in -= 1
        if self._wakes_in:
            asyncio.get_running_loop().call_soon(self._count_down)
            return
        try:
            self._start_turns()
        except Exception as error:  # of a user's router
            self._fail(error)

    def _start_turns(self) -> None:
        """Give requests that wait to engines with room, and start the turns that are due."""
        while self._waiting and not self._paused:
            free = [engine for engine in self._engines if len(engine.outstanding) < self.max_running_requests]
            if not free:
                break
            request = next(iter(self._waiting.values()))
            rank = self._router.choose(request, free)
            chosen = next((engine for engine in free if engine.rank == rank), None)
            if chosen is None:
                raise ValueError(
                    f"the router chose engine {rank} for request {request.request_id.rpartition('#')[0]!r}; those "
                    f"with room are {', '.join(str(engine.rank) for engine in free)}"
                )
            self._waiting.popitem(last=False)
            chosen.accept(request)
        for engine in self._engines:
            # Recalls go out in a pause too; such a turn samples nothing, so no token is drawn during an exchange of
            # weights.
            has_work = engine.to_recall or (not self._paused and (engine.outstanding or engine.to_abort))
            if engine.turn is None and has_work:
                engine.turn = asyncio.create_task(self._take_turn(engine))

    async def _take_turn(self, engine: EngineAccount) -> None:
        command = engine.command(self.slice_seconds, not self._paused, self.report_refusals, self._watched)
        try:
            turn = self.cluster.submit(engine.rank, EngineWorker.advance, command).within(self.turn_timeout)
            try:
                report: EngineReport = await turn
            except RemoteError as loss:
                self._lose(engine, loss)
            else:
                self.num_turns += 1
                self.busy_seconds += report.busy_seconds
                self.counts.update(report.counts)
                for request_id, samples in report.progress.items():
                    generation = self._watched.get(request_id)
                    if generation is not None and generation.listener is not None:
                        generation.listener(samples)
                for group in report.groups:
                    # False for a request aborted while this turn was in flight, which has been answered already.
                    if engine.release(group.request_id):
                        self._watched.pop(group.request_id, None)
                        self._generations.pop(group.request_id).finish(group)
                self._recalled += [request for request in report.recalled if engine.release(request.request_id)]
        except Exception as error:  # of a listener, or a bug here: no request may wait for ever
            self._fail(error)
        finally:
            engine.turn = None
        self._wake()

    async def _some_turn(self) -> None:
        """Wait for the end of at least one turn, if there is any. Raises ``RemoteError``: the last engine is lost."""
        turns = [engine.turn for engine in self._engines if engine.turn is not None]
        waits = turns or list(self._returns.values())
        if waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _lose(self, engine: EngineAccount, loss: RemoteError) -> None:
        self._engines.remove(engine)
        # Read before `_restart`, which uses up one of the restarts.
        comes_back = self.fixed_weights and self._restarts_left[engine.rank] > 0
        if not self._engines and not self._returns and not comes_back:
            self._fail(loss)
            return
        self.cluster.leave_out(engine.rank)
        self._restart(engine.rank)
        if comes_back:
            self._returns[engine.rank] = asyncio.get_running_loop().create_task(self._return(engine.rank))
        self.num_deaths += 1
        self.num_reissued += len(engine.outstanding)
        held = len(engine.outstanding)
        logger.warning("an engine is lost: its %d requests go to the other %d\n%s", held, self.num_engines, loss)
        # In front of those that wait, being older. They restart from what they had when they were given to the engine:
        # the tokens that it has sampled since are lost with it.
        self._waiting = OrderedDict([*engine.outstanding.items(), *self._waiting.items()])

    async def _return(self, rank: int) -> None:
        """Wait until an engine with fixed weights has been started again, and give it work."""
        failure: RemoteError | None = None
        while rank in self._restarting:
            try:
                await self._restarting.pop(rank)
                failure = None
            except RemoteError as error:
                logger.warning("engine %d did not start again: %s", rank, error)
                failure = error
                self._restart(rank)  # does nothing where no restart is left
        del self._returns[rank]
        if failure is None:
            self._rejoin(rank)
            self._wake()
        elif not self._engines and not self._returns:
            self._fail(failure)

    def _fail(self, error: Exception) -> None:
        """End all requests: no engine is left to answer them."""
        logger.error("no engine is left: %s", error)
        self.failure = error
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.finish(None, error)

    def _withdraw(self, request_ids: set[str]) -> list[GenerationRequest]:
        unsent = []
        for engine in self._engines:
            mine = [request for id_, request in engine.to_add.items() if id_ in request_ids]
            unsent += [request for request in mine if engine.withdraw(request.request_id)]
        return unsent + [self._waiting.pop(id_) for id_ in list(self._waiting) if id_ in request_ids]
