"""Groups of samples, and the messages between the driver and the generation workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    of the flat arrays: the tokens behind the prompt."""

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
    """By sample: (version, first, behind last) of its tokens; together they cover those that were sampled."""
    top_log_probs: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    """By sample and position the likeliest tokens, where they were asked for."""
    error: str | None = None
    """Why the engine refused the request; such a group has no samples."""
    given: np.ndarray | None = None
    """bool (sum of lengths,): tokens that a rollout loop put between those that were sampled; their log-probs are 0,
    and no version is theirs. None: all tokens were sampled."""

    routes: list[np.ndarray] = field(default_factory=list)
    """By sample, as :attr:`GenerationOutput.routes`; empty where nobody has recorded them."""

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
    def refused(request_id: str, error: str) -> FinishedGroup:
        """A group without samples."""
        none = np.zeros(0, dtype=np.int64)
        return FinishedGroup(request_id, none.astype(np.int32), none.astype(np.float32), none, [], [], [], error=error)

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """The per-sample views of one of the flat arrays."""
        if not len(self.lengths):
            return []
        return np.split(flat, np.cumsum(self.lengths)[:-1])


@dataclass(slots=True)
class EngineReport:
    """What an engine says at the end of its turn."""

    groups: list[FinishedGroup] = field(default_factory=list)
    recalled: list[GenerationRequest] = field(default_factory=list)
    """With everything that their samples have so far."""
    progress: dict[str, list[GenerationOutput]] = field(default_factory=dict)
    """By request that is watched and not finished: its samples so far, in any order."""
    num_unfinished: int = 0
    """Samples still queued or running."""
    busy_seconds: float = 0.0
    """Time spent generating during the turn."""
    prompt_counts: tuple[int, int] = (0, 0)
    """Prompt tokens since the last report, and those of them that the engine's prefix cache had."""


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt that engines are at work on."""

    order: int
    """Position in the order in which prompts were drawn."""
    prompt: PromptRow


@dataclass(slots=True)
class SampleGroup:
    """The samples of one prompt. ``rewards`` is empty until they have been scored."""

    order: int
    """Position in the order in which prompts were drawn; results are sorted by it, whoever finished first."""
    prompt: PromptRow
    finished: FinishedGroup
    rewards: list[RewardResult] = field(default_factory=list)
    model_results: list[RewardResult] | None = None
    """What the role ``reward_model`` says of each sample, where it is asked; known before the rewards."""

    @property
    def num_samples(self) -> int:
        return len(self.finished.lengths)

    def reward_samples(self) -> list[RewardSample]:
        """What the reward workers see of this group."""
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

    @property
    def error(self) -> str | None:
        """Why a sample has no reward of its own, if one has none."""
        return next((result.error for result in self.rewards if result.error is not None), None)

    def mean_score(self) -> float:
        """The mean of the rewards that are there; NaN for a group without any."""
        scores = self.scores()
        return float(np.nanmean(scores)) if not np.isnan(scores).all() else float("nan")
