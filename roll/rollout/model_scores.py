"""Has the role ``reward_model`` look at samples before the rewards of their domain do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.config.rewards import TOKENS
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


class ScoringWorker(Protocol):
    """A reward model's worker (:class:`roll.workers.model.RewardModelWorker`)."""

    def score(self, inputs: Sequence[ModelInput]) -> tuple[int, list[RewardResult]]: ...


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
        return self._cluster.call_all(ScoringWorker.score, inputs)

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
