"""The reward workers of all domains as one client, with the role reward_model in front of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from roll.config.rewards import TOKENS, RewardConfig
from roll.config.roles import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError
from roll.distributed import Cluster, WorkerDied
from roll.rewards.base import RewardResult, RewardSample, apply_on_error, failure
from roll.rollout.groups import SampleGroup
from roll.rollout.mending import Mended, SetAside, replace_rank


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Input of a reward model for one sample: token ids as they are, else a conversation with its answer."""

    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    response: str = ""
    error: str | None = None
    """Why there is nothing to look at."""


class RuleWorker(Protocol):
    """A reward's worker (:class:`roll.workers.reward.RewardWorker`)."""

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]: ...


class ScoringWorker(Protocol):
    """A reward model's worker (:class:`roll.workers.model.RewardModelWorker`)."""

    def initialize(self) -> None: ...

    def score(self, inputs: Sequence[ModelInput]) -> tuple[int, list[RewardResult]]: ...


class ModelScorer:
    """Sends the samples of some domains to the cluster of the role ``reward_model``.

    Args:
        inputs: by domain that uses the model: ``chat`` or ``tokens``.
        columns: the data sections whose columns rows may have (training, validation).
        aside: takes the inputs that kill the model's workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        inputs: Mapping[str, str],
        columns: Sequence[DataArguments],
        aside: SetAside | None = None,
    ) -> None:
        self._cluster = cluster
        self._inputs = inputs
        self._columns = columns
        self._aside = aside or SetAside()
        self._mended = Mended(self._ask, self._replace, self._set_aside)

    def wants(self, group: SampleGroup) -> bool:
        return group.prompt.domain in self._inputs

    async def score(self, groups: Sequence[SampleGroup]) -> None:
        """Give every group the model's results; every rank gets all texts and takes its share of them."""
        inputs = [one for group in groups for one in self._model_inputs(group)]
        results = await self._mended(inputs)
        begin = 0
        for group in groups:
            group.model_results = results[begin : begin + group.num_samples]
            begin += group.num_samples

    async def _ask(self, inputs: Sequence[ModelInput]) -> list[RewardResult]:
        shares: dict[int, list[RewardResult]] = dict(await self._cluster.call_all(ScoringWorker.score, inputs))
        columns = [iter(shares[rank]) for rank in sorted(shares)]
        count = sum(map(len, shares.values()))
        return [next(columns[number % len(columns)]) for number in range(count)]

    async def _replace(self, death: WorkerDied) -> None:
        """All ranks: they compute together."""
        self._aside.num_deaths += 1
        self._cluster.start_again()
        await self._cluster.call_all(ScoringWorker.initialize)

    def _set_aside(self, given: ModelInput, death: WorkerDied) -> RewardResult:
        self._aside.add(self._cluster.name, asdict(given), death)
        return failure(f"{self._cluster.name}: this sample has killed its worker twice")

    def _model_inputs(self, group: SampleGroup) -> list[ModelInput]:
        finished, prompt = group.finished, group.prompt
        if self._inputs[prompt.domain] == TOKENS:
            responses = finished.split(finished.token_ids)
            return [ModelInput(token_ids=[*prompt.token_ids, *response.tolist()]) for response in responses]
        if finished.given is not None:
            problem = (
                "a sample of several rounds has no messages; a reward model that reads the policy's tokens sees all"
            )
            return [ModelInput(error=problem)] * group.num_samples
        try:
            messages = self._messages(prompt.row)
        except DataError as error:
            return [ModelInput(error=str(error))] * group.num_samples
        return [ModelInput(messages=messages, response=text) for text in finished.texts]

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        source, problem = SourceRow(Path("data"), 0, row), DataError("no data section")
        for data_args in self._columns:
            try:
                return Columns.of(data_args, source).read_messages(source)
            except DataError as error:
                problem = error
        raise problem


Asked = list[tuple[SampleGroup, asyncio.Future[None]]]
"""Groups to be scored, with who waits for each."""


class RewardClient:
    """The reward clusters of all domains for any number of coroutines on one event loop.

    Groups that are given in the same pass of the loop travel together: spread over the workers of their domain, those
    with the fewest samples in hand first.

    Args:
        scorer: the role ``reward_model``; the groups that it wants go through it first.
        aside: takes the samples that kill their workers.
    """

    def __init__(
        self, clusters: Mapping[str, Cluster], scorer: ModelScorer | None = None, aside: SetAside | None = None
    ) -> None:
        self._clusters = clusters
        self.aside = aside or SetAside()
        self._workers = {
            domain: [self._worker(cluster, rank) for rank in range(cluster.world_size)]
            for domain, cluster in clusters.items()
        }
        self._scorer = scorer
        self._load = {domain: [0] * cluster.world_size for domain, cluster in clusters.items()}
        self._calls: set[asyncio.Task[None]] = set()
        self._for_model: Asked = []
        self._for_workers: Asked = []
        self.num_pending = 0
        """Groups that somebody waits for."""
        self.num_calls = 0
        """Calls that have been answered."""

    async def score(self, group: SampleGroup) -> SampleGroup:
        """``group`` with its rewards.

        Raises:
            RemoteError: a reward worker failed, or died and could not be replaced.
        """
        self.num_pending += 1
        try:
            if self._scorer is not None and self._scorer.wants(group):
                await self._ask(self._for_model, self._send_to_model, group)
            await self._ask(self._for_workers, self._send_to_workers, group)
        finally:
            self.num_pending -= 1
        return group

    async def _ask(self, asked: Asked, send: Callable[[], None], group: SampleGroup) -> None:
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[None] = loop.create_future()
        if not asked:
            loop.call_soon(send)
        asked.append((group, scored))
        await scored

    def _send_to_model(self) -> None:
        assert self._scorer is not None
        asked = [(group, scored) for group, scored in self._for_model if not scored.done()]
        self._for_model.clear()
        self._begin(asked, self._scorer.score)

    def _send_to_workers(self) -> None:
        by_domain: dict[str, Asked] = defaultdict(list)
        for group, scored in self._for_workers:
            if not scored.done():  # else nobody waits for it any more
                by_domain[group.prompt.domain].append((group, scored))
        self._for_workers.clear()
        for domain, members in by_domain.items():
            load = self._load[domain]
            workers = min(len(load), len(members))
            for part in range(workers):
                rank, mine = load.index(min(load)), members[part::workers]
                load[rank] += sum(group.num_samples for group, _ in mine)
                self._begin(mine, partial(self._ask_worker, domain, rank))

    def _begin(self, asked: Asked, score: Callable[[list[SampleGroup]], Coroutine[Any, Any, None]]) -> None:
        call = asyncio.create_task(self._answer(asked, score))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, asked: Asked, score: Callable[[list[SampleGroup]], Coroutine[Any, Any, None]]) -> None:
        """Have groups scored, and wake up those who wait; a failure is theirs."""
        try:
            await score([group for group, _ in asked])
        except Exception as error:
            for _, scored in asked:
                if not scored.done():
                    scored.set_exception(error)
            return
        self.num_calls += 1
        for _, scored in asked:
            if not scored.done():
                scored.set_result(None)

    async def _ask_worker(self, domain: str, rank: int, groups: list[SampleGroup]) -> None:
        samples = [sample for group in groups for sample in group.reward_samples()]
        try:
            results = await self._workers[domain][rank](samples)
        finally:
            self._load[domain][rank] -= len(samples)
        begin = 0
        for group in groups:
            group.rewards = results[begin : begin + group.num_samples]
            begin += group.num_samples

    def _worker(self, cluster: Cluster, rank: int) -> Mended[RewardSample, RewardResult]:
        async def ask(samples: Sequence[RewardSample]) -> list[RewardResult]:
            return await cluster.submit(rank, RuleWorker.score, samples)

        async def replace(death: WorkerDied) -> None:
            self.aside.num_deaths += 1
            await replace_rank(cluster, rank)

        def set_aside(sample: RewardSample, death: WorkerDied) -> RewardResult:
            section = cluster.role
            on_error = section.on_error if isinstance(section, RewardConfig) else "mask"
            if on_error == "raise":
                raise death
            self.aside.add(cluster.name, asdict(sample), death)
            result = failure(f"{cluster.name}: this sample has killed its worker twice")
            value = section.error_value if isinstance(section, RewardConfig) else 0.0
            return apply_on_error([result], on_error, value)[0]

        return Mended(ask, replace, set_aside)
