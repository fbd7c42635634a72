"""A policy small enough that expectations are sums: exact gradients, and exact biases and variances of estimators.

Responses have T tokens out of V; the logits of a token depend on its position and on the token before it.  All V^T
responses are enumerated.  The expectation of an estimator over groups of n responses is the sum over all V^(T n)
groups, weighted by their probability under the policy that sampled: no Monte Carlo, no confidence bounds.

``python -m tests.algorithms.tabular`` prints the table of biases in the documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from roll.algorithms.actor_loss import actor_loss, actor_loss_options
from roll.algorithms.advantages import AdvantageInputs, AdvantageOptions, estimate_advantages, resolve_norm_types
from roll.algorithms.aggregation import LossDenominators
from roll.algorithms.correction_options import CORRECTION_PRESETS
from roll.algorithms.loss_types import LossInputs
from roll.algorithms.reward_processing import RewardOptions, RewardPostprocessor, token_level_rewards

VOCABULARY, LENGTH = 3, 3


class TabularPolicy:
    """Logits (T, V, V) by position and previous token; the token before the first is 0."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.theta = torch.randn(length, vocabulary, vocabulary, dtype=torch.float64, generator=generator)
        self.theta.requires_grad_()
        self.responses = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
        self.rewards = torch.randn(len(self.responses), dtype=torch.float64, generator=generator)

    def log_probs(self, theta: Tensor | None = None) -> Tensor:
        """Token log-probs of every response: (V^T, T)."""
        table = (self.theta if theta is None else theta).log_softmax(-1)
        previous = torch.nn.functional.pad(self.responses[:, :-1], (1, 0))
        return table[torch.arange(self.length), previous, self.responses]

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.theta, retain_graph=True)[0]

    def exact_gradient(self, rewards: Tensor | None = None) -> Tensor:
        """Gradient of the expected reward."""
        rewards = self.rewards if rewards is None else rewards
        return self.gradient((self.log_probs().sum(-1).exp() * rewards).sum())

    def perturbed(self, scale: float, seed: int = 1) -> Tensor:
        """Parameters of an engine that differs from the trainer."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.theta.shape, dtype=torch.float64, generator=generator)
        return (self.theta + scale * noise).detach()

    def exact_values(self) -> Tensor:
        """Expected reward before each token, given the tokens so far: (V^T, T)."""
        probabilities = self.log_probs().sum(-1).exp().detach()
        values = torch.empty(len(self.responses), self.length, dtype=torch.float64)
        for t in range(self.length):
            same = (self.responses[:, None, :t] == self.responses[None, :, :t]).all(-1).double()
            values[:, t] = same @ (probabilities * self.rewards) / (same @ probabilities)
        return values


def expected_gradient(
    policy: TabularPolicy, advantages: Tensor, probability: Tensor, rows: Tensor, settings: dict
) -> Tensor:
    """-gradient of the actor's loss, summed over ``rows`` (indices of responses) weighted by ``probability``."""
    inputs = LossInputs(
        policy.log_probs()[rows], advantages, torch.ones_like(advantages, dtype=torch.bool), sample_weights=probability
    )
    options = actor_loss_options({"loss_agg_mode": "seq-mean-token-sum", "pg_variant": "vanilla", **settings})
    return -policy.gradient(actor_loss(inputs, options, LossDenominators(1.0, 1.0)).loss)


def expected_group_gradient(
    policy: TabularPolicy, estimator: str, group_size: int, norm: tuple[str | None, str | None] = ("auto", "auto")
) -> Tensor:
    """Exact expectation of the on-policy gradient with groups of ``group_size``."""
    count = len(policy.responses)
    groups = torch.tensor(list(itertools.product(range(count), repeat=group_size)))
    rows = groups.flatten()
    probability = policy.log_probs().sum(-1).exp().detach()[groups].prod(-1)
    group_ids = torch.arange(len(groups)).repeat_interleave(group_size)
    normalise = RewardPostprocessor(RewardOptions(*resolve_norm_types(estimator, *norm)))
    rewards, _ = normalise(policy.rewards[rows], group_ids)
    mask = torch.ones(len(rows), policy.length, dtype=torch.bool)
    inputs = AdvantageInputs(token_level_rewards(rewards, mask), mask, group_ids)
    advantages = estimate_advantages(inputs, AdvantageOptions(estimator)).advantages.double()
    weights = probability.repeat_interleave(group_size) / group_size
    return expected_gradient(policy, advantages, weights, rows, {})


def corrected_gradients(policy: TabularPolicy, engine: Tensor, correction: object) -> tuple[Tensor, Tensor]:
    """Gradient of each response sampled by the engine, corrected, and its probability: (V^T, ...), (V^T,)."""
    rollout = policy.log_probs(engine).detach()
    mask = torch.ones(1, policy.length, dtype=torch.bool)
    options = actor_loss_options(
        {"loss_agg_mode": "seq-mean-token-sum", "pg_variant": "vanilla", "train_infer_correction": correction}
    )
    baseline = (policy.log_probs().sum(-1).exp() * policy.rewards).sum().detach()
    gradients = []
    for i in range(len(policy.responses)):
        advantages = (policy.rewards[i] - baseline).expand(1, policy.length)
        inputs = LossInputs(policy.log_probs()[i : i + 1], advantages, mask, rollout_log_probs=rollout[i : i + 1])
        gradients.append(-policy.gradient(actor_loss(inputs, options, LossDenominators(1.0, 1.0)).loss))
    return torch.stack(gradients), rollout.sum(-1).exp()


def bias_and_deviation(gradients: Tensor, probability: Tensor, exact: Tensor) -> tuple[float, float]:
    """Norm of the bias and standard deviation of one sample, both relative to the norm of the exact gradient."""
    weights = probability.view(-1, 1, 1, 1)
    mean = (weights * gradients).sum(0)
    variance = (weights * (gradients - mean).square()).sum()
    return float((mean - exact).norm() / exact.norm()), float(variance.sqrt() / exact.norm())


def relative_bias(policy: TabularPolicy, gradient: Tensor) -> tuple[float, float]:
    """(length, angle as 1 - cosine) of an expected gradient against the exact one."""
    exact = policy.exact_gradient()
    cosine = (gradient * exact).sum() / (gradient.norm() * exact.norm())
    return float(gradient.norm() / exact.norm()), float(1 - cosine)


CORRECTIONS: dict[str, object] = {
    "none": None,
    "sequence ratio, no bound": [{"level": "sequence", "action": "truncate"}],
    **{name: name for name in CORRECTION_PRESETS},
}


def _print_tables(write: Callable[[str], object]) -> None:
    policy = TabularPolicy(0)
    write("estimator (groups of 2)        length   1 - cosine")
    for name in ("reinforce", "rloo", "grpo", "reinforce++_baseline", "opo"):
        length, angle = relative_bias(policy, expected_group_gradient(policy, name, 2))
        write(f"{name:30s} {length:6.3f}   {angle:.4f}")
    length, angle = relative_bias(policy, expected_group_gradient(policy, "grpo", 2, ("group", None)))
    write(f"{'grpo, no std':30s} {length:6.3f}   {angle:.4f}")
    write("correction (logits + 0.6 noise)   bias   deviation")
    engine, exact = policy.perturbed(0.6), policy.exact_gradient()
    for name, correction in CORRECTIONS.items():
        bias, deviation = bias_and_deviation(*corrected_gradients(policy, engine, correction), exact)
        write(f"{name:30s} {bias:8.4f} {deviation:8.3f}")


if __name__ == "__main__":
    _print_tables(print)
