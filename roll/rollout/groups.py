"""Groups of samples, messages between driver and generation workers, and the columns of a training batch.

The columns are listed in ``docs/architecture.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from roll.datasets.types import PromptRow
from roll.protocol import DataProto
from roll.protocol.vision import IMAGES
from roll.rewards.base import RewardResult, RewardSample
from roll.strategies.engines.requests import FinishReason, GenerationOutput, GenerationRequest


class Group(Protocol):
    """Samples that share a baseline: those of a prompt (:class:`SampleGroup`), or episodes of a task."""

    @property
    def order(self) -> int:
        """Position in the order in which groups were drawn."""

    @property
    def num_samples(self) -> int:
        """Samples, or episodes in which something was sampled."""

    @property
    def error(self) -> str | None:
        """Why a sample of it could not be scored, if one could not."""

    def mean_score(self) -> float:
        """The mean of the scores that are there; NaN for a group without any."""

    def versions(self) -> list[list[tuple[int, int]]]:
        """Versions of the weights that sampled each sample, or episode, each with its number of tokens."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but its number, as plain values and arrays."""


GroupT = TypeVar("GroupT", bound=Group)


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
    given: np.ndarray | None = None
    """bool (sum of lengths,): tokens that a rollout loop put between those that were sampled; their log-probs are 0,
    and no version is theirs. None: all tokens were sampled."""

    routes: list[np.ndarray] = field(default_factory=list)
    """By sample, as :attr:`GenerationOutput.routes`; empty where the engine records none."""

    @property
    def sampled(self) -> np.ndarray:
        """bool (sum of lengths,): tokens that the policy sampled."""
        return np.ones(len(self.token_ids), dtype=bool) if self.given is None else ~self.given

    @property
    def sampled_lengths(self) -> np.ndarray:
        """int64 (num_samples,): sampled tokens of each sample."""
        if self.given is None:
            return self.lengths
        return np.array([int(part.sum()) for part in self.split(self.sampled)], dtype=np.int64)

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
            routes=[s.routes for s in samples if s.routes is not None],
        )

    @staticmethod
    def empty(request_id: str, error: str | None = None) -> FinishedGroup:
        """A group without samples."""
        none = np.zeros(0, dtype=np.int64)
        return FinishedGroup(request_id, none.astype(np.int32), none.astype(np.float32), none, [], [], [], error=error)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays; ``FinishedGroup(**state)`` undoes it."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """The per-sample views of one of the flat arrays."""
        # np.split of nothing gives one empty part.
        if not len(self.lengths):
            return []
        return np.split(flat, np.cumsum(self.lengths)[:-1])


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


@dataclass(slots=True)
class SampleGroup:
    """The samples of one prompt. ``rewards`` is empty until they have been scored."""

    order: int
    """Position in the order in which prompts were drawn; results are sorted by it, whoever finished first."""
    prompt: PromptRow
    finished: FinishedGroup
    rewards: list[RewardResult] = field(default_factory=list)
    model_results: list[RewardResult] | None = None
    """Score of each sample by the role ``reward_model``, where the domain uses it; known before the rewards."""

    @property
    def num_samples(self) -> int:
        return len(self.finished.lengths)

    def reward_samples(self) -> list[RewardSample]:
        """The part of this group that reward workers see."""
        model_results: Sequence[RewardResult | None] = self.model_results or [None] * self.num_samples
        return [
            RewardSample(
                prompt=self.prompt.prompt_text,
                response=text,
                ground_truth=self.prompt.ground_truth,
                finish_reason=reason,
                row=self.prompt.row,
                num_tokens=int(length),
                model_result=model_result,
            )
            for text, reason, length, model_result in zip(
                self.finished.texts,
                self.finished.finish_reasons,
                self.finished.sampled_lengths,
                model_results,
                strict=True,
            )
        ]

    def scores(self) -> np.ndarray:
        """float32 (num_samples,); NaN where a sample has no reward."""
        return np.array([np.nan if r.score is None else r.score for r in self.rewards], dtype=np.float32)

    def versions(self) -> list[list[tuple[int, int]]]:
        return [[(version, end - first) for version, first, end in spans] for spans in self.finished.weight_versions]

    def state_dict(self) -> dict[str, Any]:
        rewards = [asdict(result) for result in self.rewards]
        return self.prompt.state_dict() | {"finished": self.finished.state_dict(), "rewards": rewards}

    @classmethod
    def from_state(cls, order: int, prompt: PromptRow, state: Mapping[str, Any]) -> SampleGroup:
        """The inverse of :meth:`state_dict`."""
        rewards = [RewardResult(**result) for result in state["rewards"]]
        return cls(order, prompt, FinishedGroup(**state["finished"]), rewards)

    @property
    def error(self) -> str | None:
        """Why a sample has no reward of its own, if one has none."""
        return next((result.error for result in self.rewards if result.error is not None), None)

    def mean_score(self) -> float:
        """The mean of the rewards that are there; NaN for a group without any."""
        scores = self.scores()
        # nanmean of nothing but NaN would warn.
        return float(np.nanmean(scores)) if not np.isnan(scores).all() else float("nan")


def build_batch(groups: Sequence[SampleGroup], pad_token_id: int) -> DataProto:
    """One row a sample, the samples of a group adjacent, right-padded to the longest sample of the batch.

    Returns:
        DataProto with tensors ``input_ids`` int64, ``attention_mask`` and ``response_mask`` (what the policy sampled)
        bool, ``rollout_log_probs`` float32, ``weight_versions`` int32, all (B, L); ``scores`` float32 (B,), NaN where a
        sample has no reward; ``group_ids`` int64 (B,); ``routed_experts`` (B, L, layers, k) where the engine records
        them; object columns ``prompt_id``, ``sample_id``, ``domain``, ``tag``, ``finish_reason``, and ``images`` where
        a prompt has some (:data:`roll.protocol.vision.IMAGES`).
    """
    sizes = np.array([group.num_samples for group in groups])
    prompts = [np.asarray(group.prompt.token_ids, dtype=np.int64) for group in groups]
    responses = [group.finished.split(group.finished.token_ids) for group in groups]
    ids = [part for prompt, own in zip(prompts, responses, strict=True) for one in own for part in (prompt, one)]
    lengths = np.repeat([len(prompt) for prompt in prompts], sizes)
    sampled = [one for group in groups for one in group.finished.split(group.finished.sampled)]
    trained = [part for length, own in zip(lengths, sampled, strict=True) for part in (np.zeros(length, bool), own)]
    spans = [span for group in groups for spans in group.finished.weight_versions for span in spans]
    # The shape is given for batches in which nothing was sampled.
    version, start, end = np.array(spans, dtype=np.int32).reshape(-1, 3).T
    log_probs = np.concatenate([group.finished.log_probs[group.finished.sampled] for group in groups])
    tensors = token_columns(
        lengths + np.concatenate([group.finished.lengths for group in groups]),
        np.concatenate(ids),
        np.concatenate(trained),
        pad_token_id,
        rollout_log_probs=(log_probs, np.float32, 0),
        weight_versions=(np.repeat(version, end - start), np.int32, 0),
    )
    tensors["scores"] = torch.from_numpy(np.concatenate([group.scores() for group in groups]))
    tensors["group_ids"] = torch.from_numpy(np.repeat(np.arange(len(groups)), sizes))
    if any(group.finished.routes for group in groups):
        tensors["routed_experts"] = torch.from_numpy(_routes(groups, tuple(tensors["input_ids"].shape)))
    prompt_of = [group.prompt for group in groups for _ in range(group.num_samples)]
    objects: dict[str, Sequence[object]] = {
        name: [getattr(prompt, name) for prompt in prompt_of] for name in ("prompt_id", "domain", "tag")
    }
    objects["sample_id"] = [f"{group.order}-{index}" for group in groups for index in range(group.num_samples)]
    objects["finish_reason"] = [reason for group in groups for reason in group.finished.finish_reasons]
    if any(images := [prompt.vision for prompt in prompt_of]):
        objects[IMAGES] = images
    return DataProto.from_dict(tensors, non_tensors=objects)


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


def _routes(groups: Sequence[SampleGroup], shape: tuple[int, ...]) -> np.ndarray:
    """(B, L, layers, k): experts that each token went to; the mark of a missing record where the engine gave none."""
    first = next(group.finished.routes[0] for group in groups if group.finished.routes)
    # uint8 has no -1, and is used for up to 255 experts, whose numbers end at 254.
    column = np.full((*shape, *first.shape[1:]), 255 if first.dtype == np.uint8 else -1, first.dtype)
    row = 0
    for group in groups:
        if len(group.finished.routes) == group.num_samples:
            for sample, routes in enumerate(group.finished.routes):
                column[row + sample, : len(routes)] = routes
        row += group.num_samples
    return column


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
    for group in groups:
        for result in group.rewards:
            numbers = {**result.metrics, "score": result.score or 0.0}
            missing = [name for name in names if name not in numbers]
            if missing and result.error is None:
                raise ValueError(
                    f"estimator.weights names {missing[0]!r}, which rewards.{group.prompt.domain} does not return; it "
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
    sizes = [group.num_samples for group in groups]
    scores = np.array([baseline.scores()[0] for baseline in baselines])
    lengths = np.array([baseline.finished.sampled_lengths[0] for baseline in baselines])
    return {
        "baseline_scores": torch.from_numpy(np.repeat(scores, sizes)),
        "baseline_lengths": torch.from_numpy(np.repeat(lengths, sizes)),
    }
