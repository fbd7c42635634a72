"""Each policy loss against its formula, token by token in plain Python, and its gradient against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from roll.algorithms.metrics import MetricBuilder
from roll.algorithms.policy_losses import LossInputs, policy_losses, token_covariance
from tests.algorithms.reference import Batch, each_batch, make_batch, mean
from tests.support.keys import loss_options
from tests.support.names import POLICY_LOSS_NAMES


def per_token(variant: str, inputs: LossInputs, **settings: object) -> torch.Tensor:
    options = loss_options({"pg_variant": variant, **settings})
    return policy_losses.resolve(variant)(inputs, options.pg, MetricBuilder())


def inputs_of(batch: Batch, **changes: object) -> LossInputs:
    inputs = LossInputs(batch.log_probs, batch.advantages, batch.mask, batch.old_log_probs)
    return replace(inputs, **changes)


class Row:
    """One response as plain numbers; ``t`` runs over its masked tokens."""

    def __init__(self, batch: Batch, row: int) -> None:
        kept = [t for t, m in enumerate(batch.mask[row].tolist()) if m]
        self.kept = kept
        self.logp = [float(batch.log_probs[row, t]) for t in kept]
        self.old = [float(batch.old_log_probs[row, t]) for t in kept]
        self.advantage = [float(batch.advantages[row, t]) for t in kept]
        self.log_ratio = [a - b for a, b in zip(self.logp, self.old, strict=True)]
        self.ratio = [math.exp(x) for x in self.log_ratio]

    @property
    def sequence_ratio(self) -> float:
        return math.exp(mean(self.log_ratio))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def dual(r: float, a: float, bound: float) -> float:
    return min(surrogate(r, a), -bound * a) if a < 0 else surrogate(r, a)


def gmpo_row(row: Row) -> float:
    clipped = [min(x, 0.4) if a > 0 else max(x, -0.4) for x, a in zip(row.log_ratio, row.advantage, strict=True)]
    return math.exp(mean(clipped))


def dppo_weight(row: Row, t: int, divergence: str, threshold: float) -> float:
    new, old, r, a = math.exp(row.logp[t]), math.exp(row.old[t]), row.ratio[t], row.advantage[t]
    if divergence == "tv":
        distance = abs(new - old)
    else:
        distance = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    away = r > 1 if a > 0 else r < 1
    return 0.0 if away and distance > threshold else min(r, 20.0)


def unified_cispo_weight(r: float, a: float) -> float:
    """2506.13585 eq. 6-7 with low 0.2 and high 0.3: the clipped weight, times the mask."""
    if (a > 0 and r > 1.3) or (a < 0 and r < 0.8):
        return 0.0
    return clip(r, 0.8, 1.3)


def vespo_weight(row: Row, a: float, positive: tuple[float, float], negative: tuple[float, float]) -> float:
    """phi(w) = w^k exp(lambda (1 - w)), w the product of the response's ratios."""
    k, decay = positive if a >= 0 else negative
    w = math.exp(sum(row.log_ratio))
    return w**k * math.exp(decay * (1 - w))


def sapo(r: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * (4 / tau) / (1 + math.exp(-tau * (r - 1)))


def squared_sum(row: Row, scale: float = 1.0, minuend: float = 0.0) -> float:
    return (minuend - scale * sum(row.log_ratio)) ** 2 / len(row.logp)


Formula = Callable[[Row, int], float]
RANGE = {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3}
TOPR = {"topr_positive_weight": 0.7, "topr_negative_weight": 0.4}
VESPO = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.0, "vespo_lambda_neg": 4.0}
CISPO = {"cispo_epsilon_low": 0.2, "cispo_epsilon_high": 0.3, "cispo_unified_mask": True}
WEIGHTS: list[tuple[str, dict[str, object], Formula]] = [
    ("vanilla", {}, lambda row, t: 1.0),
    ("tis", {}, lambda row, t: clip(row.ratio[t], 0.0, 1.0)),
    ("tis", {"tis_lower_bound": 0.9, "tis_upper_bound": 1.1}, lambda row, t: clip(row.ratio[t], 0.9, 1.1)),
    ("cispo", {**CISPO, "cispo_unified_mask": False}, lambda row, t: clip(row.ratio[t], 0.8, 1.3)),
    ("cispo", CISPO, lambda row, t: unified_cispo_weight(row.ratio[t], row.advantage[t])),
    ("vespo", {}, lambda row, t: vespo_weight(row, row.advantage[t], (2.0, 3.0), (3.0, 2.0))),
    ("vespo", VESPO, lambda row, t: vespo_weight(row, row.advantage[t], (1.0, 0.5), (0.0, 4.0))),
    ("topr", TOPR, lambda row, t: 0.7 if row.advantage[t] >= 0 else 0.4 * clip(math.exp(sum(row.log_ratio)), 0.0, 1.0)),
    ("dppo", {}, lambda row, t: dppo_weight(row, t, "tv", 0.15)),
    ("dppo", {"dppo_divergence": "kl", "dppo_threshold": 0.02}, lambda row, t: dppo_weight(row, t, "kl", 0.02)),
]
"""Losses of the form -weight A log pi."""


def times_log_prob(weight: Formula) -> Formula:
    return lambda row, t: -weight(row, t) * row.advantage[t] * row.logp[t]


FORMULAS: list[tuple[str, dict[str, object], Formula]] = [
    ("ppo", {}, lambda row, t: surrogate(row.ratio[t], row.advantage[t])),
    ("ppo", RANGE, lambda row, t: surrogate(row.ratio[t], row.advantage[t], 0.1, 0.3)),
    ("ppo", {"dual_clip_loss": True}, lambda row, t: dual(row.ratio[t], row.advantage[t], 1.4)),
    ("ppo", {"dual_clip_loss": True, "dual_clip_coef": 1.3}, lambda row, t: dual(row.ratio[t], row.advantage[t], 1.3)),
    ("ppo", {"importance_sampling": "seq"}, lambda row, t: surrogate(row.sequence_ratio, row.advantage[t])),
    ("gspo", {"pg_clip": 0.05}, lambda row, t: surrogate(row.sequence_ratio, row.advantage[t], 0.05, 0.05)),
    ("gspo_token", {}, lambda row, t: surrogate(row.sequence_ratio, row.advantage[t])),
    ("raft++", {}, lambda row, t: surrogate(row.ratio[t], row.advantage[t]) if row.advantage[t] > 0 else 0.0),
    ("kimi15", {"kimi15_tau": 0.3}, lambda row, t: -row.advantage[t] * row.logp[t] + 0.15 * squared_sum(row)),
    ("sapo", {}, lambda row, t: sapo(row.ratio[t], row.advantage[t])),
    ("gmpo", {}, lambda row, t: -row.advantage[t] * gmpo_row(row)),
    ("dro", {"dro_tau": 0.2}, lambda row, t: 0.5 * squared_sum(row, 0.2, mean(row.advantage))),
    *((variant, settings, times_log_prob(weight)) for variant, settings, weight in WEIGHTS),
]


@pytest.mark.parametrize(("variant", "settings", "formula"), FORMULAS, ids=lambda v: str(v) if type(v) is str else "")
@each_batch()
def test_value_equals_the_formula(variant: str, settings: dict[str, object], formula: Formula, batch: Batch) -> None:
    result = per_token(variant, inputs_of(batch), **settings)
    for i in range(len(batch.mask)):
        row = Row(batch, i)
        for position, t in enumerate(row.kept):
            assert_close(float(result[i, t]), formula(row, position), rtol=1e-9, atol=1e-12)


def test_every_variant_has_a_formula() -> None:
    # Those that choose tokens over a whole micro-batch have tests of their own.
    assert {name for name, _, _ in FORMULAS} | {"clip_cov", "kl_cov", "m2po"} == set(POLICY_LOSS_NAMES)


# Their gradient is not that of their value: weights, or the value itself, are without gradient.
STOPS_GRADIENT = {"tis", "cispo", "topr", "gspo_token", "dppo", "clip_cov", "vespo"}


@pytest.mark.parametrize("variant", sorted(set(POLICY_LOSS_NAMES) - STOPS_GRADIENT))
@pytest.mark.parametrize("settings", [{}, {"dual_clip_loss": True}, {"importance_sampling": "segment"}])
def test_gradient_is_that_of_the_value(variant: str, settings: dict[str, object]) -> None:
    batch = make_batch(11, 4, 6)
    log_probs = batch.log_probs.clone().requires_grad_()

    def masked(log_probs: torch.Tensor) -> torch.Tensor:
        return torch.where(batch.mask, per_token(variant, inputs_of(batch, log_probs=log_probs), **settings), 0.0)

    assert torch.autograd.gradcheck(masked, log_probs)


@pytest.mark.parametrize("advantages", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("settings", [{}, {"dual_clip_loss": True, "dual_clip_coef": 3.0}])
def test_clipped_tokens_are_those_of_float64(settings: dict[str, object], advantages: torch.dtype) -> None:
    """Log-probs in bfloat16: no product rounds a token's gradient away, and next to the bound of the dual clip, where
    the products of bound and ratio round to one number, the gradient is nothing or all (autograd takes half)."""
    generator = torch.Generator().manual_seed(5)
    shape = (64, 33)
    log_ratio = torch.randint(-90, 90, shape, generator=generator) / 64.0
    log_ratio[:, :4] = 1.1015625  # the nearest above log 3
    log_ratio[:, 4:8] = 1.09375
    values = torch.randn(shape, generator=generator).to(advantages)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        variable = torch.zeros(shape, dtype=dtype).requires_grad_()
        log_probs = log_ratio.to(torch.bfloat16).to(dtype) + variable
        given = values if dtype == torch.bfloat16 else values.double()
        inputs = LossInputs(log_probs, given, torch.ones(shape).bool(), torch.zeros(shape, dtype=dtype))
        gradients.append(torch.autograd.grad(per_token("ppo", inputs, **settings).sum(), variable)[0].double())
    ours, exact = gradients
    ratio = log_ratio.to(torch.bfloat16).exp()
    bounds = torch.tensor([0.8, 1.2])
    inside = (ratio.float()[..., None] - bounds).abs().amin(-1) > 0.02  # exp in bfloat16 may round across a bound
    assert torch.equal((ours != 0)[inside], (exact != 0)[inside])
    assert_close(ours[inside], exact[inside], rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("variant", ["tis", "cispo", "topr", "dppo", "vanilla", "vespo"])
def test_weighted_log_prob_losses_have_the_weight_as_gradient(variant: str) -> None:
    batch = make_batch(12, 4, 6)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss = per_token(variant, inputs_of(batch, log_probs=log_probs))
    (gradient,) = torch.autograd.grad(loss[batch.mask].sum(), log_probs)
    assert_close(gradient[batch.mask], (loss / batch.log_probs)[batch.mask].detach())


def test_gspo_token_equals_gspo_in_value_and_row_gradient_for_equal_advantages() -> None:
    """arXiv 2507.18071 section 4.3: with one advantage a response the two objectives agree."""
    batch = make_batch(3, 5, 8)
    advantages = torch.where(batch.mask, batch.response_rewards.unsqueeze(-1) - 0.5, 0.0)
    gradients = []
    for variant in ("gspo", "gspo_token"):
        log_probs = batch.log_probs.clone().requires_grad_()
        loss = per_token(variant, inputs_of(batch, log_probs=log_probs, advantages=advantages))
        lengths = batch.mask.sum(-1).clamp(min=1)
        (gradient,) = torch.autograd.grad((torch.where(batch.mask, loss, 0.0).sum(-1) / lengths).sum(), log_probs)
        gradients.append(gradient)
    assert_close(gradients[0], gradients[1])


def test_dro_uses_the_reference_where_there_is_one() -> None:
    batch = make_batch(4, 3, 5)
    as_old = per_token("dro", inputs_of(batch, old_log_probs=batch.ref_log_probs))
    assert_close(per_token("dro", inputs_of(batch, ref_log_probs=batch.ref_log_probs)), as_old)


@pytest.mark.parametrize("threshold", [1e-6, 0.02, 0.04, 0.1, 10.0])
@each_batch()
def test_m2po_drops_the_largest_until_the_mean_of_the_rest_is_in_bounds(threshold: float, batch: Batch) -> None:
    """One token after the other, as in the paper."""
    rows = [Row(batch, i) for i in range(len(batch.mask))]
    stays = {
        (i, t): row.log_ratio[position] ** 2
        for i, row in enumerate(rows)
        for position, t in enumerate(row.kept)
        if row.advantage[position] * row.log_ratio[position] > 0
    }
    bounded = set(stays)
    while stays and mean(list(stays.values())) > threshold:
        stays.pop(max(stays, key=stays.__getitem__))
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = inputs_of(batch, log_probs=log_probs)
    loss = per_token("m2po", inputs, m2po_threshold=threshold)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    for i, row in enumerate(rows):
        for position, t in enumerate(row.kept):
            dropped = (i, t) in bounded and (i, t) not in stays
            expected = 0.0 if dropped else -row.ratio[position] * row.advantage[position]
            assert_close(float(loss[i, t]), expected, rtol=1e-9, atol=1e-12)
            assert_close(float(gradient[i, t]), expected, rtol=1e-9, atol=1e-12)


def test_clip_cov_takes_the_gradient_from_tokens_of_high_covariance() -> None:
    """Among those that the clip of PPO has not cut already."""
    batch = make_batch(6, 6, 12, density=1.0)
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = inputs_of(batch, log_probs=log_probs, old_log_probs=None)
    settings = {"clip_cov_ratio": 0.1, "clip_cov_low": 0.3, "clip_cov_high": 50.0}
    (gradient,) = torch.autograd.grad(per_token("clip_cov", inputs, **settings).sum(), log_probs)
    without, eligible = batch.mask & (gradient == 0), batch.mask & (token_covariance(inputs) >= 0.3)
    assert int(without.sum()) == min(int(0.1 * int(batch.mask.sum())), int(eligible.sum())) > 0
    assert bool((without <= eligible).all())
    inputs = inputs_of(batch)
    settings = {"clip_cov_ratio": 1.0, "clip_cov_low": -1e30, "clip_cov_high": 1e30, "pg_clip": 0.1}
    loss, clipped = per_token("clip_cov", inputs, **settings), per_token("ppo", inputs, pg_clip=0.1)
    cut = batch.mask & (clipped > -(inputs.log_ratio.exp() * batch.advantages))
    assert cut.any() and (batch.mask & ~cut).any()
    assert_close(loss, torch.where(cut, clipped, 0.0))


def test_kl_cov_penalises_the_tokens_of_highest_covariance() -> None:
    batch = make_batch(7, 6, 12, density=1.0)
    inputs = inputs_of(batch)
    plain = -(inputs.log_ratio.exp() * batch.advantages)
    extra = per_token("kl_cov", inputs, kl_cov_ratio=0.1, kl_cov_coef=2.0) - plain
    wanted = int(0.1 * int(batch.mask.sum()))
    chosen = token_covariance(inputs).masked_fill(~batch.mask, -math.inf).flatten().topk(wanted).indices
    expected = torch.zeros(batch.mask.numel(), dtype=extra.dtype)
    expected[chosen] = 2.0 * inputs.log_ratio.abs().flatten()[chosen]
    assert_close(extra.flatten(), expected)


@pytest.mark.parametrize("variant", POLICY_LOSS_NAMES)
def test_extreme_ratios_stay_finite(variant: str) -> None:
    log_probs = torch.tensor([[-0.01, -300.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-300.0, -0.01, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for advantage in (-1.0, 0.0, 1.0):
        advantages = torch.full((1, 3), advantage)
        loss = per_token(variant, LossInputs(log_probs, advantages, mask, old))
        (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
        assert bool(loss.isfinite().all())
        assert bool(gradient.isfinite().all())
