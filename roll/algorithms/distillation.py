r"""Divergences between a teacher p and a student q, from log-probs over the same C buckets.

A bucket is a token, or (the last one, where ``has_tail``) all tokens that are not listed by themselves. Grouping tokens
can only lower a divergence, and it is 0 exactly where every bucket has equal mass on both sides: a student that puts
its mass outside the teacher's k most probable tokens pays for it, which it does not where both sides are renormalised
over the k (``topk_tail: renormalised``) or the rest is left out of the sum (``ignored``).

    forward_kl         sum p log(p/q)                                     Hinton et al., 2015, arXiv 1503.02531
    reverse_kl         sum q log(q/p)                                     MiniLLM, arXiv 2306.08543
    js_divergence      b KL(p||m) + (1-b) KL(q||m), m = b p + (1-b) q     GKD, arXiv 2306.13649, eq. 1
    skewed_forward_kl  KL(p || a p + (1-a) q)                             DistiLLM, arXiv 2402.03898
    skewed_reverse_kl  KL(q || (1-a) p + a q)
    adaptive_kl        g_h/(g_h+g_t) forward + g_t/(g_h+g_t) reverse      AKL, arXiv 2404.02657
    total_variation    1/2 sum |p - q|

In ``adaptive_kl`` g_h and g_t are the sums of |p - q| (without gradient) over the teacher's head and tail: the tail are
its least probable buckets with ``adaptive_kl_alpha`` of the mass, the bucket of unlisted tokens always among them.
Where p = q both weights are one half.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from roll.config.losses import DivergenceConfig
from roll.protocol.metrics import Mean, Metrics


def divergence(student: Tensor, teacher: Tensor, has_tail: bool, options: DivergenceConfig) -> Tensor:
    """The divergence of each token's distributions, (n,), with gradient to ``student``.

    Args:
        student: (n, C) log-probs at ``kd_temperature``.
        teacher: (n, C) log-probs of the same buckets, at ``kd_temperature`` times ``teacher_temperature``.
        has_tail: the last bucket is the rest of the vocabulary.
    """
    assert student.shape == teacher.shape, (student.shape, teacher.shape)
    is_partial = options.topk_tail == "ignored" and has_tail
    if options.topk_tail != "bucket" and has_tail:
        student, teacher = student[:, :-1], teacher[:, :-1]
        if not is_partial:
            student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        has_tail = False
    # Both sides, so that buckets below the floor on both do not differ.
    if options.log_prob_floor is not None:
        student, teacher = student.clamp(min=options.log_prob_floor), teacher.clamp(min=options.log_prob_floor)
    q, p = student, teacher
    match options.kd_objective:
        case "forward_kl":
            value = _kl(p, q)
        case "reverse_kl":
            value = _kl(q, p)
        case "skewed_forward_kl":
            value = _kl(p, _mixture(options.skew_lambda, p, q))
        case "skewed_reverse_kl":
            value = _kl(q, _mixture(options.skew_lambda, q, p))
        case "js_divergence":
            middle = _mixture(options.js_beta, p, q)
            value = options.js_beta * _kl(p, middle) + (1.0 - options.js_beta) * _kl(q, middle)
        case "total_variation":
            value = (p.exp() - q.exp()).abs().sum(-1) / 2
        case "adaptive_kl":
            value = _adaptive_kl(q, p, options, has_tail)
    if is_partial:
        value = value.clamp(min=0.0)  # masses that do not add up to 1 may have a sum below 0
    if options.divergence_clamp is not None:
        value = value.clamp(-options.divergence_clamp, options.divergence_clamp)
    # Gradients of soft targets shrink as 1 / T^2 (arXiv 1503.02531, section 2): the factor keeps their scale.
    return value * options.kd_temperature**2


def _kl(of: Tensor, to: Tensor) -> Tensor:
    """KL from log-probs, (n,)."""
    return (of.exp() * (of - to)).sum(-1)


def _mixture(weight: float, first: Tensor, second: Tensor) -> Tensor:
    """Log-probs of ``weight`` first + (1 - ``weight``) second."""
    if weight in (0.0, 1.0):
        return first if weight else second
    return torch.logaddexp(first + log(weight), second + log(1.0 - weight))


def _adaptive_kl(q: Tensor, p: Tensor, options: DivergenceConfig, has_tail: bool) -> Tensor:
    probs = p.exp()
    gap = (probs - q.detach().exp()).abs()
    listed = probs[:, :-1] if has_tail else probs
    ascending, order = listed.sort(-1)
    below = ascending.cumsum(-1) + (probs[:, -1:] if has_tail else 0.0)
    in_tail = torch.empty_like(listed, dtype=torch.bool).scatter_(1, order, below <= options.adaptive_kl_alpha)
    if has_tail:
        in_tail = torch.cat([in_tail, in_tail.new_ones(len(in_tail), 1)], dim=1)
    of_tail, total = (gap * in_tail).sum(-1), gap.sum(-1)
    # Where both sides agree the weights are 0 / 0: a run that starts from its own teacher would begin with NaN.
    share = torch.where(total > 0, of_tail / total.clamp(min=torch.finfo(total.dtype).tiny), 0.5)
    return (1.0 - share) * _kl(p, q) + share * _kl(q, p)


def comparison_metrics(outputs: dict[str, Tensor], mask: Tensor, prefix: str) -> Metrics:
    """Means over the tokens in ``mask`` of the head's statistics of a comparison: the masses of the compared tokens on
    both sides, and how often both sides have the same most probable token."""
    tokens: Any = mask.sum()
    names = {"target_mass": "teacher_top_k_mass", "model_mass": "student_top_k_mass", "agreement": "agreement@1"}
    sums: dict[str, Any] = {shown: (outputs[name] * mask).sum().detach() for name, shown in names.items()}
    return {prefix + name: Mean(total, tokens) for name, total in sums.items()}
