"""Groups of trajectories that share a baseline, messages between driver and generation workers, and filters of groups
that are worth training on (dynamic sampling, DAPO: arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward has zero advantage everywhere and only dilutes the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise, repeat
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from roll.algorithms.registry import Registry
from roll.algorithms.samples import EPS
from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult, RewardSample
from roll.strategies.engines.requests import FinishReason, GenerationOutput, GenerationRequest


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One turn of an engine: take ``add``, drop ``abort``, give ``recall`` back, then work until something is worth
    reporting."""

    add: Sequence[GenerationRequest] = ()
    abort: Sequence[str] = ()
    recall: Sequence[str] = ()  # requests to stop and report as they are
    slice_seconds: float = 0.05
    """Report finished groups after about this long; an engine that has finished everything reports at once."""
    work: bool = True  # False: generate nothing, only do what is said here
    watch: Sequence[str] = ()  # requests whose samples are reported as they grow, about every ``slice_seconds``
    report_refusals: bool = False
    """A request that the engine refuses comes back as a group with an ``error``; else the turn fails."""


@dataclass(slots=True)
class FinishedGroup:
    """All samples of one request, or of one prompt in several rounds. Sample i owns ``lengths[i]`` consecutive entries
    of the flat arrays: the tokens after the prompt."""

    request_id: str
    token_ids: np.ndarray  # int32 (sum of lengths,)
    log_probs: np.ndarray  # float32 (sum of lengths,)
    lengths: np.ndarray  # int64 (num_samples,)
    finish_reasons: list[FinishReason]
    texts: list[str]  # the decoded responses, without special tokens; for rewards and people, never tokenised again
    weight_versions: list[list[tuple[int, int, int]]]
    """By sample: (version, first, end) of its tokens; together they cover those that were sampled."""
    top_log_probs: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    """By sample and position the most probable tokens, where the request wants them."""
    error: str | None = None  # why the engine refused the request; such a group has no samples
    routes: Sequence[np.ndarray | None] = ()
    """By sample, as :attr:`GenerationOutput.routes`; empty where the engine records none."""
    context: Sequence[int] = ()
    """The prompt that the engine was given; the driver's own, which engines do not send back."""

    @staticmethod
    def from_samples(samples: Sequence[GenerationOutput], texts: list[str]) -> FinishedGroup:
        """Pack the samples of one request, in the order of their ``sample_index``."""
        lengths = np.fromiter((len(s.token_ids) for s in samples), dtype=np.int64, count=len(samples))
        return FinishedGroup(
            request_id=samples[0].request_id,
            token_ids=np.fromiter((t for s in samples for t in s.token_ids), dtype=np.int32, count=lengths.sum()),
            log_probs=np.fromiter((p for s in samples for p in s.log_probs), dtype=np.float32, count=lengths.sum()),
            lengths=lengths,
            finish_reasons=[s.finish_reason for s in samples],
            texts=texts,
            weight_versions=[s.weight_versions for s in samples],
            top_log_probs=[s.top_log_probs for s in samples],
            routes=[s.routes for s in samples] if samples[0].routes is not None else (),
        )

    @staticmethod
    def empty(request_id: str, error: str | None = None) -> FinishedGroup:
        none = np.zeros(0, dtype=np.int64)
        return FinishedGroup(request_id, none.astype(np.int32), none.astype(np.float32), none, [], [], [], error=error)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays, without the context."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "context"}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], context: Sequence[int]) -> FinishedGroup:
        """The inverse of :meth:`state_dict`."""
        return cls(**{item.name: state[item.name] for item in fields(cls) if item.name in state}, context=context)

    def samples(self, prompt: PromptRow) -> list[Sample]:
        """The samples as those of ``prompt``, with which the context begins."""
        # Views of the flat arrays: a Python object a token would cost the driver more than the rest of a step.
        ids, log_probs, routes = self.split(self.token_ids), self.split(self.log_probs), self.routes or repeat(None)
        own = zip(ids, log_probs, self.weight_versions, self.finish_reasons, self.texts, routes, strict=False)
        return [Sample(prompt, self.context, *parts) for parts in own]

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """The per-sample views of one of the flat arrays."""
        return [flat[first:end] for first, end in pairwise([0, *np.cumsum(self.lengths).tolist()])]


@dataclass(slots=True)
class EngineReport:
    """Report of an engine at the end of its turn."""

    groups: list[FinishedGroup] = field(default_factory=list)
    recalled: list[GenerationRequest] = field(default_factory=list)
    """Recalled requests, with everything that their samples have so far."""
    progress: dict[str, list[GenerationOutput]] = field(default_factory=dict)
    """By request that is watched and not finished: its samples so far, in any order."""
    num_unfinished: int = 0  # samples still queued or running
    busy_seconds: float = 0.0  # time spent generating during the turn
    prompt_counts: tuple[int, int] = (0, 0)
    """Prompt tokens since the last report, and those of them that the engine's prefix cache had."""


class Trajectory(Protocol):
    """Everything sampled for one reward: a response to a prompt, or an episode of several calls."""

    @property
    def score(self) -> float:
        """NaN: nothing can be said about the policy."""

    @property
    def error(self) -> str | None: ...

    @property
    def is_sampled(self) -> bool:
        """The policy has been asked."""

    def version_counts(self) -> list[tuple[int, int]]:
        """Versions of the weights that sampled it, each with its number of tokens."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but its prompt or task, as plain values and arrays."""


UNSCORED = RewardResult(None, error="no reward was computed")


@dataclass(slots=True)
class Sample:
    """A response to a prompt: a trajectory of one call."""

    prompt: PromptRow
    new_ids: Sequence[int]
    """All that the engine was given: the prompt's ids, and what a rollout loop has put after them."""
    response_ids: np.ndarray  # int32 (length,)
    log_probs: np.ndarray  # float32 (length,)
    weight_versions: list[tuple[int, int, int]]  # as in :class:`FinishedGroup`
    finish_reason: FinishReason
    text: str
    routes: np.ndarray | None = None
    reward: RewardResult = UNSCORED
    model_result: RewardResult | None = None
    """Score by the role ``reward_model``, where the domain uses it; known before the reward."""
    is_sampled: ClassVar[bool] = True

    @property
    def score(self) -> float:
        return float("nan") if self.reward.score is None else self.reward.score

    @property
    def error(self) -> str | None:
        return self.reward.error

    @property
    def versions(self) -> np.ndarray:
        """Weight version of every sampled id, int32 (length,)."""
        parts = [np.full(end - first, version, np.int32) for version, first, end in self.weight_versions]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts])

    def version_counts(self) -> list[tuple[int, int]]:
        return [(version, end - first) for version, first, end in self.weight_versions]

    def for_reward(self) -> RewardSample:
        """The part of it that reward workers see."""
        prompt, size = self.prompt, len(self.response_ids)
        told = prompt.prompt_text, self.text, prompt.ground_truth, self.finish_reason, prompt.row, size
        return RewardSample(*told, self.model_result)

    def state_dict(self) -> dict[str, Any]:
        names = ("response_ids", "log_probs", "weight_versions", "finish_reason", "text", "routes")
        given = np.asarray(self.new_ids[len(self.prompt.token_ids) :], dtype=np.int32)
        return {name: getattr(self, name) for name in names} | {"given": given, "reward": asdict(self.reward)}

    @classmethod
    def from_state(cls, prompt: PromptRow, state: Mapping[str, Any]) -> Sample:
        """The inverse of :meth:`state_dict`."""
        own = {name: value for name, value in state.items() if name not in ("given", "reward")}
        given = state["given"].tolist()
        context = [*prompt.token_ids, *given] if given else prompt.token_ids
        return cls(prompt, context, reward=RewardResult(**state["reward"]), **own)


ItemT = TypeVar("ItemT")
TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)


@dataclass(slots=True)
class Group(Generic[ItemT, TrajectoryT]):
    """Trajectories that share a baseline."""

    order: int
    """Position in the order in which prompts or tasks were drawn; results are sorted by it, whoever finished first."""
    item: ItemT  # the prompt or task
    members: list[TrajectoryT]

    @property
    def error(self) -> str | None:
        """Why a member has no score of its own, if one has none."""
        return next((one.error for one in self.members if one.error is not None), None)

    def scores(self) -> np.ndarray:
        """float32 (members,); NaN where a member has no score."""
        return np.array([one.score for one in self.members], dtype=np.float32)

    def mean_score(self) -> float:
        """The mean of the scores that are there; NaN for a group without any."""
        scores = [score for one in self.members if not math.isnan(score := one.score)]
        return sum(scores) / len(scores) if scores else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Everything but its number, as plain values and arrays."""
        item: Any = self.item
        return item.state_dict() | {"members": [one.state_dict() for one in self.members]}


AnyGroup = Group[Any, Any]
SampleGroup = Group[PromptRow, Sample]

GroupFilter = Callable[[np.ndarray], bool]
"""Takes the scores of a group, float32 (num_samples,) with NaN where a reward is missing; True keeps the group."""


def mean_filter(threshold_down: float = 0.0, threshold_up: float = 1.0) -> GroupFilter:
    """Keep groups whose mean score lies strictly between the two thresholds; compared in the scores' float32."""
    low, high = np.float32(threshold_down), np.float32(threshold_up)
    return lambda scores: bool(low < np.float32(np.nanmean(scores, dtype=np.float64)) < high)


def std_filter(std_threshold: float = 0.0) -> GroupFilter:
    """Keep groups whose scores differ, by a population standard deviation of more than ``std_threshold``, and by more
    than arithmetic in float32 leaves of equal ones: a millionth of their size."""

    def keep(scores: np.ndarray) -> bool:
        exact = scores.astype(np.float64)
        return bool(np.nanstd(exact) > max(std_threshold, EPS * np.nanmax(np.abs(exact))))

    return keep


def no_filter() -> GroupFilter:
    return lambda scores: True


FilterFactory = Callable[..., GroupFilter]  # makes a filter from ``filter_args``, given as keywords

group_filters: Registry[FilterFactory] = Registry("query_filter_config.type")
for _factory in (no_filter, mean_filter, std_filter):
    group_filters.add(_factory, _factory.__name__)


def by_domain(filters: Mapping[str, GroupFilter]) -> Callable[[SampleGroup], bool]:
    """The filter of each group's domain; a domain without one keeps all."""
    return lambda group: group.item.domain not in filters or filters[group.item.domain](group.scores())


def response_mask(scores: np.ndarray, domains: np.ndarray, filters: Mapping[str, GroupFilter]) -> np.ndarray:
    """Responses that the filters of their domains keep, each judged as a group of one: bool (B,).

    Args:
        scores: float (B,), NaN where a reward is missing.
        domains: object (B,).
        filters: by domain; a domain without one keeps all.
    """
    pairs = zip(scores[:, None], domains, strict=True)
    return np.array([domain not in filters or filters[domain](score) for score, domain in pairs], dtype=bool)


def build_filter(kind: str, filter_args: Mapping[str, Any]) -> GroupFilter:
    """Build the filter of a ``query_filter_config`` section.

    ``kind`` is a name or the dotted path of a :data:`FilterFactory`.  A group without any reward is never kept,
    whatever the filter.

    Raises:
        ValueError: no such factory, or one that does not take these arguments.
    """
    factory = group_filters.resolve(kind)
    try:
        keep = factory(**filter_args)
    except TypeError as error:
        raise ValueError(f"query_filter_config.filter_args {dict(filter_args)} do not fit {kind}: {error}") from error
    return lambda scores: not np.isnan(scores).all() and keep(scores)
