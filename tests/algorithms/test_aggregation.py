from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.aggregation import (
    Groups,
    LossDenominators,
    denominators_from,
    denominators_of,
    group_tokens_of,
    row_weights,
    weighted_sum,
)
from roll.config.algorithm import LOSS_AGG_MODES
from tests.algorithms import reference
from tests.algorithms.reference import Batch, each_batch

modes = st.sampled_from(LOSS_AGG_MODES)


def whole(mask: torch.Tensor, norm_length: float = 10.0, group_ids: torch.Tensor | None = None) -> LossDenominators:
    ids = torch.arange(len(mask)) if group_ids is None else group_ids
    number = int(ids.max()) + 1 if len(ids) else 0
    denominators = denominators_from(denominators_of(mask), norm_length)
    return replace(denominators, group_tokens=group_tokens_of(mask, ids, number))


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    denominators: LossDenominators,
    sample_weights: torch.Tensor | None = None,
    group_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    return weighted_sum(loss, mask, row_weights(mask, mode, denominators, group_ids), sample_weights)


def dense(batch: Batch) -> torch.Tensor:
    return Groups.of(batch.group_ids).index


@each_batch(mode=modes)
def test_every_mode_equals_the_loop(batch: Batch, mode: str) -> None:
    ids = dense(batch)
    denominators = whole(batch.mask, group_ids=ids)
    result = aggregate(batch.advantages, batch.mask, mode, denominators, batch.sample_weights, group_ids=ids)
    expected = reference.aggregate(
        batch.advantages, batch.mask, mode, 10.0, batch.sample_weights, batch.group_ids.tolist()
    )
    assert_close(float(result), expected, rtol=1e-12, atol=1e-12)


@each_batch(mode=modes, cut=st.integers(0, 7), padding=st.integers(0, 5))
def test_shares_of_any_split_add_up(batch: Batch, mode: str, cut: int, padding: int) -> None:
    """Micro-batches of any size, on any rank, padded to any width."""
    ids = dense(batch)
    denominators = whole(batch.mask, group_ids=ids)
    total = aggregate(batch.advantages, batch.mask, mode, denominators, group_ids=ids)
    pad = torch.nn.functional.pad
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        values, mask = pad(batch.advantages[rows], (0, padding)), pad(batch.mask[rows], (0, padding))
        parts.append(aggregate(values, mask, mode, denominators, group_ids=ids[rows]))
    assert_close(sum(parts), total, rtol=1e-12, atol=1e-12)
    counted = denominators_of(batch.mask[:cut]) + denominators_of(batch.mask[cut:])
    assert denominators_from(counted) == denominators_from(denominators_of(batch.mask)), "over ranks"


def test_fault_4_the_norm_length_is_a_constant_and_samples_divide() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = torch.ones(2, 3)
    wide = torch.nn.functional.pad(loss, (0, 100)), torch.nn.functional.pad(mask, (0, 100))
    expected = torch.tensor((2 + 1) / (2 * 8.0))
    for values, where in ((loss, mask), wide):
        assert_close(aggregate(values, where, "seq-mean-token-sum-norm", whole(mask, 8.0)), expected)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("token_mean", r"token_mean.*token-mean"),
        ("seq-mean-token-sum-norm", "norm_length"),
        ("prompt-mean", r"prompt-mean.*group_ids"),
    ],
)
def test_unknown_mode_and_missing_length_are_named(mode: str, words: str) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=words):
        aggregate(torch.ones(1, 1), mask, mode, LossDenominators(1.0, 1.0))


def test_skyrls_older_mean_is_one_of_each_micro_batch() -> None:
    """Means over the tokens of two micro-batches of two rows, one of which the loss leaves out."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    loss = torch.arange(12.0).view(4, 3)
    parts = denominators_of(mask[:2]) + denominators_of(mask[2:])
    denominators = denominators_from(parts)
    assert (denominators.samples, denominators.rows) == (3.0, 4.0)
    shares = [aggregate(loss[rows], mask[rows], f"{SKYRL}.token_mean_legacy", denominators) for rows in HALVES]
    assert sum(shares) == (loss[:2][mask[:2]].mean() + loss[2:][mask[2:]].mean()) / 2
    shares = [aggregate(loss[rows], mask[rows], f"{SKYRL}.sequence_mean", denominators) for rows in HALVES]
    assert sum(shares) == (loss[0].mean() + loss[1, 0] + loss[2, :2].mean()) / 4


SKYRL = "roll.algorithms.skyrl_losses"
HALVES = (slice(0, 2), slice(2, 4))
