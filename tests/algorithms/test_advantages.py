from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.advantages import (
    ADVANTAGE_NAMES,
    AdvantageInputs,
    estimate_advantages,
    register_advantage,
)
from roll.algorithms.samples import RewardOptions, RewardPostprocessor, resolve_norm_types, token_level_rewards
from roll.config.estimators import GaeOptions, traits
from roll.config.reading.fields import Choice
from roll.protocol.metrics import to_floats
from tests.algorithms import reference
from tests.algorithms.reference import Batch, batches, make_batch
from tests.support.keys import algorithm


def inputs_of(batch: Batch) -> AdvantageInputs:
    rng = torch.Generator().manual_seed(len(batch.mask))
    return AdvantageInputs(
        token_level_rewards(batch.response_rewards, batch.mask).double(),
        batch.mask,
        batch.group_ids,
        values=batch.values,
        scores=batch.response_rewards,
        baseline_rewards=batch.sample_weights,
        reward_components=torch.stack([batch.response_rewards, batch.sample_weights], 1),
        old_log_probs=batch.old_log_probs,
        old_sum_of_squares=batch.old_sum_of_squares,
        step_returns=batch.values,
        state_ids=torch.randint(0, 3, batch.mask.shape, generator=rng),
        bootstrap_values=batch.sample_weights,
    )


def rows_of(batch: Batch, per_row: list[float]) -> torch.Tensor:
    values = torch.tensor(per_row, dtype=torch.float32).view(-1, 1)
    return torch.where(batch.mask, values, 0.0)


def rewards_of(batch: Batch) -> list[float]:
    """An empty row has no token to carry its reward."""
    return [r if any(m) else 0.0 for r, m in zip(batch.response_rewards.tolist(), batch.mask.tolist(), strict=True)]


def rloo(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    others = [rewards[j] for j in group if j != i]
    return rewards[i] - (reference.mean(others) if others else 0.0)


def remax(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    return rewards[i] - float(batch.sample_weights[i])


def opo(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    lengths = batch.mask.sum(-1).tolist()
    if len(group) == 1:
        return rewards[i]
    total = sum(lengths[j] for j in group)
    return rewards[i] - (sum(lengths[j] * rewards[j] for j in group) / total if total else 0.0)


def centred(i: int, group: list[int], rewards: list[float]) -> float:
    return rewards[i] - (reference.mean([rewards[j] for j in group]) if len(group) > 1 else 0.0)


def maxrl(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    centre = reference.mean([rewards[j] for j in group])
    return (rewards[i] - centre) / centre if centre > 0 else 0.0


def gpg(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    ids = batch.group_ids.tolist()
    with_signal = sum(
        any(abs(centred(k, reference.members(ids, j), rewards)) > 1e-9 for k in reference.members(ids, j))
        for j in range(len(ids))
    )
    return centred(i, group, rewards) * len(ids) / max(with_signal, 1)


def pass_at_k(batch: Batch, i: int, group: list[int], rewards: list[float]) -> float:
    """By enumeration of all subsets of size k: the mean reward of those that hold the response, normalised."""
    k = min(2, len(group))
    subsets = list(itertools.combinations(group, k))
    scores = batch.response_rewards.tolist()
    value = {s: max(float(scores[j] >= 1.0) for j in s) for s in subsets}
    centre = reference.mean(list(value.values()))
    spread = math.sqrt(centre * (1 - centre))
    if spread < 1e-6:
        return 0.0
    return (reference.mean([value[s] for s in subsets if i in s]) - centre) / spread


@pytest.mark.parametrize("formula", [rloo, remax, opo, gpg, maxrl, pass_at_k], ids=lambda f: f.__name__)
@settings(max_examples=25)
@given(batch=batches)
def test_group_estimators_equal_the_loop(formula, batch: Batch) -> None:
    rewards, ids = rewards_of(batch), batch.group_ids.tolist()
    options = algorithm(adv_estimator=formula.__name__, pass_k=2)
    result = estimate_advantages(inputs_of(batch), options)
    expected = [formula(batch, i, reference.members(ids, i), rewards) for i in range(len(ids))]
    assert_close(result.advantages, rows_of(batch, expected), rtol=1e-5, atol=1e-5)
    assert_close(result.returns, rows_of(batch, rewards), rtol=1e-5, atol=1e-5)


def test_remax_counts_the_divergence_in_the_reward_from_each_token_on() -> None:
    batch = make_batch(3, 5, 6)
    result = estimate_advantages(replace(inputs_of(batch), rewards=batch.rewards), algorithm(adv_estimator="remax"))
    expected = torch.zeros(batch.mask.shape)
    for i, row in enumerate(batch.mask.tolist()):
        for t in (t for t, masked in enumerate(row) if masked):
            expected[i, t] = batch.rewards[i, t:].sum() - batch.sample_weights[i]
    assert_close(result.advantages, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=50)
@given(batch=batches)
def test_optimal_token_baseline_equals_the_loop(batch: Batch) -> None:
    """Position by position among the tokens of each response, holes left out."""
    ids, expected = batch.group_ids.tolist(), torch.zeros_like(batch.rewards)
    places = [[t for t, masked in enumerate(row) if masked] for row in batch.mask.tolist()]
    probability = batch.old_log_probs.exp()

    def to_go(i: int, k: int) -> float:
        return sum(float(batch.rewards[i, t]) for t in places[i][k:])

    def weight(i: int, k: int) -> float:
        terms = 1 - 2 * probability[i] + batch.old_sum_of_squares[i]
        return sum(float(terms[t]) for t in places[i][: k + 1])

    for i, row in enumerate(places):
        for k, t in enumerate(row):
            others = [j for j in reference.members(ids, i) if len(places[j]) > k]
            baseline = 0.0
            if len(others) > 1:
                total = sum(weight(j, k) for j in others)
                baseline = sum(to_go(j, k) * weight(j, k) for j in others) / (total + 1e-8)
            expected[i, t] = to_go(i, k) - baseline
    inputs = replace(inputs_of(batch), rewards=batch.rewards)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        result = estimate_advantages(inputs, algorithm(adv_estimator=name))
        assert_close(result.advantages.double(), expected, rtol=1e-5, atol=1e-6)
        returns = reference.returns(batch.rewards.tolist(), batch.mask.tolist(), 1.0)
        assert_close(result.returns.double(), returns, rtol=1e-5, atol=1e-6)


def test_optimal_token_baseline_of_certain_tokens_stays_in_the_range_of_the_rewards() -> None:
    """1 - 2 pi + sum pi^2 in float32 may be -1e-7 where it is 1e-14: weights that cancel blow a baseline up."""
    mask = torch.ones(4, 3, dtype=torch.bool)
    log_probs = torch.full((4, 3), -1e-7)
    squares = torch.tensor([1.0 - 3e-7, 1.0 - 1e-7, 1.0, 1.0 - 2e-7])[:, None].expand(4, 3)
    inputs = AdvantageInputs(
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        mask,
        torch.zeros(4).long(),
        old_log_probs=log_probs,
        old_sum_of_squares=squares,
    )
    assert (
        float(estimate_advantages(inputs, algorithm(adv_estimator="optimal_token_baseline")).advantages.abs().max())
        <= 1.0
    )


@given(batch=batches)
def test_gdpo_normalises_each_reward_apart(batch: Batch) -> None:
    ids = batch.group_ids.tolist()
    columns = [batch.response_rewards.tolist(), batch.sample_weights.tolist()]
    total = [0.0] * len(ids)
    for weight, column in zip((2.0, 0.5), columns, strict=True):
        for i in range(len(ids)):
            group = reference.members(ids, i)
            spread = reference.std([column[j] for j in group])
            total[i] += weight * centred(i, group, column) / (spread + 1e-6 if spread > 1e-6 else 1.0)
    if len(total) > 1:
        centre, spread = reference.mean(total), reference.std(total)
        total = [(x - centre) / (spread + 1e-6 if spread > 1e-6 else 1.0) for x in total]
    options = algorithm(adv_estimator="gdpo", reward_weights={"a": 2.0, "b": 0.5})
    assert_close(estimate_advantages(inputs_of(batch), options).advantages, rows_of(batch, total), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="weights has 3"):
        estimate_advantages(
            inputs_of(batch), algorithm(adv_estimator="gdpo", reward_weights={"a": 1.0, "b": 1.0, "c": 1.0})
        )


@given(batch=batches, gamma=st.sampled_from([0.5, 1.0]))
def test_agentic_reinforce_discounts_by_turn(batch: Batch, gamma: float) -> None:
    inputs = replace(inputs_of(batch), rewards=batch.rewards)
    expected = torch.zeros_like(batch.rewards)
    for i, row in enumerate(batch.mask.tolist()):
        turns: list[list[int]] = []
        for t, m in enumerate(row):
            if m and (t == 0 or not row[t - 1]):
                turns.append([])
            if m:
                turns[-1].append(t)
        running = 0.0
        for turn in reversed(turns):
            running = sum(float(batch.rewards[i, t]) for t in turn) + gamma * running
            expected[i, turn] = running
    result = estimate_advantages(inputs, algorithm(adv_estimator="agentic_reinforce", gamma=gamma))
    assert_close(result.advantages, expected, rtol=1e-9, atol=1e-9)


@given(batch=batches, gamma=st.sampled_from([0.9, 1.0]))
def test_token_estimators_equal_the_loop(batch: Batch, gamma: float) -> None:
    inputs = replace(inputs_of(batch), rewards=batch.rewards, bootstrap_values=None)
    returns = reference.returns(batch.rewards.tolist(), batch.mask.tolist(), gamma)
    for name in ("reinforce", "grpo"):
        result = estimate_advantages(inputs, algorithm(adv_estimator=name, gamma=gamma))
        assert_close(result.advantages, returns, rtol=1e-9, atol=1e-9)
    for name in ("reinforce++", "reinforce_plus_plus", "reinforce++_baseline"):
        result = estimate_advantages(inputs, algorithm(adv_estimator=name, gamma=gamma))
        assert_close(result.advantages, reference.whiten(returns, batch.mask), rtol=1e-6, atol=1e-8)
        assert_close(result.raw_advantages, returns, rtol=1e-9, atol=1e-9)
    gae = estimate_advantages(inputs, algorithm(adv_estimator="gae", gamma=gamma, lambd=0.9))
    expected = reference.gae(batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist(), gamma, 0.9)
    assert_close(gae.advantages, expected, rtol=1e-9, atol=1e-9)


@given(batch=batches)
def test_whitening_and_clipping(batch: Batch) -> None:
    inputs = replace(inputs_of(batch), rewards=batch.rewards)
    options = algorithm(
        adv_estimator="reinforce", gamma=0.9, whiten_rewards=True, whiten_advantages=True, advantage_clip=0.8
    )
    whitened = reference.whiten(batch.rewards, batch.mask)
    returns = reference.returns(whitened.tolist(), batch.mask.tolist(), 0.9)
    unclipped = reference.whiten(returns, batch.mask)
    result = estimate_advantages(inputs, options)
    assert_close(result.advantages, unclipped.clamp(-0.8, 0.8), rtol=1e-6, atol=1e-8)
    tokens = int(batch.mask.sum())
    clipped = int((unclipped.abs() > 0.8).sum())
    assert to_floats(result.metrics)["critic/advantage_clip_frac"] == pytest.approx(clipped / tokens if tokens else 0)


def test_whitening_equal_advantages_gives_zero_not_noise() -> None:
    mask = torch.ones(4, 50, dtype=torch.bool)
    inputs = AdvantageInputs(token_level_rewards(torch.full((4,), 0.1), mask), mask, torch.arange(4))
    assert bool((estimate_advantages(inputs, algorithm(adv_estimator="reinforce++")).advantages == 0).all())


def test_grpo_gives_the_papers_advantage_to_every_token() -> None:
    """(R - mean) / std of the group, arXiv 2402.03300 section 4.1.2, through the pipeline's three steps."""
    mask = torch.tensor([[False, True, True, False]] * 4)
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0])
    group_ids = torch.tensor([3, 3, 3, 8])
    postprocessor = RewardPostprocessor(RewardOptions(*resolve_norm_types(Choice("grpo"))))
    rewards, _ = postprocessor(scores, group_ids)
    inputs = AdvantageInputs(token_level_rewards(rewards, mask), mask, group_ids)
    result = estimate_advantages(inputs, algorithm(adv_estimator="grpo")).advantages
    std = (1 / 3) ** 0.5
    expected = torch.tensor([2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 1.0])
    assert_close(result, torch.where(mask, expected.unsqueeze(1), 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
@settings(max_examples=25)
@given(batch=batches, padding=st.integers(1, 5))
def test_row_order_and_padding_change_nothing(name: str, batch: Batch, padding: int) -> None:
    inputs, options = inputs_of(batch), algorithm(adv_estimator=name)
    plain = estimate_advantages(inputs, options)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(padding))
    changed = replace(
        inputs,
        **{
            key: torch.nn.functional.pad(value[order], (0, padding))
            if value.shape == batch.mask.shape
            else value[order]
            for key in AdvantageInputs.__dataclass_fields__
            if (value := getattr(inputs, key)) is not None and key not in ("reward_components", "divides")
        },
        reward_components=inputs.reward_components[order],
    )
    result = estimate_advantages(changed, options)
    for got, expected in ((result.advantages, plain.advantages), (result.returns, plain.returns)):
        assert_close(got, torch.nn.functional.pad(expected[order], (0, padding)), rtol=1e-6, atol=1e-6)
        assert bool((got[~changed.mask] == 0).all())


def test_missing_inputs_are_named() -> None:
    batch = make_batch(0, 3, 4)
    bare = AdvantageInputs(batch.rewards, batch.mask, batch.group_ids)
    for name, column in (
        ("gae", "values"),
        ("remax", "baseline_rewards"),
        ("turn_gae", "values"),
        ("gigpo", "step_returns"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{column}"):
            estimate_advantages(bare, algorithm(adv_estimator=name))
    assert traits(Choice("gae")).needs_values
    assert not traits(Choice("grpo")).needs_values


def raw_score(inputs: AdvantageInputs, options: GaeOptions) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = inputs.spread(inputs.response_rewards)
    return advantages, advantages


@pytest.mark.usefixtures("own_registrations")
def test_a_users_own_estimator_enters_by_dotted_path_and_by_decorator() -> None:
    inputs = inputs_of(make_batch(1, 4, 5))
    by_path = estimate_advantages(inputs, algorithm(adv_estimator=f"{__name__}:raw_score"))
    register_advantage("raw_score", norm=("batch", None))(raw_score)
    assert resolve_norm_types(Choice("raw_score")) == ("batch", None)
    by_name = estimate_advantages(inputs, algorithm(adv_estimator="raw_score"))
    assert torch.equal(by_path.advantages, by_name.advantages)


@pytest.mark.parametrize("name", [n for n in ADVANTAGE_NAMES if n != "gdpo"])
def test_a_batch_without_rows_stays_one(name: str) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    rewards, _ = RewardPostprocessor(RewardOptions("group", "batch"))(torch.zeros(0), empty)
    mask = torch.zeros(0, 5, dtype=torch.bool)
    inputs = AdvantageInputs(
        token_level_rewards(rewards, mask),
        mask,
        empty,
        values=torch.zeros(0, 5),
        scores=torch.zeros(0),
        baseline_rewards=torch.zeros(0),
        step_returns=torch.zeros(0, 5),
        state_ids=torch.zeros(0, 5),
        old_log_probs=torch.zeros(0, 5),
        old_sum_of_squares=torch.zeros(0, 5),
    )
    assert estimate_advantages(inputs, algorithm(adv_estimator=name)).advantages.shape == (0, 5)
