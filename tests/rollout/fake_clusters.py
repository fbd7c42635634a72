"""Clusters without processes: calls wait until the test lets them be done, or for a simulated while drawn at random."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from benchmarks.simulation.clock import Clock
from roll.distributed import DriverLoop, RemoteError, WorkerDied
from roll.distributed.failures import RankReport
from roll.rewards.base import RewardResult, RewardSample
from roll.rollout.engines import EngineClient, EngineWorker
from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup
from roll.rollout.rewarding import RewardWorker
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest

SLOWEST = 0.1
"""Simulated seconds that a call takes at most."""


def on_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine on a simulated clock; nothing may be left of it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        driver = DriverLoop(Clock())
        try:
            driver.run(test(*args, **kwargs))
        finally:
            driver.close()

    return run


def outstanding(client: EngineClient) -> int:
    """Unfinished samples submitted that have not come back."""
    given = sum(engine.num_samples for engine in client._engines)
    return given + sum(request.num_samples - len(request.finished) for request in client._waiting.values())


async def settle(passes: int = 12) -> None:
    """Let every coroutine go on as far as it can."""
    for _ in range(passes):
        await asyncio.sleep(0)


async def let_be_done(calls: Sequence[FakeCall]) -> None:
    """End calls, in this order, and let everybody act on it."""
    for call in list(calls):
        call.release()
    await settle()


@dataclass(eq=False)
class FakeCall:
    """A call that is done when the test lets it be, or, with a ``rng``, after a while drawn from it."""

    rank: int
    method: str
    argument: Any
    work: Callable[[], Any]
    rng: random.Random | None = None
    released: bool = False
    waiter: asyncio.Future[None] | None = None

    def within(self, seconds: float | None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        if self.rng is not None:
            yield from asyncio.sleep(self.rng.random() * SLOWEST).__await__()
        elif not self.released:
            self.waiter = asyncio.get_running_loop().create_future()
            yield from self.waiter
        return self.work()

    def release(self) -> None:
        self.released = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(eq=False)
class FakeRestart:
    """A process that is ready, or broken, when the test says so."""

    rank: int
    is_done: bool = False
    error: RemoteError | None = None

    def done(self) -> bool:
        return self.is_done

    def result(self) -> None:
        if self.error is not None:
            raise self.error

    def __await__(self) -> Generator[Any, None, None]:
        yield from settle().__await__()
        self.result()


@dataclass
class EngineRanks:
    """A cluster of engines, each with one turn in flight at most; those in ``dead`` never answer."""

    world_size: int = 1
    rng: random.Random | None = None
    calls: list[FakeCall] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    left_out: list[int] = field(default_factory=list)
    loss: type[RemoteError] = WorkerDied
    """The error of a call to a dead one."""

    def submit(self, rank: int, method: Callable[..., Any], command: EngineCommand) -> FakeCall:
        assert method is EngineWorker.advance
        assert not any(call.rank == rank for call in self.calls), "one turn at a time"
        call = FakeCall(rank, method.__name__, command, lambda: self._answer(call), self.rng)
        self.calls.append(call)
        return call

    def leave_out(self, rank: int) -> None:
        self.left_out.append(rank)

    def _answer(self, call: FakeCall) -> EngineReport:
        self.calls.remove(call)
        if call.rank in self.dead:
            raise self.loss("actor_infer", call.method, 0.0, [RankReport(call.rank, error="killed")], [])
        return self.advance(call.rank, call.argument)

    def advance(self, rank: int, command: EngineCommand) -> EngineReport:
        raise NotImplementedError


@dataclass
class FakeEngines(EngineRanks):
    """Engines that finish up to ``per_turn`` requests a turn, in the order given; sample 0 of every other one that they
    hold gets one token a turn that they work."""

    per_turn: int = 1_000
    held: list[dict[str, GenerationRequest]] = field(default_factory=list)
    seen: dict[str, tuple[int, GenerationRequest]] = field(default_factory=dict)
    """Every request with the engine that got it last."""
    aborted: list[str] = field(default_factory=list)
    restarts: list[FakeRestart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [{} for _ in range(self.world_size)]

    def restart(self, rank: int) -> FakeRestart:
        self.restarts.append(FakeRestart(rank))
        return self.restarts[-1]

    def rejoin(self, rank: int) -> None:
        assert rank in self.left_out and rank in self.dead
        self.left_out.remove(rank)
        self.dead.remove(rank)
        self.held[rank] = {}

    def advance(self, rank: int, command: EngineCommand) -> EngineReport:
        held = self.held[rank]
        for request_id in command.abort:
            self.aborted.append(bare(request_id))
            held.pop(request_id, None)
        recalled = [held.pop(request_id) for request_id in command.recall if request_id in held]
        for request in command.add:
            self.seen[bare(request.request_id)] = (rank, request)
            held[request.request_id] = request
        done = [held.pop(request_id) for request_id in list(held)[: self.per_turn]] if command.work else []
        if command.work:
            held.update((request_id, one_token_more(request)) for request_id, request in held.items())
        return EngineReport(
            groups=[finish(request) for request in done],
            recalled=recalled,
            num_unfinished=sum(r.num_samples for r in held.values()),
            busy_seconds=0.5,
        )


def bare(request_id: str) -> str:
    """The id that was submitted, of one that an engine knows."""
    return request_id.rpartition("#")[0]


def one_token_more(request: GenerationRequest) -> GenerationRequest:
    count = len(request.partial[0].token_ids) + 1 if request.partial else 1
    begun = GenerationOutput(request.request_id, 0, [5] * count, [-1.0] * count, "abort", [(0, 0, count)])
    return replace(request, partial={0: begun})


def finish(request: GenerationRequest) -> FinishedGroup:
    """Sample i answers with the prompt's first token, i + 1 times."""
    lengths = np.arange(1, request.num_samples + 1)
    token = request.prompt_token_ids[0]
    return FinishedGroup(
        request_id=request.request_id,
        token_ids=np.full(lengths.sum(), token, dtype=np.int32),
        log_probs=np.zeros(lengths.sum(), dtype=np.float32),
        lengths=lengths,
        finish_reasons=["stop"] * request.num_samples,
        texts=[" ".join([str(token)] * length) for length in lengths],
        weight_versions=[[] for _ in lengths],
    )


@dataclass
class FakeRewards:
    """Reward workers that score with a function of the sample."""

    score: Callable[[RewardSample], float | None]
    world_size: int = 1
    calls: list[FakeCall] = field(default_factory=list)
    samples_of_rank: dict[int, int] = field(default_factory=dict)
    rng: random.Random | None = None
    name: str = "rewards.a"
    role: Any = None
    restarts: list[int] = field(default_factory=list)

    def leave_out(self, rank: int) -> None:
        """The process has died anyway."""

    def restart(self, rank: int) -> Coroutine[Any, Any, None]:
        self.restarts.append(rank)
        return settle()

    def rejoin(self, rank: int) -> None:
        assert rank in self.restarts

    def submit(self, rank: int, method: Callable[..., Any], samples: Sequence[RewardSample]) -> FakeCall:
        assert method is RewardWorker.score
        self.samples_of_rank[rank] = self.samples_of_rank.get(rank, 0) + len(samples)
        call = FakeCall(rank, method.__name__, samples, lambda: self._score(call), self.rng)
        self.calls.append(call)
        return call

    def _score(self, call: FakeCall) -> list[RewardResult]:
        self.calls.remove(call)
        return [self._result(sample) for sample in call.argument]

    def _result(self, sample: RewardSample) -> RewardResult:
        score = self.score(sample)
        return RewardResult(score, error=None if score is not None else f"{sample.response!r} has no score")
