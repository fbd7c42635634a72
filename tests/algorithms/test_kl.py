from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from roll.algorithms.kl import (
    AdaptiveKLController,
    Controller,
    EntropyController,
    FixedKLController,
    KLOptions,
    finite_mean,
    kl_estimate,
    make_kl_controller,
)
from tests.algorithms.reference import Batch, each_batch

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "abs": abs,
    "k3": lambda d: min(math.exp(-d) - 1 + d, 10.0),
}
FORMULAS |= {name: FORMULAS[other] for name, other in {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.items()}


@pytest.mark.parametrize("name", [*FORMULAS, "k1+", "abs+", "k3+", "low_var_kl+"])
@each_batch()
def test_estimators_equal_their_formulas(name: str, batch: Batch) -> None:
    """Those with a plus have the gradient of k2."""
    log_probs, formula = batch.log_probs.clone().requires_grad_(), FORMULAS[name.removesuffix("+")]
    result = kl_estimate(log_probs, batch.ref_log_probs, KLOptions(name))
    difference = batch.log_probs - batch.ref_log_probs
    expected = [[formula(d) for d in row] for row in difference.tolist()]
    assert_close(result, torch.tensor(expected, dtype=torch.float64).view_as(result), rtol=1e-9, atol=1e-12)
    if name.endswith("+"):
        assert_close(torch.autograd.grad(result.sum(), log_probs)[0], difference)


@given(seed=st.integers(0, 2**31))
def test_k1_and_k3_are_unbiased(seed: int) -> None:
    """Expectations over the policy by enumeration of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 1, 1, 7, dtype=torch.float64, generator=generator).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    unclamped = {"log_ratio_clamp": None, "value_clamp": None}
    for name in ("k1", "k3"):
        estimates = kl_estimate(policy, reference, KLOptions(name, **unclamped))
        assert_close((policy.exp() * estimates).sum(), exact)


def test_importance_weighted_k3_has_the_gradient_of_the_divergence() -> None:
    """Tokens from an old policy; the weighted estimate is unbiased in value and gradient, the plain one is not."""
    generator = torch.Generator().manual_seed(0)
    logits, old_logits, ref_logits = torch.randn(3, 1, 7, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    old, reference = old_logits.log_softmax(-1), ref_logits.log_softmax(-1)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    weighted = KLOptions("k3", value_clamp=None, importance_weighted=True)
    estimate = (old.exp() * kl_estimate(policy, reference, weighted, policy - old)).sum()
    plain = (old.exp() * kl_estimate(policy, reference, KLOptions("k3", value_clamp=None))).sum()
    assert_close(estimate, exact)
    exact_gradient = gradient(exact)
    assert_close(gradient(estimate), exact_gradient)
    assert not torch.allclose(gradient(plain), exact_gradient, atol=1e-3)


def test_k3_is_precise_near_0_and_overflows_without_the_clamps() -> None:
    zero, far = torch.zeros(1, 2), torch.tensor([[-5.0, -200.0]])
    near = kl_estimate(torch.tensor([[1e-4, -1e-4]]), zero)
    assert_close(near, torch.full((1, 2), 5e-9), rtol=1e-2, atol=1e-12)
    raw = kl_estimate(far, zero, KLOptions("k3", log_ratio_clamp=None, value_clamp=None))
    assert_close(raw[0, 0], torch.tensor(math.exp(5) - 6))
    assert bool(raw[0, 1].isinf())
    assert kl_estimate(far, zero).tolist() == [[10.0, 10.0]]
    assert bool(kl_estimate(far, zero, KLOptions("k3", value_clamp=None)).isfinite().all())


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"k4.*k1"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), KLOptions("k4"))


def test_controllers() -> None:
    fixed = make_kl_controller(0.2, None, 10000)
    assert type(fixed) is FixedKLController
    fixed.update(5.0, 1000)
    assert fixed.value == 0.2

    adaptive = make_kl_controller(0.2, 0.1, 1000)
    adaptive.update(1.0, 100)  # far above the target: the error is held at 0.2
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    adaptive.update(0.09, 100)
    assert adaptive.value == pytest.approx(0.2 * 1.02 * (1 - 0.1 * 0.1))
    eager = make_kl_controller(0.2, 0.1, 10)
    eager.update(0.0, 1000)  # a batch of a hundred horizons
    assert eager.value == pytest.approx(0.2 * 0.8)
    restored = AdaptiveKLController(0.2, 0.1, 1000)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value


@pytest.mark.parametrize(
    "controller",
    [FixedKLController(0.2), AdaptiveKLController(0.2, 0.1, 1000), EntropyController(0.2, 1.0)],
)
def test_a_step_without_a_statistic_moves_no_controller(controller: Controller) -> None:
    before = controller.state_dict()
    nothing = finite_mean(torch.tensor([0.5, math.nan]), torch.tensor([False, True]))
    for statistic, count in (nothing, (math.nan, 3), (math.inf, 3), (0.0, 0)):
        controller.update(statistic, count)
        assert controller.state_dict() == before
    assert finite_mean(torch.tensor([0.5, math.nan, 1.5, 9.0]), torch.tensor([True, True, True, False])) == (1.0, 2)
