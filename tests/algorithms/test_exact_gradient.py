"""Estimators against the exact gradient of an enumerable policy (see tabular.py): sums, not samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from roll.algorithms.advantages import AdvantageInputs, estimate_advantages
from roll.algorithms.kl import KLOptions, kl_estimate
from roll.algorithms.samples import token_level_rewards
from roll.config.algorithm import PPOConfig
from tests.algorithms.tabular import (
    TABLES,
    Row,
    TabularPolicy,
    bias_and_deviation,
    expected_gradient,
    expected_group_gradient,
    group_advantages,
    markdown,
    relative_bias,
    sampled_gradients,
)
from tests.support.keys import algorithm


@pytest.fixture(scope="module")
def policy() -> TabularPolicy:
    return TabularPolicy(0)


def gradient_with(policy: TabularPolicy, options: PPOConfig, kl: Tensor | None = None, **columns: Tensor) -> Tensor:
    """Exact expectation over single responses, advantages by an estimator that needs no group."""
    rows = torch.arange(len(policy.responses))
    mask = torch.ones(len(rows), policy.length, dtype=torch.bool)
    rewards = token_level_rewards(policy.rewards, mask, kl, 0.0 if kl is None else 0.3).double()
    inputs = AdvantageInputs(rewards, mask, rows, **columns)
    advantages = estimate_advantages(inputs, options).advantages
    probability = policy.log_probs().sum(-1).exp().detach()
    return expected_gradient(policy, advantages, probability, rows, {})


# Rewards and advantages pass through float32: 1e-6 of the gradient's size.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(("estimator", "group_size"), [("reinforce", 1), ("rloo", 2), ("rloo", 3)])
def test_unbiased_estimators(policy: TabularPolicy, estimator: str, group_size: int) -> None:
    small = TabularPolicy(0, vocabulary=3, length=2) if group_size == 3 else policy
    assert_close(expected_group_gradient(small, estimator, group_size), small.exact_gradient(), **TOLERANCE)
    if estimator == "reinforce":  # remax subtracts the greedy reward, whatever it is
        baseline = torch.full((len(policy.responses),), 0.7, dtype=torch.float64)
        gradient = gradient_with(policy, algorithm(adv_estimator="remax"), baseline_rewards=baseline)
        assert_close(gradient, policy.exact_gradient(), **TOLERANCE)


@pytest.mark.parametrize("group_size", [2, 3])
def test_gradients_that_are_right_but_for_their_length(group_size: int) -> None:
    """grpo without std: the mean contains the response itself, so 1/n of its own reward is subtracted.

    maxrl (2602.02710 theorem 1 and its centred form): with success probability p and N samples the expected gradient is
    (1 - (1-p)^N)/p grad p from the successes; the centring term vanishes but where a group has no success, which leaves
    (1 - (1-p)^(N-1))/p grad p."""
    small = TabularPolicy(0, vocabulary=3, length=2)
    gradient = expected_group_gradient(small, "grpo", group_size, ("group", None))
    assert_close(gradient, (1 - 1 / group_size) * small.exact_gradient(), **TOLERANCE)
    small.rewards = (small.rewards > small.rewards.median()).double()
    probability = float((small.log_probs().sum(-1).exp() * small.rewards).sum())
    assert 0.1 < probability < 0.9
    factor = (1 - (1 - probability) ** (group_size - 1)) / probability
    assert_close(expected_group_gradient(small, "maxrl", group_size), factor * small.exact_gradient(), **TOLERANCE)


@pytest.mark.parametrize("end", [None, 2])
def test_whitening_scales_by_the_spread_of_a_drawn_batch(end: int | None) -> None:
    """The table lists each group once and weighs it; a step draws groups, and whitens what it has drawn."""
    policy = TabularPolicy(0, end=end)
    probability = policy.log_probs().sum(-1).exp().detach()
    generator = torch.Generator().manual_seed(3)
    groups = torch.multinomial(probability, 2 * 20_000, replacement=True, generator=generator).view(-1, 2)
    outputs = group_advantages(policy, "reinforce++_baseline", groups)
    slope = torch.linalg.lstsq(
        torch.stack([outputs.raw_advantages[:, 0], torch.ones(len(outputs.raw_advantages))], -1),
        outputs.advantages[:, :1],
    ).solution[0]
    without = expected_group_gradient(policy, "grpo", 2, ("group", None))
    whitened = expected_group_gradient(policy, "reinforce++_baseline", 2)
    assert_close(float(whitened.norm() / without.norm()), float(slope), rtol=0.02, atol=0.0)


def test_ragged_lengths_bias_the_default_aggregation_only() -> None:
    """A response's mean weighs its tokens by 1/length, which is no constant; the sum does not."""
    policy = TabularPolicy(0, end=2)
    exact = policy.exact_gradient()
    assert set(policy.mask.sum(-1).tolist()) == {1, 2, 3}
    assert_close(policy.log_probs().sum(-1).exp().sum().item(), 1.0)
    assert_close(expected_group_gradient(policy, "rloo", 2), exact, **TOLERANCE)
    token_mean = expected_group_gradient(policy, "rloo", 2, loss_agg_mode="token-mean")
    assert relative_bias(policy, token_mean)[1] < 1e-9
    sequence_mean = expected_group_gradient(policy, "rloo", 2, loss_agg_mode="seq-mean-token-mean")
    assert relative_bias(policy, sequence_mean)[1] > 0.005


def test_gae_is_unbiased_at_lambda_1_with_any_critic_and_at_any_lambda_with_an_exact_one(policy: TabularPolicy) -> None:
    exact_values = policy.exact_values()
    wrong_values = exact_values + torch.arange(policy.length) - 1.0
    exact = policy.exact_gradient()
    for values, lambd in ((wrong_values, 1.0), (exact_values, 0.0), (exact_values, 0.7)):
        assert_close(
            gradient_with(policy, algorithm(adv_estimator="gae", lambd=lambd), values=values), exact, **TOLERANCE
        )
    # A critic that errs by a number for each prefix, not only for each position, misleads below lambda 1.
    prefix_error = exact_values + policy.responses.roll(1, 1) * torch.tensor([0.0, 1.0, 1.0])
    assert_close(
        gradient_with(policy, algorithm(adv_estimator="gae", lambd=1.0), values=prefix_error), exact, **TOLERANCE
    )
    biased = gradient_with(policy, algorithm(adv_estimator="gae", lambd=0.0), values=prefix_error)
    assert not torch.allclose(biased, exact, atol=1e-2)


def test_k1_in_the_reward_gives_the_gradient_of_the_regularised_objective(policy: TabularPolicy) -> None:
    reference = policy.log_probs(policy.perturbed(0.8, seed=5)).detach()
    kl = kl_estimate(policy.log_probs().detach(), reference, KLOptions("k1"))
    divergence = (policy.log_probs().sum(-1).exp() * (policy.log_probs().sum(-1) - reference.sum(-1))).sum()
    exact = policy.exact_gradient() - 0.3 * policy.gradient(divergence)
    assert_close(gradient_with(policy, algorithm(adv_estimator="reinforce"), kl), exact, **TOLERANCE)


def test_gradients_of_kl_losses_on_one_token() -> None:
    """On-policy: k2's gradient is that of KL(pi || ref), k3's that of KL(ref || pi), k1's is nothing."""
    bandit = TabularPolicy(2, vocabulary=4, length=1)
    reference = bandit.log_probs(bandit.perturbed(0.8)).detach()
    log_probs = bandit.log_probs()
    probability = log_probs.exp().detach()
    reverse = bandit.gradient((log_probs.exp() * (log_probs - reference)).sum())
    forward = bandit.gradient((reference.exp() * (reference - log_probs)).sum())
    for name, expected in (("k1", torch.zeros_like(reverse)), ("k2", reverse), ("k3", forward)):
        estimate = kl_estimate(log_probs, reference, KLOptions(name, value_clamp=None))
        assert_close(bandit.gradient((probability * estimate).sum()), expected)


@pytest.mark.parametrize(("level", "length", "bound"), [("sequence", 3, 1e-6), ("token", 1, 1e-9)])
def test_ratios_remove_the_bias_of_a_mismatched_engine(level: str, length: int, bound: float) -> None:
    """Of a whole response, and of a token where the response is one."""
    policy = TabularPolicy(0, length=length)
    engine, exact = policy.perturbed(0.6), policy.exact_gradient()
    corrections = (None, [{"level": level, "action": "truncate"}])
    biased, unbiased = (
        bias_and_deviation(*sampled_gradients(policy, engine, correction=one), exact)[0] for one in corrections
    )
    assert biased > 0.1 and unbiased < bound


PAGE = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_in_the_documentation(table: Callable[[], Mapping[str, Row]]) -> None:
    missing = [line for line in markdown(table()) if line not in PAGE]
    assert not missing, "python -m tests.algorithms.tabular prints the tables: " + "; ".join(missing)
