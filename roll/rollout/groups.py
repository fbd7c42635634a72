"""Groups of trajectories that share a baseline: as generation workers send them to the driver, and as the columns of a
training batch, which ``docs/architecture.md`` lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import compress, pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from roll.datasets.types import PromptRow
from roll.protocol import DataProto
from roll.protocol.vision import IMAGES
from roll.rewards.base import RewardResult, RewardSample
from roll.strategies.engines.requests import FinishReason, GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from roll.agents.conversation import Call


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
    counts: Counter[str] = field(default_factory=Counter)
    """Counts since the last report, under the names of ``GenerationStrategy.counts``."""


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

ResponseT = TypeVar("ResponseT", bound="Sample | Call")
"""The outcome of one request: a sample of a prompt, or a call of an episode."""


def build_batch(groups: Sequence[SampleGroup], pad_token_id: int) -> DataProto:
    """One row a sample, the samples of a group adjacent, right-padded to the longest sample of the batch.

    Returns:
        DataProto with tensors ``input_ids`` int64, ``attention_mask`` and ``response_mask`` (what the policy sampled)
        bool, ``rollout_log_probs`` float32, ``weight_versions`` int32, all (B, L); ``scores`` float32 (B,), NaN where a
        sample has no reward; ``group_ids`` int64 (B,); ``routed_experts`` (B, L, layers, k) where the engine records
        them; object columns ``prompt_id``, ``sample_id``, ``domain``, ``tag``, ``finish_reason``, and ``images`` where
        a prompt has some (:data:`roll.protocol.vision.IMAGES`).
    """
    samples = [one for group in groups for one in group.members]
    tensors = response_columns([Row((one,), (True,)) for one in samples], pad_token_id)
    tensors["scores"] = torch.from_numpy(np.concatenate([group.scores() for group in groups]))
    sizes = [len(group.members) for group in groups]
    tensors["group_ids"] = torch.from_numpy(np.repeat(np.arange(len(groups)), sizes))
    if (first := next((one.routes for one in samples if one.routes is not None), None)) is not None:
        # The mark of a missing record: uint8 has no -1, and is used for up to 255 experts, whose numbers end at 254.
        missing = 255 if first.dtype == np.uint8 else -1
        routes = np.full((*tensors["input_ids"].shape, *first.shape[1:]), missing, first.dtype)
        for row, one in enumerate(samples):
            if one.routes is not None:
                routes[row, : len(one.routes)] = one.routes
        tensors["routed_experts"] = torch.from_numpy(routes)
    objects: dict[str, Sequence[object]] = {
        name: [getattr(one.prompt, name) for one in samples] for name in ("prompt_id", "domain", "tag")
    }
    objects["sample_id"] = [f"{group.order}-{index}" for group in groups for index in range(len(group.members))]
    objects["finish_reason"] = [one.finish_reason for one in samples]
    if any(images := [one.prompt.vision for one in samples]):
        objects[IMAGES] = images
    return DataProto.from_dict(tensors, non_tensors=objects)


@dataclass(slots=True)
class Row(Generic[ResponseT]):
    """A row of a batch: responses one after the other, each behind its own new ids."""

    responses: Sequence[ResponseT]
    is_trained: Sequence[bool]  # by response: whether the row trains it, or it is context

    @property
    def trained(self) -> list[ResponseT]:
        return list(compress(self.responses, self.is_trained))


def response_columns(
    rows: Sequence[Row[Any]], pad_token_id: int, least_width: int = 1, **of_trained: tuple[np.ndarray, DTypeLike, float]
) -> dict[str, torch.Tensor]:
    """The columns of every batch of sampled rows: those of :func:`token_columns`, where the trained tokens count, with
    ``rollout_log_probs`` float32 and ``weight_versions`` int32."""
    arrays: dict[int, np.ndarray] = {}
    parts, counted, rows_of = list[Any](), list[bool](), list[int]()
    for number, row in enumerate(rows):
        for one, is_trained in zip(row.responses, row.is_trained, strict=True):
            # Once for all samples of a prompt, which share the list of its ids.
            if (front := arrays.get(id(one.new_ids))) is None:
                front = arrays[id(one.new_ids)] = np.asarray(one.new_ids, np.int64)
            parts += (front, one.response_ids)
            counted += (False, is_trained)
            rows_of += (number, number)
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    lengths = np.bincount(np.asarray(rows_of, np.int64), sizes, len(rows)).astype(np.int64)
    trained = [one for row in rows for one in row.trained]
    # The empty part is for batches in which nothing was sampled: concatenate refuses an empty list.
    log_probs = np.concatenate([np.zeros(0, np.float32), *(one.log_probs for one in trained)])
    versions = np.concatenate([np.zeros(0, np.int32), *(one.versions for one in trained)])
    sampled: dict[str, tuple[np.ndarray, DTypeLike, float]] = {
        "rollout_log_probs": (log_probs, np.float32, 0),
        "weight_versions": (versions, np.int32, 0),
    }
    ids = np.concatenate([np.zeros(0, np.int64), *parts])
    return token_columns(lengths, ids, np.repeat(counted, sizes), pad_token_id, least_width, **sampled, **of_trained)


def token_columns(
    lengths: np.ndarray,
    ids: np.ndarray,
    counted: np.ndarray,
    pad_token_id: int,
    least_width: int = 1,
    **of_counted: tuple[np.ndarray, DTypeLike, float],
) -> dict[str, torch.Tensor]:
    """The columns of every batch of token sequences, right-padded to the longest, row after row.

    Args:
        lengths: int64 (B,); a row without tokens gets one of padding, which is attended to.
        ids: (sum of lengths,), all tokens.
        counted: bool (sum of lengths,), those that the policy sampled, or that are learnt.
        least_width: L, if no row is longer.
        of_counted: further columns by name: a value for each counted token, the column's type, and its value elsewhere.

    Returns:
        ``input_ids`` int64, ``attention_mask`` and ``response_mask`` bool, and ``of_counted``, all (B, L).
    """
    positions = np.arange(max(int(lengths.max()), least_width))
    own = positions < lengths[:, None]
    mask = np.zeros(own.shape, dtype=bool)
    mask[own] = counted
    attended = positions < np.maximum(lengths, 1)[:, None]
    columns = {"input_ids": masked_column(own, ids, np.int64, pad_token_id)}
    columns |= {"attention_mask": torch.from_numpy(attended), "response_mask": torch.from_numpy(mask)}
    return columns | {name: masked_column(mask, *value) for name, value in of_counted.items()}


def masked_column(where: np.ndarray, flat: np.ndarray, dtype: DTypeLike, elsewhere: float = 0) -> torch.Tensor:
    """The entries of ``flat``, in the order of rows and columns, where bool (B, L) ``where`` holds."""
    column = np.full(where.shape, elsewhere, dtype=dtype)
    column[where] = flat
    return torch.from_numpy(column)


def reward_components(groups: Sequence[SampleGroup], names: Sequence[str]) -> torch.Tensor:
    """The numbers ``names`` that the rewards returned, ``score`` being the score: float32 (B, len(names)).

    A failed sample counts with its score in each of them (``on_error: value``), and with 0 where it has none.

    Raises:
        ValueError: a reward does not return one of the names.
    """
    rows = []
    for one in (one for group in groups for one in group.members):
        numbers = {**one.reward.metrics, "score": one.reward.score or 0.0}
        missing = [name for name in names if name not in numbers]
        if missing and one.error is None:
            raise ValueError(
                f"estimator.weights names {missing[0]!r}, which rewards.{one.prompt.domain} does not return; it "
                f"returns {', '.join(numbers)}"
            )
        rows.append([numbers.get(name, numbers["score"]) for name in names])
    return torch.tensor(rows, dtype=torch.float32)


def greedy_baseline(groups: Sequence[SampleGroup], baselines: Sequence[SampleGroup]) -> dict[str, torch.Tensor]:
    """The greedy response of each prompt as columns of its samples.

    Args:
        groups: as given to :func:`build_batch`.
        baselines: groups of one sample, for the same prompts in the same order.

    Returns:
        ``baseline_scores`` float32 (B,), NaN where the greedy response has no reward; ``baseline_lengths`` int64 (B,),
        its tokens.
    """
    sizes = [len(group.members) for group in groups]
    scores = np.concatenate([baseline.scores() for baseline in baselines])
    lengths = np.array([len(baseline.members[0].response_ids) for baseline in baselines])
    return {
        "baseline_scores": torch.from_numpy(np.repeat(scores, sizes)),
        "baseline_lengths": torch.from_numpy(np.repeat(lengths, sizes)),
    }
