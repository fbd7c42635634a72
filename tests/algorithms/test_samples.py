"""Rewards from scores; masks and weights of samples."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.samples import (
    NORM_TYPES,
    RewardOptions,
    RewardPostprocessor,
    RunningMoments,
    overlong_penalty,
    resolve_norm_types,
    sample_mask,
    sample_weights,
    token_level_rewards,
    top_entropy_mask,
)
from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import Choice
from roll.protocol.metrics import to_floats
from tests.algorithms import reference
from tests.algorithms.reference import Batch, batches, each_batch, mean, members

PAIRS = list(itertools.product(NORM_TYPES, NORM_TYPES))


def set_of(kind: str | None, rewards: list[float], group_ids: list[int], row: int, seen: list[float]) -> list[float]:
    """The rewards that a norm type means, for one row."""
    if kind == "group":
        return [rewards[i] for i in reference.members(group_ids, row)]
    return {"batch": rewards, "running": seen, None: []}[kind]


def normalised_by_loop(
    options: RewardOptions, rewards: list[float], group_ids: list[int], seen: list[float]
) -> list[float]:
    result = []
    for row, reward in enumerate(rewards):
        for_mean = set_of(options.norm_mean_type, rewards, group_ids, row, seen)
        for_std = set_of(options.norm_std_type, rewards, group_ids, row, seen)
        alone = options.norm_mean_type == "group" and len(for_mean) == 1
        centre = reference.mean(for_mean) if for_mean and not alone else 0.0
        spread = reference.std(for_std) if for_std else 0.0
        value = (reward - centre) / (spread + 1e-6 if spread > 1e-6 else 1.0)
        if options.reward_clip is not None:
            value = min(max(value, -options.reward_clip), options.reward_clip)
        result.append(value)
    return result


@pytest.mark.parametrize(("mean_type", "std_type"), PAIRS)
@each_batch(second=batches, clip=st.sampled_from([None, 0.7]))
def test_every_pair_equals_the_loop_over_two_steps(
    mean_type: str | None, std_type: str | None, batch: Batch, second: Batch, clip: float | None
) -> None:
    """Groups of one and rewards without spread among them, where a published version fails."""
    options = RewardOptions(mean_type, std_type, clip)
    postprocessor = RewardPostprocessor(options)
    seen: list[float] = []
    for step in (batch, second):
        rewards, group_ids = step.response_rewards.tolist(), step.group_ids.tolist()
        seen += rewards
        result, _ = postprocessor(step.response_rewards, step.group_ids, "math")
        assert result.dtype == torch.float32
        expected = normalised_by_loop(options, rewards, group_ids, seen)
        assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_running_moments_survive_a_resume_and_are_kept_by_domain() -> None:
    options = RewardOptions("running", "running")
    steps = [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([5.0]), torch.tensor([2.0, -1.0])]
    uninterrupted, first = RewardPostprocessor(options), RewardPostprocessor(options)
    for rewards in steps[:2]:
        uninterrupted(rewards, torch.zeros(len(rewards), dtype=torch.int64), "math")
        first(rewards, torch.zeros(len(rewards), dtype=torch.int64), "math")
    resumed = RewardPostprocessor(options)
    resumed.load_state_dict(first.state_dict())
    group_ids = torch.zeros(2, dtype=torch.int64)
    expected, _ = uninterrupted(steps[2], group_ids, "math")
    result, _ = resumed(steps[2], group_ids, "math")
    assert torch.equal(result, expected)
    other, _ = resumed(steps[2], group_ids, "code")
    assert not torch.equal(other, expected)


@given(parts=st.lists(st.lists(st.floats(-100, 100), max_size=6), min_size=1, max_size=5))
def test_running_moments_equal_those_of_everything_seen(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.update(torch.tensor(part, dtype=torch.float64))
    everything = [value for part in parts for value in part]
    if everything:
        assert moments.mean == pytest.approx(reference.mean(everything), abs=1e-9)
        assert moments.std == pytest.approx(reference.std(everything), abs=1e-6)


def test_reward_clip_is_counted_and_scores_above_2048_stay_integers() -> None:
    postprocessor = RewardPostprocessor(RewardOptions(reward_clip=1.0))
    rewards, metrics = postprocessor(torch.tensor([0.5, 3.0, -2.0, 1.0]), torch.zeros(4, dtype=torch.int64))
    assert rewards.tolist() == [0.5, 1.0, -1.0, 1.0]
    assert to_floats(metrics) == {"critic/reward_clip_frac": 0.5}
    rewards, _ = RewardPostprocessor(RewardOptions())(torch.tensor([2049.0, 4099.0]), torch.tensor([0, 1]))
    assert rewards.tolist() == [2049.0, 4099.0]


def test_fault_1_an_explicit_choice_is_never_overridden() -> None:
    assert resolve_norm_types(Choice("grpo")) == ("group", "group")
    assert resolve_norm_types(Choice("grpo"), "group", None) == ("group", None)  # Dr. GRPO
    assert resolve_norm_types(Choice("grpo"), None, None) == (None, None)  # raw rewards, as RAFT++ wants them
    assert resolve_norm_types(Choice("reinforce"), "batch", "batch") == ("batch", "batch")
    assert resolve_norm_types(Choice("reinforce")) == (None, None)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"norm_std_type 'groups'.*group"):
        RewardOptions("group", "groups")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reward_clip"):
        RewardOptions(reward_clip=-1.0)
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), 10, 20)
    with pytest.raises(ValueError, match=r"0\.2"):
        top_entropy_mask(torch.zeros(1, 1), torch.ones(1, 1).bool(), 0.0)


@each_batch(coef=st.sampled_from([0.0, 0.3]))
def test_token_level_rewards_equal_the_loop(batch: Batch, coef: float) -> None:
    result = token_level_rewards(batch.response_rewards, batch.mask, batch.entropy, coef)
    expected = torch.zeros_like(batch.entropy)
    for i, row in enumerate(batch.mask.tolist()):
        kept = [t for t, m in enumerate(row) if m]
        for t in kept:
            expected[i, t] = -coef * batch.entropy[i, t] + (batch.response_rewards[i] if t == kept[-1] else 0.0)
    assert_close(result, expected.float())


def test_overlong_penalty_is_that_of_the_paper() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 150])
    assert_close(overlong_penalty(lengths, 100, 20), torch.tensor([0.0, 0.0, -0.5, -1.0, -1.0]))
    assert_close(overlong_penalty(lengths, 100, 20, 0.5)[3], torch.tensor(-0.5))


@each_batch(long=st.booleans(), difficulty=st.booleans(), error=st.booleans())
def test_sample_masks_equal_the_loop(batch: Batch, long: bool, difficulty: bool, error: bool) -> None:
    scores, ids = batch.response_rewards.tolist(), batch.group_ids.tolist()
    lengths = batch.mask.sum(-1)
    truncated = lengths == batch.mask.shape[1]
    thresholds = {"difficulty_low_threshold": 0.2, "difficulty_high_threshold": 0.9, "error_max_len_threshold": 3}
    options = PPOConfig(max_len_mask=long, difficulty_mask=difficulty, error_max_len_clip=error, **thresholds)
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


@pytest.mark.parametrize(
    ("scores", "thresholds"),
    [
        ([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], {}),  # only mixed groups stay
        ([0.1, 0.1, 0.9, 0.9, 0.5, 0.5], {"difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.9}),
    ],
)
def test_groups_at_a_threshold_of_difficulty_are_masked(scores: list[float], thresholds: dict[str, float]) -> None:
    options, ids = PPOConfig(difficulty_mask=True, **thresholds), torch.tensor([1, 1, 2, 2, 3, 3])
    keep, _ = sample_mask(options, torch.tensor(scores), torch.ones(6).long(), torch.zeros(6).bool(), ids)
    assert keep.tolist() == [False] * 4 + [True] * 2


def test_weights() -> None:
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    lengths = torch.tensor([0, 5, 10, 10, 5, 0])
    group_ids = torch.tensor([4, 4, 2, 2, 3, 3])
    assert sample_weights(PPOConfig(), scores, lengths, group_ids) is None
    difficulty = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.25, 1.25])
    length = torch.tensor([1.5, 1.0, 0.5, 0.5, 1.0, 1.5])
    for options, expected in (
        (PPOConfig(difficulty_loss_weight=True), difficulty),
        (PPOConfig(length_loss_weight=True), length),
        (PPOConfig(difficulty_loss_weight=True, length_loss_weight=True), difficulty * length),
    ):
        weights = sample_weights(options, scores, lengths, group_ids)
        assert weights is not None
        assert_close(weights, expected)
    equal = sample_weights(PPOConfig(length_loss_weight=True), scores, torch.full((6,), 7), group_ids)
    assert equal is not None
    assert bool(equal.isfinite().all())


@each_batch(fraction=st.sampled_from([0.2, 0.5, 1.0]))
def test_top_entropy_mask_keeps_the_highest(batch: Batch, fraction: float) -> None:
    kept = top_entropy_mask(batch.entropy, batch.mask, fraction)
    tokens = int(batch.mask.sum())
    assert bool((kept <= batch.mask).all())
    assert int(kept.sum()) == (max(round(fraction * tokens), 1) if tokens else 0)
    dropped = batch.mask & ~kept
    if bool(dropped.any()):
        assert float(batch.entropy[dropped].max()) <= float(batch.entropy[kept].min())


@pytest.mark.parametrize("std_type", ["group", "batch", "running"])
@pytest.mark.parametrize("level", [0.3, 1000.1, -1e6])
def test_rounding_of_equal_rewards_is_no_spread(std_type: Literal["group", "batch", "running"], level: float) -> None:
    """Rewards that are equal but for the last bit of float32 would else differ by a whole standard deviation."""
    one = torch.tensor(level)
    rewards = torch.stack([one, one, torch.nextafter(one, one + 1), torch.nextafter(one, one - 1)])
    normalised, _ = RewardPostprocessor(RewardOptions("group", std_type))(rewards, torch.zeros(4, dtype=torch.long))
    assert float(normalised.abs().max()) <= float((rewards - one).abs().max()) * 1.01
