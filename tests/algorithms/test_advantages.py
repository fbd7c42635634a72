from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.advantages import (
    AdvantageInputs,
    estimate_advantages,
)
from roll.algorithms.samples import token_level_rewards
from roll.config.choices import traits
from roll.config.reading.fields import Choice
from roll.protocol.metrics import to_floats
from tests.algorithms import reference
from tests.algorithms.reference import Batch, each_batch, make_batch
from tests.support.keys import algorithm
from tests.support.names import ADVANTAGE_NAMES


def inputs_of(batch: Batch) -> AdvantageInputs:
    rng = torch.Generator().manual_seed(len(batch.mask))
    rewards = token_level_rewards(batch.response_rewards, batch.mask).double()
    columns = {name: getattr(batch, name) for name in ("values", "old_log_probs", "old_sum_of_squares")}
    columns |= {"scores": batch.response_rewards, "step_returns": batch.values}
    columns |= {"baseline_rewards": batch.sample_weights, "bootstrap_values": batch.sample_weights}
    columns["reward_components"] = torch.stack([batch.response_rewards, batch.sample_weights], 1)
    columns["state_ids"] = torch.randint(0, 3, batch.mask.shape, generator=rng)
    return AdvantageInputs(rewards, batch.mask, batch.group_ids, **columns)


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
@each_batch()
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


@each_batch()
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
    squares = torch.tensor([1.0 - 3e-7, 1.0 - 1e-7, 1.0, 1.0 - 2e-7])[:, None].expand(4, 3)
    columns = {"old_log_probs": torch.full((4, 3), -1e-7), "old_sum_of_squares": squares}
    rewards, mask = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4, 3, dtype=torch.bool)
    inputs = AdvantageInputs(rewards, mask, torch.zeros(4).long(), **columns)
    advantages = estimate_advantages(inputs, algorithm(adv_estimator="optimal_token_baseline")).advantages
    assert float(advantages.abs().max()) <= 1.0


@each_batch()
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
        estimate_advantages(inputs_of(batch), algorithm(adv_estimator="gdpo", reward_weights=dict.fromkeys("abc", 1.0)))


@each_batch(gamma=st.sampled_from([0.5, 1.0]))
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


@each_batch(gamma=st.sampled_from([0.9, 1.0]))
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


@each_batch()
def test_whitening_and_clipping(batch: Batch) -> None:
    inputs = replace(inputs_of(batch), rewards=batch.rewards)
    whitening = {"whiten_rewards": True, "whiten_advantages": True}
    options = algorithm(adv_estimator="reinforce", gamma=0.9, advantage_clip=0.8, **whitening)
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


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
@each_batch(padding=st.integers(1, 5))
def test_row_order_and_padding_change_nothing(name: str, batch: Batch, padding: int) -> None:
    inputs, options = inputs_of(batch), algorithm(adv_estimator=name)
    plain = estimate_advantages(inputs, options)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(padding))
    given = {key: getattr(inputs, key) for key in AdvantageInputs.__dataclass_fields__}
    columns = {key: value[order] for key, value in given.items() if isinstance(value, torch.Tensor)}
    for key in columns.keys() - {"reward_components"}:
        if columns[key].shape == batch.mask.shape:
            columns[key] = torch.nn.functional.pad(columns[key], (0, padding))
    changed = replace(inputs, **columns)
    result = estimate_advantages(changed, options)
    for got, expected in ((result.advantages, plain.advantages), (result.returns, plain.returns)):
        assert_close(got, torch.nn.functional.pad(expected[order], (0, padding)), rtol=1e-6, atol=1e-6)
        assert bool((got[~changed.mask] == 0).all())


@pytest.mark.parametrize(
    ("name", "column"),
    [("gae", "values"), ("remax", "baseline_rewards"), ("turn_gae", "values"), ("gigpo", "step_returns")],
)
def test_missing_inputs_are_named(name: str, column: str) -> None:
    batch = make_batch(0, 3, 4)
    with pytest.raises(ValueError, match=f"{name}.*{column}"):
        estimate_advantages(AdvantageInputs(batch.rewards, batch.mask, batch.group_ids), algorithm(adv_estimator=name))
    assert traits(Choice(name)).needs_values == (column == "values")


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_a_batch_without_rows_stays_one(name: str) -> None:
    outputs = estimate_advantages(inputs_of(make_batch(0, 0, 5)), algorithm(adv_estimator=name))
    assert outputs.advantages.shape == (0, 5)
