from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.samples import (
    SampleMaskOptions,
    SampleWeightOptions,
    sample_mask,
    sample_weights,
    top_entropy_mask,
)
from roll.protocol.metrics import to_floats
from tests.algorithms.reference import Batch, batches, mean, members


@given(batch=batches, long=st.booleans(), difficulty=st.booleans(), error=st.booleans())
def test_sample_masks_equal_the_loop(batch: Batch, long: bool, difficulty: bool, error: bool) -> None:
    scores, ids = batch.response_rewards.tolist(), batch.group_ids.tolist()
    lengths = batch.mask.sum(-1)
    truncated = lengths == batch.mask.shape[1]
    options = SampleMaskOptions(long, difficulty, 0.2, 0.9, error, error_max_len_threshold=3)
    expected = []
    for i, score in enumerate(scores):
        group_mean = mean([scores[j] for j in members(ids, i)])
        keep = not (long and truncated[i])
        keep = keep and not (difficulty and not 0.2 < group_mean < 0.9)
        expected.append(bool(keep and not (error and score < 1 and lengths[i] > 3)))
    keep, metrics = sample_mask(options, batch.response_rewards, lengths, truncated, batch.group_ids)
    assert keep.tolist() == expected
    values = to_floats(metrics)
    assert values["actor/final_mask_ratio"] == pytest.approx(sum(expected) / len(expected))
    assert values["actor/samples_used"] == sum(expected)
    assert values["mask/final_mask_sum_eq_0"] == float(not any(expected))


def test_with_the_default_thresholds_only_mixed_groups_stay() -> None:
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    group_ids = torch.tensor([1, 1, 2, 2, 3, 3])
    keep, _ = sample_mask(
        SampleMaskOptions(difficulty_mask=True), scores, torch.ones(6).long(), torch.zeros(6).bool(), group_ids
    )
    assert keep.tolist() == [False] * 4 + [True] * 2


def test_weights() -> None:
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    lengths = torch.tensor([0, 5, 10, 10, 5, 0])
    group_ids = torch.tensor([4, 4, 2, 2, 3, 3])
    assert sample_weights(SampleWeightOptions(), scores, lengths, group_ids) is None
    difficulty = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.25, 1.25])
    length = torch.tensor([1.5, 1.0, 0.5, 0.5, 1.0, 1.5])
    for options, expected in (
        (SampleWeightOptions(difficulty_loss_weight=True), difficulty),
        (SampleWeightOptions(length_loss_weight=True), length),
        (SampleWeightOptions(True, True), difficulty * length),
    ):
        weights = sample_weights(options, scores, lengths, group_ids)
        assert weights is not None
        assert_close(weights, expected)
    equal = sample_weights(SampleWeightOptions(length_loss_weight=True), scores, torch.full((6,), 7), group_ids)
    assert equal is not None
    assert bool(equal.isfinite().all())


@given(batch=batches, fraction=st.sampled_from([0.2, 0.5, 1.0]))
def test_top_entropy_mask_keeps_the_highest(batch: Batch, fraction: float) -> None:
    kept = top_entropy_mask(batch.entropy, batch.mask, fraction)
    tokens = int(batch.mask.sum())
    assert bool((kept <= batch.mask).all())
    assert int(kept.sum()) == (max(round(fraction * tokens), 1) if tokens else 0)
    dropped = batch.mask & ~kept
    if bool(dropped.any()):
        assert float(batch.entropy[dropped].max()) <= float(batch.entropy[kept].min())


def test_a_fraction_outside_its_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"0\.2"):
        top_entropy_mask(torch.zeros(1, 1), torch.ones(1, 1).bool(), 0.0)
