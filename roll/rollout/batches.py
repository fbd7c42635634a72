"""From groups to the columns of a training batch, which ``docs/architecture.md`` lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from roll.protocol import DataProto
from roll.protocol.vision import IMAGES
from roll.rollout.groups import Sample, SampleGroup

if TYPE_CHECKING:
    from roll.agents.conversation import Call

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
