"""Divergences against loops in float64, their gradients against finite sums, and what is known of their minima."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import pytest
import torch

from roll.algorithms.distillation import divergence
from roll.config.losses import DivergenceConfig, KDObjective
from roll.models.distributions import Vocabulary, compared, top_tokens
from roll.models.layouts import TargetDistributions, TopTokens

OBJECTIVES = get_args(KDObjective)


def by_loop(p: list[float], q: list[float], options: DivergenceConfig, tail: int | None) -> float:
    """The definitions, one token after the other."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    def mix(weight: float, a: list[float], b: list[float]) -> list[float]:
        return [weight * x + (1 - weight) * y for x, y in zip(a, b, strict=True)]

    name, skew, beta = options.kd_objective, options.skew_lambda, options.js_beta
    if name == "forward_kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    if name == "skewed_forward_kl":
        return kl(p, mix(skew, p, q))
    if name == "skewed_reverse_kl":
        return kl(q, mix(skew, q, p))
    if name == "js_divergence":
        middle = mix(beta, p, q)
        return beta * kl(p, middle) + (1 - beta) * kl(q, middle)
    if name == "total_variation":
        return sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
    mass, in_tail = (p[tail], {tail}) if tail is not None else (0.0, set[int]())
    for token in sorted((i for i in range(len(p)) if i != tail), key=lambda i: p[i]):
        mass += p[token]
        if mass <= options.adaptive_kl_alpha:
            in_tail.add(token)
    gap = [abs(x - y) for x, y in zip(p, q, strict=True)]
    g_tail = sum(gap[i] for i in in_tail)
    share = g_tail / sum(gap) if sum(gap) else 0.5
    return (1 - share) * kl(p, q) + share * kl(q, p)


def logits(tokens: int = 5, size: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    student = 2 * torch.randn(tokens, size, generator=random, dtype=torch.float64)
    return student.requires_grad_(), 2 * torch.randn(tokens, size, generator=random, dtype=torch.float64)


def compare(student: torch.Tensor, teacher: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    """As the head does it: the teacher's k tokens, the rest as one, both at their temperatures."""
    keys = DivergenceConfig(logits_topk=k, **options)
    temperature = keys.kd_temperature * keys.teacher_temperature
    size = teacher.shape[1]
    whole = Vocabulary(size)
    top = top_tokens(whole, lambda rows: teacher[rows], len(teacher), 2, temperature, TopTokens(k, size))
    columns = (top["top_ids"].long(), top["top_log_probs"], top["tail_log_prob"])
    targets = TargetDistributions("teacher", *columns, keys.kd_temperature, partial(divergence, options=keys))
    everything = slice(0, len(student))
    zeros = torch.zeros(len(student), dtype=torch.int64)
    return compared(whole, student, everything, zeros, 1.0, ("log_probs",), [targets])[0]["teacher/divergence"]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("k", [0, 4])
def test_equals_a_loop_with_its_gradient(objective: str, k: int) -> None:
    """Whole vocabulary, and the tail as one bucket; the gradient by central differences of the loop."""
    student, teacher = logits()
    options: dict[str, Any] = {"kd_objective": objective, "kd_temperature": 1.5, "teacher_temperature": 0.8}
    options |= {"skew_lambda": 0.3, "js_beta": 0.2, "adaptive_kl_alpha": 0.4}
    keys = DivergenceConfig(**options)

    def of_token(scores: torch.Tensor, token: int) -> float:
        q, p = (scores / 1.5).softmax(-1).tolist(), (teacher[token] / 1.5 / 0.8).softmax(-1).tolist()
        if k:
            top = sorted(range(len(p)), key=lambda i: -p[i])[:k]
            q, p = ([some[i] for i in top] + [sum(x for i, x in enumerate(some) if i not in top)] for some in (q, p))
        return 1.5**2 * by_loop(p, q, keys, k if k else None)

    values = compare(student, teacher, k, **options)
    assert values.tolist() == pytest.approx([of_token(row, i) for i, row in enumerate(student.detach())], rel=1e-12)
    if objective == "adaptive_kl":
        return  # its weights are constants of the gradient
    (gradient,) = torch.autograd.grad(values.sum(), student)
    for token, place in ((0, 0), (2, 5), (4, 11)):
        step = torch.zeros(12, dtype=torch.float64)
        step[place] = 1e-6
        row = student.detach()[token]
        slope = (of_token(row + step, token) - of_token(row - step, token)) / 2e-6
        assert float(gradient[token, place]) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_adaptive_kl_and_all_others_are_zero_where_student_equals_teacher(objective: str) -> None:
    """ROLL's adaptive_kl is 0/0 there: a run that starts from its own teacher begins with NaN."""
    _, teacher = logits()
    student = teacher.clone().requires_grad_()
    for k in (0, 4):
        values = compare(student, teacher, k, kd_objective=objective)
        (gradient,) = torch.autograd.grad(values.sum(), student)
        torch.testing.assert_close(values.detach(), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-14)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


def test_adaptive_kl_weighs_with_constants() -> None:
    """Its gradient is that of the two divergences under fixed weights."""
    student, teacher = logits()
    value = compare(student, teacher, 0, kd_objective="adaptive_kl")
    forward = compare(student, teacher, 0, kd_objective="forward_kl")
    reverse = compare(student, teacher, 0, kd_objective="reverse_kl")
    share = ((value - forward) / (reverse - forward)).detach()
    wanted = torch.autograd.grad(((1 - share) * forward + share * reverse).sum(), student)[0]
    torch.testing.assert_close(torch.autograd.grad(value.sum(), student)[0], wanted, rtol=1e-9, atol=1e-12)


def test_renormalised_top_k_gives_the_published_numbers_and_is_blind_to_the_rest() -> None:
    """ROLL renormalises both sides over the teacher's k tokens: a student with hardly any mass there has loss 0."""
    student, teacher = logits()
    top = teacher.topk(4, dim=-1).indices
    p, q = teacher.gather(1, top).log_softmax(-1), student.gather(1, top).log_softmax(-1)
    wanted = (p.exp() * (p - q)).sum(-1)
    options = {"kd_temperature": 1.0, "topk_tail": "renormalised"}
    torch.testing.assert_close(compare(student, teacher, 4, **options), wanted)

    elsewhere = teacher.clone().scatter(1, teacher.topk(1, largest=False).indices, 30.0)
    assert float(compare(elsewhere, teacher, 4, **options).abs().max()) < 1e-12
    assert float(compare(elsewhere, teacher, 4, topk_tail="bucket").min()) > 10


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    """Without the factor T^2 (ROLL) the balance with the likelihood moves silently with the temperature."""
    norms = {}
    for temperature in (1.0, 4.0):
        student, teacher = logits(size=50)
        (gradient,) = torch.autograd.grad(compare(student, teacher, 0, kd_temperature=temperature).sum(), student)
        norms[temperature] = float(gradient.norm())
    assert 0.4 < norms[4.0] / norms[1.0] < 2.5


def test_small_tails_keep_their_precision() -> None:
    """In float32 one minus the listed mass would be 0 or rounding noise."""
    scores, listed = torch.tensor([[20.0, 0.0, -1.0, -2.0]]), torch.tensor([[0]])
    exact = Vocabulary(4).rest(scores.double().log_softmax(-1), listed)
    found = Vocabulary(4).rest(scores.log_softmax(-1), listed)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    assert -20 < float(exact) < -19
