"""The reward workers of all domains as one client, with the role reward_model in front of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from roll.config.reward_models import TOKENS
from roll.config.roles import DataArguments
from roll.datasets.columns import Columns
from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError
from roll.distributed import Cluster, PendingCall
from roll.rewards.base import RewardResult
from roll.rollout.groups import SampleGroup


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a reward model is given of one sample: token ids as they are, else a conversation with its answer."""

    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    response: str = ""
    error: str | None = None
    """Why there is nothing to look at."""


class ModelScorer:
    """Sends the samples of some domains to the cluster of the role ``reward_model``.

    Args:
        inputs: by domain that uses the model: ``chat`` or ``tokens``.
        columns: the data sections whose columns rows may have (training, validation).
    """

    def __init__(self, cluster: Cluster, inputs: Mapping[str, str], columns: Sequence[DataArguments]) -> None:
        self._cluster = cluster
        self._inputs = inputs
        self._columns = columns

    def wants(self, group: SampleGroup) -> bool:
        return group.prompt.domain in self._inputs

    def submit(self, groups: Sequence[SampleGroup]) -> PendingCall:
        """Start scoring; every rank gets all texts and takes its share of them."""
        inputs = [one for group in groups for one in self._model_inputs(group)]
        call: PendingCall = self._cluster.score(inputs, blocking=False)
        return call

    def take(self, call: PendingCall, groups: Sequence[SampleGroup]) -> None:
        """Hand the model's scores to the groups of a call that is done."""
        shares: dict[int, list[RewardResult]] = dict(call.result())
        columns = [iter(shares[rank]) for rank in sorted(shares)]
        count = sum(map(len, shares.values()))
        results = [next(columns[number % len(columns)]) for number in range(count)]
        begin = 0
        for group in groups:
            group.model_results = results[begin : begin + group.num_samples]
            begin += group.num_samples

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


class RewardRouter:
    """One reward cluster a domain; a batch of groups goes to the worker with the fewest samples in hand.

    Args:
        scorer: the role ``reward_model``; the groups that it wants go through it first.
    """

    def __init__(self, clusters: Mapping[str, Cluster], scorer: ModelScorer | None = None) -> None:
        self._clusters = clusters
        self._scorer = scorer
        self._model_calls: dict[PendingCall, list[SampleGroup]] = {}
        self._load = {domain: [0] * cluster.world_size for domain, cluster in clusters.items()}
        self._calls: dict[PendingCall, tuple[str, int, list[SampleGroup]]] = {}

    @property
    def pending(self) -> list[PendingCall]:
        return [*self._calls, *self._model_calls]

    @property
    def num_pending_groups(self) -> int:
        with_workers = sum(len(groups) for _, _, groups in self._calls.values())
        return with_workers + sum(map(len, self._model_calls.values()))

    def submit(self, groups: list[SampleGroup]) -> None:
        """Start scoring ``groups``, spread over the workers of each domain."""
        if self._scorer is not None:
            wanted = [group for group in groups if self._scorer.wants(group)]
            if wanted:
                self._model_calls[self._scorer.submit(wanted)] = wanted
            groups = [group for group in groups if not self._scorer.wants(group)]
        self._submit_to_workers(groups)

    def _submit_to_workers(self, groups: list[SampleGroup]) -> None:
        by_domain: dict[str, list[SampleGroup]] = defaultdict(list)
        for group in groups:
            by_domain[group.prompt.domain].append(group)
        for domain, members in by_domain.items():
            workers = min(len(self._load[domain]), len(members))
            for part in range(workers):
                self._submit_to_least_loaded(domain, members[part::workers])

    def _submit_to_least_loaded(self, domain: str, groups: list[SampleGroup]) -> None:
        load = self._load[domain]
        rank = load.index(min(load))
        samples = [sample for group in groups for sample in group.reward_samples()]
        load[rank] += len(samples)
        call = self._clusters[domain].submit(rank, "score", samples)
        self._calls[call] = (domain, rank, groups)

    def take(self, call: PendingCall) -> list[SampleGroup]:
        """The scored groups of a call that is done; other calls give an empty list. Groups that the reward model has
        seen go on to the workers of their domain."""
        if call in self._model_calls:
            assert self._scorer is not None
            seen = self._model_calls.pop(call)
            self._scorer.take(call, seen)
            self._submit_to_workers(seen)
            return []
        if call not in self._calls:
            return []
        domain, rank, groups = self._calls.pop(call)
        results = cast(list[RewardResult], call.result())
        self._load[domain][rank] -= len(results)
        begin = 0
        for group in groups:
            group.rewards = results[begin : begin + group.num_samples]
            begin += group.num_samples
        return groups

    def drop_pending(self) -> None:
        """Forget scores that nobody waits for any more."""
        for domain, rank, groups in self._calls.values():
            self._load[domain][rank] -= sum(group.num_samples for group in groups)
        self._calls.clear()
        self._model_calls.clear()
