r"""Estimators of the Kullback-Leibler divergence from sampled tokens, and controllers of its
coefficient and of the entropy bonus's.

For a token sampled from the policy, with :math:`d = \log\pi - \log\pi_{ref}`:

==========  ====================  =========================================================================
name        value                 note
==========  ====================  =========================================================================
k1, kl      d                     unbiased, high variance, may be negative
k2, mse     d^2 / 2               biased, low variance; its gradient is that of the reverse KL
k3          exp(-d) - 1 + d       unbiased, never negative
abs         |d|
k1+ k3+     that of k1, k3        straight-through: the gradient is k2's, that of the reverse KL (``abs+``, too)
full        sum_v pi d            exact; needs the log-probs of the whole vocabulary, (B, L, V)
==========  ====================  =========================================================================

Source: J. Schulman, "Approximating KL divergence" (2020).  ``importance_weighted`` multiplies the estimate by
pi / pi_old with its gradient, which makes value and gradient unbiased when the tokens were sampled by pi_old
(DeepSeek-V3.2 report, section 3.1).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KLOptions:
    """Estimator of a divergence, and its clamps."""

    estimator: str = "k3"
    """One of :data:`~roll.config.algorithm.KL_PENALTIES`, or the dotted path of a function (YAML: ``kl_penalty`` for
    the reward, ``kl_loss_type`` for the loss)."""
    log_ratio_clamp: float | None = 20.0
    """The log-ratio enters k3 within +- this bound: exp overflows float32 at 88; null for none."""
    value_clamp: float | None = 10.0
    """k3's value stays within +- this bound, as in published implementations. A k3 of exactly 10 (from a log-ratio
    of -2.6 on; at -5 it would be 142) is the clamp's, and its gradient is 0; null for none."""
    importance_weighted: bool = False
    """Multiply by pi / pi_old (needs ``log_ratio_to_old``)."""


Estimator = Callable[[Tensor, Tensor, KLOptions], Tensor]
"""``(log_probs, ref_log_probs, options) -> estimate``, all float (B, L)."""

kl_estimators: Registry[Estimator] = Registry("KL estimator")
register_kl = kl_estimators.register
"""Decorator ``(name, aliases=())``: make an estimator selectable as ``kl_loss_type: name`` and ``kl_penalty: name``."""


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions = KLOptions(), log_ratio_to_old: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats.

    Args:
        log_probs, ref_log_probs: float (B, L).
        options: estimator and clamps.
        log_ratio_to_old: float (B, L), log pi - log pi_old, for ``importance_weighted``.

    Returns:
        float (B, L).

    Raises:
        ValueError: for an unknown estimator, or a weighted estimate without ``log_ratio_to_old``.
    """
    estimate = kl_estimators.resolve(options.estimator)(log_probs, ref_log_probs, options)
    if options.importance_weighted:
        if log_ratio_to_old is None:
            raise ValueError("an importance-weighted KL estimate needs log_ratio_to_old")
        estimate = log_ratio_to_old.exp() * estimate
    return estimate


@register_kl("k1", aliases=("kl",))
def k1(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
    """d."""
    return log_probs - ref_log_probs


@register_kl("k2", aliases=("mse",))
def k2(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
    """|d|."""
    return (log_probs - ref_log_probs).abs()


@register_kl("k3", aliases=("low_var_kl",))
def k3(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
    """exp(-d) - 1 + d, with the clamps of the options."""
    difference = log_probs - ref_log_probs
    if options.log_ratio_clamp is not None:
        difference = difference.clamp(-options.log_ratio_clamp, options.log_ratio_clamp)
    # expm1 keeps the small values: exp(x) - 1 loses all digits of a k3 below 1e-7 in float32.
    value = torch.expm1(-difference) + difference
    return value if options.value_clamp is None else value.clamp(max=options.value_clamp)


def _straight_through(estimator: Estimator) -> Estimator:
    """The estimator's value with k2's gradient, which is that of KL(pi || ref)."""

    def straight_through(log_probs: Tensor, ref_log_probs: Tensor, options: KLOptions) -> Tensor:
        value, gradient = estimator(log_probs, ref_log_probs, options), k2(log_probs, ref_log_probs, options)
        return value.detach() + (gradient - gradient.detach())

    return straight_through


kl_estimators.add(_straight_through(k1), "k1+", ("kl+",))
kl_estimators.add(_straight_through(absolute), "abs+")
kl_estimators.add(_straight_through(k3), "k3+", ("low_var_kl+",))


def finite_mean(values: Tensor, rows: Tensor) -> tuple[float, int]:
    """Mean of the finite ``values`` (N,) of ``rows`` (bool (N,)), and their number; (NaN, 0) where there are none."""
    finite = values[rows & values.isfinite()]
    return float(finite.mean()), len(finite)


@dataclass
class Controller:
    """A coefficient that follows a statistic of each step. Without a finite statistic (every response masked, say) a
    step does not change it: a single NaN would stay for the rest of the run, and in its checkpoints."""

    value: float

    def update(self, statistic: float, count: int) -> None:
        """Follow the mean ``statistic`` of ``count`` rows or tokens (:func:`finite_mean`)."""
        if count > 0 and math.isfinite(statistic):
            self._move(statistic, count)

    def _move(self, statistic: float, count: int) -> None:
        """Hook of the adaptive controllers; here the coefficient is constant."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])


class FixedKLController(Controller):
    """A constant coefficient."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the configured constant, as with a learning rate; log where the checkpoint has another one."""
        if float(state["value"]) != self.value:
            logger.warning("the KL coefficient is %g from here on; before it was %g", self.value, state["value"])


@dataclass
class AdaptiveKLController(Controller):
    """Proportional controller of Ziegler et al., "Fine-tuning language models from human preferences" (1909.08593).

    value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    A batch beyond the horizon counts as the horizon: the coefficient keeps its sign.
    """

    target: float
    horizon: float

    def _move(self, statistic: float, count: int) -> None:
        # Clipped as in the paper (section 2.2): one step with a large divergence moves the coefficient by 20% at most.
        error = min(max(statistic / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(count / self.horizon, 1.0)


# Change of the weight in a step, Skywork-OR1's own.
ENTROPY_DELTA = 0.005


@dataclass
class EntropyController(Controller):
    """Adaptive weight of the entropy bonus: none above a target entropy, growing step by step below it.

    At step k with entropy e the weight is c_k where e <= target, else 0; c_{k+1} is c_k + delta where e < target and
    c_k - delta where e > target, at least 0.  Source: Skywork-OR1 (arXiv 2505.22312) section 3.
    """

    target: float

    def step(self, entropy: float, num_tokens: int) -> float:
        """The weight for a batch of the mean ``entropy`` (nats a token, before the update); moves on to the next."""
        # The weight of this step is fixed before the update: c_k of the paper goes with the entropy of step k.
        weight = self.value if entropy <= self.target else 0.0
        self.update(entropy, num_tokens)
        return weight

    def _move(self, statistic: float, count: int) -> None:
        change = ENTROPY_DELTA * ((statistic < self.target) - (statistic > self.target))
        self.value = max(self.value + change, 0.0)


def make_kl_controller(init_kl_coef: float, target_kl: float | None, kl_horizon: float) -> Controller:
    """Adaptive where ``target_kl`` is given, else fixed."""
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)
