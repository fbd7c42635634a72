"""Preference losses against plain loops in float64, one pair at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.preferences import (
    PairSums,
    pair_losses,
    pair_sums,
    preference_loss,
    preference_metrics,
    slopes,
    unpaired_loss,
    unpaired_metrics,
)
from roll.config.losses import PREFERENCE_LOSSES, PreferenceLossConfig, preference_problems

P, L = 5, 12


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def log_sigmoid(x: float) -> float:
    return -softplus(-x)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(x: float, share: float) -> float:
    return -(1 - share) * log_sigmoid(x) - share * log_sigmoid(-x)


class Pair:
    """The numbers of one pair, as floats."""

    def __init__(self, pair: tuple[Any, ...], o: PreferenceLossConfig) -> None:
        (pc, pr), (rc, rr), (nc, nr) = pair
        self.b, self.e, self.o = o.beta, o.label_smoothing, o
        self.c, self.r = pc - rc, pr - rr
        self.lead = self.c - self.r
        self.mean_lead = self.c / nc - self.r / nr
        self.mc, self.mr = pc / nc, pr / nr
        self.q = sigma(self.b * self.lead)
        self.odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (self.mc, self.mr)]


FORMULAS: dict[str, Callable[[Pair], float]] = {
    "sigmoid": lambda p: smoothed(p.b * p.lead, p.e),
    "robust": lambda p: (-(1 - p.e) * log_sigmoid(p.b * p.lead) + p.e * log_sigmoid(-p.b * p.lead)) / (1 - 2 * p.e),
    "hinge": lambda p: max(0.0, 1 - p.b * p.lead),
    "ipo": lambda p: (p.mean_lead - 1 / (2 * p.b)) ** 2,
    "exo_pair": lambda p: p.q * math.log(p.q / (1 - p.e)) + (1 - p.q) * math.log((1 - p.q) / p.e),
    "sigmoid_norm": lambda p: -log_sigmoid(p.b * p.mean_lead),
    "nca_pair": lambda p: -log_sigmoid(p.b * p.c) - 0.5 * (log_sigmoid(-p.b * p.c) + log_sigmoid(-p.b * p.r)),
    "bco_pair": lambda p: -log_sigmoid(p.b * p.c) - log_sigmoid(-p.b * p.r),
    "sppo_hard": lambda p: (p.c - 1 / (2 * p.b)) ** 2 + (p.r + 1 / (2 * p.b)) ** 2,
    "apo_zero": lambda p: 1 - sigma(p.b * p.c) + sigma(p.b * p.r),
    "apo_down": lambda p: sigma(p.b * p.c) + 1 - sigma(p.b * (p.c - p.r)),
    "simpo": lambda p: smoothed(p.b * (p.mc - p.mr) - p.o.simpo_gamma, p.e),
    "orpo": lambda p: -p.mc - p.b * log_sigmoid(math.log(p.odds[0] / p.odds[1])),
    "sft": lambda p: -p.mc,
}


def plain_losses(pairs: list[tuple[Any, ...]], name: str, o: PreferenceLossConfig) -> list[float]:
    """The losses of pairs ``(policy, reference, length)``, each of these (chosen, rejected)."""
    if name in FORMULAS:
        return [FORMULAS[name](Pair(pair, o)) for pair in pairs]
    if name == "aot":  # the sorted leads of the policy against those of the reference
        sides = [sorted(pair[k][0] - pair[k][1] for pair in pairs) for k in (0, 1)]
    else:  # the sorted log-ratios of the chosen against those of the rejected
        sides = [sorted(pair[0][k] - pair[1][k] for pair in pairs) for k in (0, 1)]
    return [smoothed(o.beta * (one - other), o.label_smoothing) for one, other in zip(*sides, strict=True)]


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of policy and reference (2P, L), and the mask of the responses, of every length."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(2 * P, L, dtype=torch.bool)
    for row in range(2 * P):
        mask[row, 3 : 4 + int(torch.randint(1, L - 3, (), generator=generator))] = True
    policy, reference = (-torch.rand(2 * P, L, generator=generator, dtype=dtype) * 2 * mask for _ in range(2))
    return policy, reference, mask


def pairs_of(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> list[tuple[Any, ...]]:
    def two(column: torch.Tensor, row: int) -> tuple[float, float]:
        return float(column[row].sum()), float(column[row + 1].sum())

    return [(two(policy, row), two(reference, row), two(mask, row)) for row in range(0, 2 * P, 2)]


OPTIONS = {"label_smoothing": 0.1, "beta": 0.3}
NAMES = [row.name for row in PREFERENCE_LOSSES.rows if not row.is_unpaired]


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_its_formula(name: str) -> None:
    """In two precisions; its gradient by differences of the formula."""
    options = PreferenceLossConfig(loss_type=name, **OPTIONS)
    policy, reference, mask = batch()
    losses = preference_loss(pair_sums(policy.requires_grad_(), mask, reference), options)
    wanted = plain_losses(pairs_of(policy, reference, mask), name, options)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)
    single = preference_loss(pair_sums(policy.float(), mask, reference.float()), options)
    assert single.tolist() == pytest.approx(wanted, rel=2e-5)
    losses.mean().backward()
    assert policy.grad is not None
    for row in range(2 * P):
        moved = []
        for sign in (1, -1):
            other = policy.detach().clone()
            other[row, 3] += sign * 1e-6
            moved.append(np.mean(plain_losses(pairs_of(other, reference, mask), name, options)))
        assert float(policy.grad[row, 3]) == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-7)


def test_every_name_has_a_function_and_every_function_a_row() -> None:
    assert set(pair_losses.names) == set(NAMES)


@pytest.mark.parametrize("weights", [{"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, {"sigmoid": 1.0, "sft": 0.5}])
def test_weighted_losses_add_up(weights: dict[str, float]) -> None:
    policy, reference, mask = batch(2)
    mixed = PreferenceLossConfig(loss_type=list(weights), loss_weights=list(weights.values()), beta=0.2)
    pairs = pairs_of(policy, reference, mask)
    wanted = sum(weight * np.array(plain_losses(pairs, name, mixed)) for name, weight in weights.items())
    assert preference_loss(pair_sums(policy, mask, reference), mixed).numpy() == pytest.approx(wanted, rel=1e-12)


def test_slopes_give_the_gradient_of_a_loss_that_couples_pairs_in_any_split() -> None:
    options = PreferenceLossConfig(loss_type="aot", beta=0.4)
    policy, reference, mask = batch(5)
    whole = policy.clone().requires_grad_()
    sums = pair_sums(whole, mask, reference)
    loss = preference_loss(sums, options).mean()
    loss.backward()
    value, slope = slopes(sums, options)
    assert float(value) == pytest.approx(float(loss.detach()))
    split = policy.clone().requires_grad_()
    for begin in range(0, 2 * P, 2):
        part = pair_sums(split[begin : begin + 2], mask[begin : begin + 2], reference[begin : begin + 2])
        (part.policy * slope[begin // 2 : begin // 2 + 1]).sum().backward()
    assert whole.grad is not None and split.grad is not None
    assert torch.allclose(whole.grad, split.grad, rtol=1e-12)


def test_metrics_are_means_over_pairs() -> None:
    options = PreferenceLossConfig(beta=0.5)
    sums = PairSums(
        policy=torch.tensor([[-1.0, -4.0], [-3.0, -2.0]]),
        reference=torch.tensor([[-2.0, -3.0], [-3.0, -2.0]]),
        lengths=torch.tensor([[2.0, 3.0], [4.0, 5.0]]),
    )
    metrics = {k: m.value() for k, m in preference_metrics(sums, options, preference_loss(sums, options), "x/").items()}
    assert metrics["x/chosen_reward"] == pytest.approx(0.25) and metrics["x/reject_reward"] == pytest.approx(-0.25)
    assert metrics["x/acc"] == 0.5, "a tie is not ranked right"
    assert metrics["x/chosen_length"] == 3 and metrics["x/chosen_log_ratio"] == 0.5
    assert metrics["x/loss"] == pytest.approx((softplus(-1.0) + math.log(2)) / 2)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, ["loss_weights"]),
        ({"loss_type": "exo_pair"}, ["label_smoothing"]),
        ({"loss_type": ["kto", "sft"]}, ["loss_type"]),  # single responses stand alone
        ({"loss_type": "kto"}, []),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], keys: list[str]) -> None:
    assert [problem[0] for problem in preference_problems(PreferenceLossConfig(**changes))] == keys


@pytest.mark.parametrize("z0", [0.0, 0.7])
def test_kto_is_a_plain_loop(z0: float) -> None:
    """arXiv 2402.01306, eq. 8: the weight less the value of the response."""
    options = PreferenceLossConfig(loss_type="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    ratios = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    desirable = torch.tensor([True, False, False, True, True, False, True])
    wanted = []
    for ratio, good in zip(ratios.tolist(), desirable.tolist(), strict=True):
        weight = 1.5 if good else 0.5
        value = weight * sigma(0.3 * (ratio - z0) if good else 0.3 * (z0 - ratio))
        wanted.append(weight - value)
    kl = torch.full((7,), z0, dtype=torch.float64)
    losses = unpaired_loss(ratios, desirable, kl, options)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), ratios)
    assert bool(((gradient < 0) == desirable).all()), "desirable responses become more probable, others less"
    apo = PreferenceLossConfig(loss_type="apo_zero_unpaired", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    alone = unpaired_loss(ratios, desirable, None, apo)
    assert torch.equal(alone, unpaired_loss(ratios, desirable, torch.zeros(7, dtype=torch.float64), options))
    metrics = unpaired_metrics(ratios, ratios, desirable, losses, options, "")
    right = [(ratio > 0) == good for ratio, good in zip(ratios.tolist(), desirable.tolist(), strict=True)]
    assert metrics["acc"].value() == pytest.approx(sum(right) / 7)
    assert metrics["loss"].value() == pytest.approx(sum(wanted) / 7)


@pytest.mark.parametrize("distance", [0.0, 1.0, 200.0, 1e4])
@pytest.mark.parametrize("loss_type", pair_losses.names)
def test_far_from_the_reference_losses_and_gradients_are_finite(loss_type: str, distance: float) -> None:
    signs = torch.tensor([[1.0, -1], [-1, 1], [1, 1], [-1, -1], [0, 1], [-1, 0]])
    policy = (signs * distance - 2 * distance - 10).requires_grad_()
    sums = PairSums(policy, torch.full_like(policy, -2 * distance - 10), torch.full_like(policy, 20.0))
    loss = preference_loss(sums, PreferenceLossConfig(loss_type=loss_type, label_smoothing=0.01))
    loss.sum().backward()
    assert policy.grad is not None and bool(loss.isfinite().all() and policy.grad.isfinite().all())
