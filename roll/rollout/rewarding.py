"""The worker of a reward, and those of all domains as one client, with the role reward_model in front of them.

A worker that dies is replaced, and the samples that it had are scored again, one at a time.  A sample that kills a
second worker is quarantined: its result says so, and its row goes into a file.  All others get their scores.
Imports no torch: workers start in well under a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from roll.config.rewards import TOKENS, RewardConfig
from roll.config.roles import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError
from roll.distributed import Dispatch, Worker, WorkerDied, register
from roll.rewards import RewardResult, RewardSample, apply_on_error, build_section
from roll.rewards.base import failure

if TYPE_CHECKING:
    from roll.distributed import Cluster  # these import torch
    from roll.rollout.groups import SampleGroup

    Queue = list[tuple[SampleGroup, asyncio.Future[None]]]
    """Groups to be scored, with who waits for each."""

logger = logging.getLogger(__name__)

QUARANTINE_FILE = "set_aside.jsonl"  # in the folder of logs: a line for every sample that has killed its worker twice
MOST_IN_A_ROW = 3  # samples in a row that may kill their workers; where more do, the fault is not theirs

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class SampleQuarantine:
    """The account of samples that have killed their workers."""

    folder: Path | None = None  # where the file goes; None: no file is written
    num_deaths: int = 0  # workers that were replaced
    num_samples: int = 0

    def add(self, role: str, row: Mapping[str, Any], cause: object) -> RewardResult:
        """Write down a sample that has killed two workers of ``role``, or an episode whose environment fails again;
        return the result of such a sample."""
        self.num_samples += 1
        logger.error("a sample has failed its worker of %s twice and is quarantined: %s", role, cause)
        if self.folder is not None:
            line = json.dumps({"time": time.time(), "role": role, "cause": str(cause), **row}, default=str)
            with suppress(OSError):  # a full disk ends no run
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / QUARANTINE_FILE).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return failure(f"{role}: this sample has killed its worker twice")


@dataclass(eq=False)
class RestartingWorker(Generic[T, R]):
    """A worker, or a cluster that works as one, that is restarted when it dies."""

    ask: Callable[[Sequence[T]], Awaitable[list[R]]]  # has items worked on; raises :class:`WorkerDied`
    replace: Callable[[WorkerDied], Awaitable[None]]  # puts a new worker in the place of the dead one
    quarantine: Callable[[T, WorkerDied], R]  # gives the result of an item that has killed two workers
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _in_flight: set[asyncio.Task[list[R]]] = field(default_factory=set)
    _lives: int = 0  # workers that were replaced
    _death: WorkerDied | None = None  # the present worker's
    _in_a_row: int = 0

    async def __call__(self, items: Sequence[T]) -> list[R]:
        """One result an item. Raises ``WorkerDied``: of the last of too many that died one after the other, or of one
        that did not start."""
        async with self._lock:  # a successor may be starting, or a suspect may be alone with the worker
            if self._death is not None:
                await self._revive(self._death)
            ask = asyncio.create_task(self._try(items, self._lives))
            self._in_flight.add(ask)
            ask.add_done_callback(self._in_flight.discard)
        try:
            return await ask
        except WorkerDied:
            return [await self._alone(item) for item in items]

    async def _try(self, items: Sequence[T], life: int) -> list[R]:
        try:
            return await self.ask(items)
        except WorkerDied as death:
            if life == self._lives:  # else it is known, and the worker has been replaced
                self._death = death
            raise

    async def _alone(self, item: T) -> R:
        """The result of an item that may have killed its worker. Nothing else is at work on the worker meanwhile: all
        calls that it has fail when it dies, and only one of them is to blame."""
        async with self._lock:
            if self._in_flight:
                await asyncio.wait(self._in_flight)
            if self._death is not None:
                await self._revive(self._death)
            try:
                (result,) = await self._try([item], self._lives)
            except WorkerDied as death:
                self._in_a_row += 1
                if self._in_a_row > MOST_IN_A_ROW:
                    raise
                await self._revive(death)
                return self.quarantine(item, death)
            self._in_a_row = 0
            return result

    async def _revive(self, death: WorkerDied) -> None:
        logger.warning("a worker is replaced, and its work done again:\n%s", death)
        await self.replace(death)
        self._death = None
        self._lives += 1


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Input of a reward model for one sample: token ids as they are, else a conversation with its answer."""

    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    response: str = ""
    error: str | None = None  # reason why there is no input


class ScoringWorker(Protocol):
    """A reward model's worker (:class:`roll.workers.model.RewardModelWorker`)."""

    def initialize(self) -> None: ...

    def score(self, inputs: Sequence[ModelInput]) -> tuple[int, list[RewardResult]]: ...


class ModelScorer:
    """Sends the samples of some domains to the cluster of the role ``reward_model``.

    Args:
        inputs: by domain that uses the model: ``chat`` or ``tokens``.
        columns: the data sections whose columns rows may have (training, validation).
        quarantine: takes the inputs that kill the model's workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        inputs: Mapping[str, str],
        columns: Sequence[DataArguments],
        quarantine: SampleQuarantine | None = None,
    ) -> None:
        self._cluster = cluster
        self.inputs = inputs
        self._columns = columns
        self._quarantine = account = quarantine or SampleQuarantine()
        self._worker: RestartingWorker[ModelInput, RewardResult] = RestartingWorker(
            self._ask, self._replace, lambda given, death: account.add(cluster.name, asdict(given), death)
        )

    async def score(self, groups: Sequence[SampleGroup]) -> None:
        """Give every group the model's results; every rank gets all texts and takes its share of them."""
        inputs = [one for group in groups for one in self._model_inputs(group)]
        results = iter(await self._worker(inputs))
        for group in groups:
            for one in group.members:
                one.model_result = next(results)

    async def _ask(self, inputs: Sequence[ModelInput]) -> list[RewardResult]:
        # Ranks that split one copy of the model return the same share: the dict keeps one of each data-parallel rank.
        shares: dict[int, list[RewardResult]] = dict(await self._cluster.call_all(ScoringWorker.score, inputs))
        columns = [iter(shares[rank]) for rank in sorted(shares)]
        count = sum(map(len, shares.values()))
        # Data-parallel rank r scored inputs r, r + dp_size, ...: dealt back in turn.
        return [next(columns[number % len(columns)]) for number in range(count)]

    async def _replace(self, death: WorkerDied) -> None:
        self._quarantine.num_deaths += 1
        self._cluster.start_again()
        await self._cluster.call_all(ScoringWorker.initialize)

    def _model_inputs(self, group: SampleGroup) -> list[ModelInput]:
        if self.inputs[group.item.domain] == TOKENS:
            return [ModelInput(token_ids=[*one.new_ids, *one.response_ids.tolist()]) for one in group.members]
        source, problem = SourceRow(Path("data"), 0, group.item.row), "no data section"
        messages: list[dict[str, Any]] | None = None
        for data_args in self._columns:
            try:
                messages = Columns.of(data_args, source).read_messages(source)
                break
            except DataError as error:  # another section's columns may fit
                problem = str(error)
        if messages is None:
            return [ModelInput(error=problem)] * len(group.members)
        several = "a sample of several rounds has no messages; a reward model that reads the policy's tokens sees all"
        return [
            ModelInput(messages=messages, response=one.text)
            if len(one.new_ids) == len(group.item.token_ids)
            else ModelInput(error=several)
            for one in group.members
        ]


@dataclass(frozen=True)
class RewardSettings:
    """Keys of the section that are known when the run has started: the service that the reward's judges ask."""

    judge: Mapping[str, str] = field(default_factory=dict, repr=False)


class RewardWorker(Worker):
    """Scores finished samples of one domain."""

    settings_class = RewardSettings
    settings: RewardSettings

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> str:
        """Build the reward function that the section ``rewards.<name>`` describes; return what it says of this host."""
        judge: dict[str, Any] = dict(self.settings.judge)
        self.section = replace(cast(RewardConfig, self.context.role), **judge)
        self.reward = build_section(self.section.name, self.section)
        return self.reward.prepare()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. A sample that cannot be scored says why in ``error``. Raises ``RewardError``:
        a sample failed and the section says ``on_error: raise``."""
        results = self.reward(samples)
        assert len(results) == len(samples), f"{len(results)} rewards for {len(samples)} samples"
        return apply_on_error(results, self.section.on_error, self.section.error_value, self.section.name)

    def close(self) -> None:
        """Release the reward's helper processes when the cluster shuts down."""
        if hasattr(self, "reward"):
            self.reward.close()


class RewardClient:
    """The reward clusters of all domains for any number of coroutines on one event loop.

    Groups that are given in the same pass of the loop travel together: spread over the workers of their domain, those
    with the fewest outstanding samples first.

    Args:
        scorer: the role ``reward_model``; the groups that it wants go through it first.
        quarantine: takes the samples that kill their workers.
    """

    def __init__(
        self,
        clusters: Mapping[str, Cluster],
        scorer: ModelScorer | None = None,
        quarantine: SampleQuarantine | None = None,
    ) -> None:
        self.quarantine = quarantine or SampleQuarantine()
        self._workers = {
            domain: [self._worker(cluster, rank) for rank in range(cluster.world_size)]
            for domain, cluster in clusters.items()
        }
        self._scorer = scorer
        self._load = {domain: [0] * cluster.world_size for domain, cluster in clusters.items()}
        self._calls: set[asyncio.Task[None]] = set()
        self._for_model: Queue = []
        self._for_workers: Queue = []
        self.num_pending = 0  # groups whose :meth:`score` has not returned
        self.num_calls = 0  # calls that have been answered

    async def score(self, group: SampleGroup) -> SampleGroup:
        """``group`` with its rewards. Raises ``RemoteError``: a reward worker failed, or died and could not be
        replaced."""
        loop, stages = asyncio.get_running_loop(), [(self._for_workers, False)]
        if self._scorer is not None and group.item.domain in self._scorer.inputs:
            stages.insert(0, (self._for_model, True))
        self.num_pending += 1
        try:
            for queue, to_model in stages:
                scored: asyncio.Future[None] = loop.create_future()
                if not queue:
                    # Only the first of a pass schedules the sending: what the same pass queues after it goes along.
                    loop.call_soon(self._send, queue, to_model)
                queue.append((group, scored))
                await scored
        finally:
            self.num_pending -= 1
        return group

    def _send(self, queue: Queue, to_model: bool) -> None:
        waiting = [(group, scored) for group, scored in queue if not scored.done()]  # else nobody waits for it any more
        queue.clear()
        if to_model and self._scorer is not None:
            self._begin(waiting, self._scorer.score)
            return
        by_domain: dict[str, Queue] = defaultdict(list)
        for group, scored in waiting:
            by_domain[group.item.domain].append((group, scored))
        for domain, members in by_domain.items():
            load = self._load[domain]
            workers = min(len(load), len(members))
            for part in range(workers):
                rank, mine = load.index(min(load)), members[part::workers]
                load[rank] += sum(len(group.members) for group, _ in mine)
                self._begin(mine, partial(self._ask_worker, domain, rank))

    def _begin(self, queue: Queue, score: Callable[[list[SampleGroup]], Coroutine[Any, Any, None]]) -> None:
        call = asyncio.create_task(self._answer(queue, score))
        # Held here: the event loop has weak references to tasks only, and an unreferenced one may vanish in mid-call.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, queue: Queue, score: Callable[[list[SampleGroup]], Coroutine[Any, Any, None]]) -> None:
        """Have groups scored, and wake up those who wait; a failure is theirs."""
        failure: Exception | None = None
        try:
            await score([group for group, _ in queue])
            self.num_calls += 1
        except Exception as error:
            failure = error
        for _, scored in queue:
            if not scored.done():
                if failure is None:
                    scored.set_result(None)
                else:
                    scored.set_exception(failure)

    async def _ask_worker(self, domain: str, rank: int, groups: list[SampleGroup]) -> None:
        samples = [one.for_reward() for group in groups for one in group.members]
        try:
            results = iter(await self._workers[domain][rank](samples))
        finally:
            self._load[domain][rank] -= len(samples)
        for group in groups:
            for one in group.members:
                one.reward = next(results)

    def _worker(self, cluster: Cluster, rank: int) -> RestartingWorker[RewardSample, RewardResult]:
        async def replace(death: WorkerDied) -> None:
            self.quarantine.num_deaths += 1
            # First of the three: it kills what is left of the old process, and `restart` refuses a rank in use.
            cluster.leave_out(rank)
            await cluster.restart(rank)
            cluster.rejoin(rank)

        def quarantine(sample: RewardSample, death: WorkerDied) -> RewardResult:
            section = cluster.role if isinstance(cluster.role, RewardConfig) else RewardConfig()
            if section.on_error == "raise":
                raise death
            result = self.quarantine.add(cluster.name, asdict(sample), death)
            return apply_on_error([result], section.on_error, section.error_value)[0]

        return RestartingWorker(lambda samples: cluster.submit(rank, RewardWorker.score, samples), replace, quarantine)
