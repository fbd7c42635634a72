"""Groups of samples made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.datasets.types import PromptRow
from roll.rewards.base import RewardResult
from roll.rollout.groups import FinishedGroup, Group, SampleGroup


def make_group(
    order: int,
    prompt: list[int],
    responses: list[list[int]],
    scores: list[float | None] | None = None,
    tag: str = "tag",
    domain: str = "domain",
) -> SampleGroup:
    lengths = np.array([len(response) for response in responses])
    finished = FinishedGroup(
        request_id=str(order),
        token_ids=np.array([token for response in responses for token in response], dtype=np.int32),
        log_probs=-np.arange(1, lengths.sum() + 1, dtype=np.float32),
        lengths=lengths,
        finish_reasons=["stop"] * len(responses),
        texts=[" ".join(map(str, response)) for response in responses],
        weight_versions=[[(0, 0, len(response))] for response in responses],
        context=prompt,
    )
    row = PromptRow(f"p{order}", domain, tag, prompt, "prompt", "truth", {})
    group = Group(order, row, finished.samples(row))
    if scores is not None:
        give(group, [RewardResult(score, error=None if score is not None else "none") for score in scores])
    return group


def give(group: SampleGroup, rewards: Sequence[RewardResult]) -> None:
    """Score the samples of ``group``."""
    for sample, reward in zip(group.members, rewards, strict=True):
        sample.reward = reward
