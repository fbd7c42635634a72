"""From groups of samples to the columns of a training batch (see ``docs/architecture.md`` for the columns)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import DTypeLike

from roll.protocol import DataProto
from roll.protocol.vision import IMAGES
from roll.rollout.groups import SampleGroup


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
    prompt_lengths = np.repeat([len(group.prompt.token_ids) for group in groups], sizes)
    response_lengths = np.concatenate([group.finished.lengths for group in groups])
    total_lengths = prompt_lengths + response_lengths

    positions = np.arange(int(total_lengths.max()))
    attention_mask = positions < total_lengths[:, None]
    behind_prompt = attention_mask & (positions >= prompt_lengths[:, None])
    response_mask = behind_prompt.copy()
    response_mask[behind_prompt] = np.concatenate([group.finished.sampled for group in groups])
    input_ids = np.full(attention_mask.shape, pad_token_id, dtype=np.int64)
    input_ids[attention_mask & ~behind_prompt] = np.concatenate(
        [np.tile(np.asarray(group.prompt.token_ids, dtype=np.int64), group.num_samples) for group in groups]
    )
    input_ids[behind_prompt] = np.concatenate([group.finished.token_ids for group in groups])
    log_probs = np.concatenate([group.finished.log_probs for group in groups])

    tensors = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "response_mask": torch.from_numpy(response_mask),
        "rollout_log_probs": placed(behind_prompt, log_probs, np.float32),
        "weight_versions": placed(response_mask, _versions_of_tokens(groups), np.int32),
        "scores": torch.from_numpy(np.concatenate([group.scores() for group in groups])),
        "group_ids": torch.from_numpy(np.repeat(np.arange(len(groups)), sizes)),
    }
    if any(group.finished.routes for group in groups):
        tensors["routed_experts"] = torch.from_numpy(_routes(groups, attention_mask.shape))
    return DataProto.from_dict(tensors, non_tensors=_object_columns(groups, sizes))


def _routes(groups: Sequence[SampleGroup], shape: tuple[int, ...]) -> np.ndarray:
    """(B, L, layers, k): experts that each token went to; the mark of a missing record where nobody knows."""
    first = next(group.finished.routes[0] for group in groups if group.finished.routes)
    column = np.full((*shape, *first.shape[1:]), 255 if first.dtype == np.uint8 else -1, first.dtype)
    row = 0
    for group in groups:
        if len(group.finished.routes) == group.num_samples:
            for sample, routes in enumerate(group.finished.routes):
                column[row + sample, : len(routes)] = routes
        row += group.num_samples
    return column


def placed(where: np.ndarray, flat: np.ndarray, dtype: DTypeLike, elsewhere: float = 0) -> torch.Tensor:
    """The entries of ``flat``, in the order of rows and columns, where bool (B, L) ``where`` holds."""
    column = np.full(where.shape, elsewhere, dtype=dtype)
    column[where] = flat
    return torch.from_numpy(column)


def object_column(values: Sequence[object]) -> np.ndarray:
    """object (len(values),), whatever the values are."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _versions_of_tokens(groups: Sequence[SampleGroup]) -> np.ndarray:
    """int32 (sampled tokens,): the version of the weights that each was sampled with, sample after sample."""
    spans = [span for group in groups for spans in group.finished.weight_versions for span in spans]
    version, start, end = np.array(spans, dtype=np.int32).reshape(-1, 3).T
    return np.repeat(version, end - start)


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
                    f"reward_weights names {missing[0]!r}, which rewards.{group.prompt.domain} does not return; it "
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


def _object_columns(groups: Sequence[SampleGroup], sizes: np.ndarray) -> dict[str, np.ndarray]:
    def per_group(values: list[object]) -> np.ndarray:
        return np.repeat(object_column(values), sizes)

    sample_ids = [f"{group.order}-{index}" for group in groups for index in range(group.num_samples)]
    reasons = list(chain.from_iterable(group.finished.finish_reasons for group in groups))
    images = [group.prompt.vision for group in groups]
    seen = {} if all(one is None for one in images) else {IMAGES: per_group(list(images))}
    return seen | {
        "prompt_id": per_group([group.prompt.prompt_id for group in groups]),
        "domain": per_group([group.prompt.domain for group in groups]),
        "tag": per_group([group.prompt.tag for group in groups]),
        "sample_id": np.array(sample_ids, dtype=object),
        "finish_reason": np.array(reasons, dtype=object),
    }
