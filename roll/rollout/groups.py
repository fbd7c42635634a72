"""One prompt and everything that became of it: its samples, their log-probs, their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult, RewardSample
from roll.rollout.messages import FinishedGroup


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

    def mean_score(self) -> float:
        """The mean of the rewards that are there; NaN for a group without any."""
        scores = self.scores()
        return float(np.nanmean(scores)) if not np.isnan(scores).all() else float("nan")
