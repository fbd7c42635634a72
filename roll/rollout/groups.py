"""Groups of trajectories that share a baseline, and messages between driver and generation workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise, repeat
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult, RewardSample
from roll.strategies.engines.requests import FinishReason, GenerationOutput, GenerationRequest


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One turn of an engine: take ``add``, drop ``abort``, give ``recall`` back, then work until something is worth
    reporting."""

    add: Sequence[GenerationRequest] = ()
    abort: Sequence[str] = ()
    recall: Sequence[str] = ()
    """Requests to stop and report as they are."""
    slice_seconds: float = 0.05
    """Report finished groups after about this long; an engine that has finished everything reports at once."""
    work: bool = True
    """False: generate nothing, only do what is said here."""
    watch: Sequence[str] = ()
    """Requests whose samples are reported as they grow, about every ``slice_seconds``."""
    report_refusals: bool = False
    """A request that the engine refuses comes back as a group with an ``error``; else the turn fails."""


@dataclass(slots=True)
class FinishedGroup:
    """All samples of one request, or of one prompt in several rounds. Sample i owns ``lengths[i]`` consecutive entries
    of the flat arrays: the tokens after the prompt."""

    request_id: str
    token_ids: np.ndarray
    """int32 (sum of lengths,)."""
    log_probs: np.ndarray
    """float32 (sum of lengths,)."""
    lengths: np.ndarray
    """int64 (num_samples,)."""
    finish_reasons: list[FinishReason]
    texts: list[str]
    """The decoded responses, without special tokens; for rewards and people, never tokenised again."""
    weight_versions: list[list[tuple[int, int, int]]]
    """By sample: (version, first, end) of its tokens; together they cover those that were sampled."""
    top_log_probs: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    """By sample and position the most probable tokens, where the request wants them."""
    error: str | None = None
    """Why the engine refused the request; such a group has no samples."""
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
        """A group without samples."""
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
        context, made, first = self.context, [], 0
        routes = self.routes or repeat(None)
        own = zip(self.lengths.tolist(), self.weight_versions, self.finish_reasons, self.texts, routes, strict=False)
        for length, versions, reason, text, route in own:
            end = first + length
            ids, log_probs = self.token_ids[first:end], self.log_probs[first:end]
            made.append(Sample(prompt, context, ids, log_probs, versions, reason, text, route))
            first = end
        return made

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
    num_unfinished: int = 0
    """Samples still queued or running."""
    busy_seconds: float = 0.0
    """Time spent generating during the turn."""
    prompt_counts: tuple[int, int] = (0, 0)
    """Prompt tokens since the last report, and those of them that the engine's prefix cache had."""


class Response(Protocol):
    """The outcome of one request: a sample of a prompt, or a call of an episode."""

    new_ids: Any
    """Ids in front of it, behind the response before, if there is one."""
    response_ids: Any
    log_probs: Any

    @property
    def versions(self) -> Any:
        """Weight version of every sampled id."""


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
    response_ids: np.ndarray
    """int32 (length,)."""
    log_probs: np.ndarray
    """float32 (length,)."""
    weight_versions: list[tuple[int, int, int]]
    """As in :class:`FinishedGroup`."""
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
        parts = [np.full(end - first, version, np.int32) for version, first, end in self.weight_versions]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts])

    def version_counts(self) -> list[tuple[int, int]]:
        return [(version, end - first) for version, first, end in self.weight_versions]

    def for_reward(self) -> RewardSample:
        """The part of it that reward workers see."""
        prompt = self.prompt
        return RewardSample(
            prompt.prompt_text,
            self.text,
            prompt.ground_truth,
            self.finish_reason,
            prompt.row,
            len(self.response_ids),
            self.model_result,
        )

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
    item: ItemT
    """The prompt or task."""
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
