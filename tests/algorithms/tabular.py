"""A policy small enough that expectations are sums: exact gradients, and exact biases and variances of estimators.

Responses have T tokens out of V, or end earlier with an end token (ragged lengths); the logits of a token depend on its
position and on the token before it.  All R responses (V^T without an end token) are enumerated.  The expectation of an
estimator over groups of n responses is the sum over all R^n groups, weighted by their probability under the policy that
sampled: no Monte Carlo, no confidence bounds.  What an estimator takes over the whole batch (whitening, the number of
tokens) stands for a batch of many groups: its probability-weighted value.

``python -m tests.algorithms.tabular`` prints the tables of biases in the documentation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from roll.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOutputs,
    estimate_advantages,
)
from roll.algorithms.aggregation import LossDenominators, group_tokens_of
from roll.algorithms.losses import actor_loss
from roll.algorithms.policy_losses import LossInputs
from roll.algorithms.samples import RewardOptions, RewardPostprocessor, resolve_norm_types, token_level_rewards
from roll.config.algorithm import CORRECTION_PRESETS, LOSS_AGG_MODES
from roll.config.choices import traits
from roll.config.reading.fields import Choice
from tests.support.keys import algorithm, loss_options

VOCABULARY, LENGTH = 3, 3


class TabularPolicy:
    """Logits (T, V, V) by position and previous token; the token before the first is 0.

    With ``end``, a response is over after the first token of that id, which ``mask`` (R, T) still contains.
    """

    def __init__(self, seed: int, vocabulary: int = VOCABULARY, length: int = LENGTH, end: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.theta = torch.randn(length, vocabulary, vocabulary, dtype=torch.float64, generator=generator)
        self.theta.requires_grad_()
        self.responses = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
        self.mask = torch.ones_like(self.responses, dtype=torch.bool)
        if end is not None:
            over = (self.responses == end).cummax(-1).values
            self.mask[:, 1:] = ~over[:, :-1]
            # Of the rows that differ only after the end one stays: that of end tokens.
            once = (self.mask | (self.responses == end)).all(-1)
            self.responses, self.mask = self.responses[once], self.mask[once]
        self.rewards = torch.randn(len(self.responses), dtype=torch.float64, generator=generator)

    def log_probs(self, theta: Tensor | None = None) -> Tensor:
        """Token log-probs of every response, 0 outside the mask: (R, T)."""
        table = (self.theta if theta is None else theta).log_softmax(-1)
        previous = torch.nn.functional.pad(self.responses[:, :-1], (1, 0))
        return torch.where(self.mask, table[torch.arange(self.length), previous, self.responses], 0.0)

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
        """Expected reward before each token, given the tokens so far: (R, T)."""
        probabilities = self.log_probs().sum(-1).exp().detach()
        values = torch.empty(len(self.responses), self.length, dtype=torch.float64)
        for t in range(self.length):
            same = (self.responses[:, None, :t] == self.responses[None, :, :t]).all(-1).double()
            values[:, t] = same @ (probabilities * self.rewards) / (same @ probabilities)
        return values


def expected_gradient(
    policy: TabularPolicy,
    advantages: Tensor,
    probability: Tensor,
    rows: Tensor,
    settings: dict,
    group_size: int = 1,
) -> Tensor:
    """-gradient of the actor's loss, summed over ``rows`` (indices of responses) weighted by ``probability``.

    ``group_size`` adjacent rows are a group.
    """
    mask = policy.mask[rows]
    number = len(rows) // group_size
    group_ids = torch.arange(number).repeat_interleave(group_size)
    # Rows weigh by the probability of their group over its size, so a prompt's tokens are taken over the size, too; and
    # over the number of groups listed, which the mode divides by.
    group_tokens = group_tokens_of(mask, group_ids, number) / (group_size * number)
    inputs = LossInputs(policy.log_probs()[rows], advantages, mask, sample_weights=probability, group_ids=group_ids)
    options = loss_options({"loss_agg_mode": "seq-mean-token-sum", "pg_variant": "vanilla", **settings})
    tokens = float(probability @ mask.sum(-1).double())
    denominators = LossDenominators(tokens, 1.0, float(policy.length), group_tokens)
    return -policy.gradient(actor_loss(inputs, options, denominators).loss)


def expected_group_gradient(
    policy: TabularPolicy,
    estimator: str,
    group_size: int,
    norm: tuple[str | None, str | None] = ("auto", "auto"),
    loss_agg_mode: str = "seq-mean-token-sum",
) -> Tensor:
    """Exact expectation of the on-policy gradient with groups of ``group_size``."""
    count = len(policy.responses)
    groups = torch.tensor(list(itertools.product(range(count), repeat=group_size)))
    rows = groups.flatten()
    weights = policy.log_probs().sum(-1).exp().detach()[groups].prod(-1).repeat_interleave(group_size) / group_size
    outputs = group_advantages(policy, estimator, groups, norm)
    advantages = outputs.raw_advantages.double()
    if traits(Choice(estimator)).whitens:
        # Groups are not drawn here but listed, each once: the moments of a batch are those weighted by probability.
        share = torch.where(policy.mask[rows], weights.unsqueeze(-1), 0.0)
        share /= share.sum()
        advantages = advantages - (share * advantages).sum()
        advantages = advantages / (share * advantages.square()).sum().sqrt()
    return expected_gradient(policy, advantages, weights, rows, {"loss_agg_mode": loss_agg_mode}, group_size)


def group_advantages(
    policy: TabularPolicy, estimator: str, groups: Tensor, norm: tuple[str | None, str | None] = ("auto", "auto")
) -> AdvantageOutputs:
    """Advantages of a batch of groups, int64 (G, n) of indices of responses, as a step computes them: (G n, T)."""
    rows = groups.flatten()
    group_ids = torch.arange(len(groups)).repeat_interleave(groups.shape[1])
    normalise = RewardPostprocessor(RewardOptions(*resolve_norm_types(Choice(estimator), *norm)))
    rewards, _ = normalise(policy.rewards[rows], group_ids)
    mask = policy.mask[rows]
    inputs = AdvantageInputs(token_level_rewards(rewards, mask), mask, group_ids)
    return estimate_advantages(inputs, algorithm(adv_estimator=estimator))


def sampled_gradients(
    policy: TabularPolicy, sampler: Tensor, variant: str = "vanilla", correction: object = None
) -> tuple[Tensor, Tensor]:
    """Gradient of each response that parameters ``sampler`` may sample, and its probability: (R, ...), (R,).

    The sampler is an engine that differs from the trainer, whose mismatch is corrected; of other losses than the
    ``vanilla`` one the policy before the update. Advantages are rewards minus the exact expectation.
    """
    sampled = policy.log_probs(sampler).detach()
    settings = {"loss_agg_mode": "seq-mean-token-sum", "pg_variant": variant, "train_infer_correction": correction}
    options, column = loss_options(settings), "rollout_log_probs" if correction else "old_log_probs"
    log_probs = policy.log_probs()
    baseline = (log_probs.sum(-1).exp() * policy.rewards).sum().detach()
    gradients = []
    for i in range(len(policy.responses)):
        advantages = (policy.rewards[i] - baseline).expand(1, policy.length)
        row = slice(i, i + 1)
        inputs = LossInputs(log_probs[row], advantages, policy.mask[row], **{column: sampled[row]})
        gradients.append(-policy.gradient(actor_loss(inputs, options, LossDenominators(1.0, 1.0)).loss))
    return torch.stack(gradients), sampled.sum(-1).exp()


def expectation(gradients: Tensor, probability: Tensor) -> Tensor:
    return (probability.view(-1, 1, 1, 1) * gradients).sum(0)


def bias_and_deviation(gradients: Tensor, probability: Tensor, exact: Tensor) -> tuple[float, float]:
    """Norm of the bias and standard deviation of one sample, both relative to the norm of the exact gradient."""
    mean = expectation(gradients, probability)
    variance = (probability.view(-1, 1, 1, 1) * (gradients - mean).square()).sum()
    return float((mean - exact).norm() / exact.norm()), float(variance.sqrt() / exact.norm())


def relative_bias(policy: TabularPolicy, gradient: Tensor) -> tuple[float, float]:
    """(length, angle as 1 - cosine) of an expected gradient against the exact one."""
    exact = policy.exact_gradient()
    cosine = (gradient * exact).sum() / (gradient.norm() * exact.norm())
    return float(gradient.norm() / exact.norm()), float(1 - cosine)


CORRECTIONS: dict[str, object] = {
    "none": None,
    "sequence ratio without bound": [{"level": "sequence", "action": "truncate"}],
    **{f"`{name}`": name for name in CORRECTION_PRESETS},
}
VARIANTS = (
    *("vanilla", "ppo", "gspo", "gspo_token", "cispo", "tis", "topr", "raft++"),
    *("kimi15", "sapo", "gmpo", "dppo", "vespo"),
)
AUTO = ("auto", "auto")
GROUP_ESTIMATORS: dict[str, tuple[str, tuple[str | None, str | None]]] = {
    **{f"`{name}`": (name, AUTO) for name in ("reinforce", "rloo")},
    "`grpo` without std": ("grpo", ("group", None)),
    **{f"`{name}`": (name, AUTO) for name in ("opo", "reinforce++_baseline", "grpo")},
}
END_TOKEN = 2
Row = tuple[float, ...]


def estimator_table() -> dict[str, Row]:
    """Length and 1 - cosine of the expected gradient of groups of 2: responses of 3 tokens, then of 1 to 3."""
    equal, ragged = TabularPolicy(0), TabularPolicy(0, end=END_TOKEN)
    return {
        label: tuple(
            number
            for policy in (equal, ragged)
            for number in relative_bias(policy, expected_group_gradient(policy, name, 2, norm))
        )
        for label, (name, norm) in GROUP_ESTIMATORS.items()
    }


def aggregation_table() -> dict[str, Row]:
    """1 - cosine of the expected gradient of rloo, responses of 1 to 3 tokens, groups of 2, by loss_agg_mode."""
    policy = TabularPolicy(0, end=END_TOKEN)
    return {
        f"`{mode}`": relative_bias(policy, expected_group_gradient(policy, "rloo", 2, loss_agg_mode=mode))[1:]
        for mode in LOSS_AGG_MODES
    }


def correction_table() -> dict[str, Row]:
    """Relative bias and deviation under an engine whose logits differ by noise of 0.6."""
    policy = TabularPolicy(0)
    engine, exact = policy.perturbed(0.6), policy.exact_gradient()
    return {
        label: bias_and_deviation(*sampled_gradients(policy, engine, correction=correction), exact)
        for label, correction in CORRECTIONS.items()
    }


def variant_table() -> dict[str, Row]:
    """Length, 1 - cosine and deviation of the policy losses after an update that moved the logits by noise of 0.3."""
    policy = TabularPolicy(0)
    old, exact = policy.perturbed(0.3), policy.exact_gradient()
    rows: dict[str, Row] = {}
    for name in VARIANTS:
        gradients, probability = sampled_gradients(policy, old, name)
        direction = relative_bias(policy, expectation(gradients, probability))
        rows[f"`{name}`"] = (*direction, bias_and_deviation(gradients, probability, exact)[1])
    return rows


def markdown(rows: Mapping[str, Row]) -> list[str]:
    """The rows as they are in the documentation."""
    return [f"| {label} | {' | '.join(f'{abs(number):.3f}' for number in row)} |" for label, row in rows.items()]


TABLES = (estimator_table, aggregation_table, correction_table, variant_table)

if __name__ == "__main__":
    for table in TABLES:
        sys.stdout.write("\n".join([str(table.__doc__), *markdown(table()), "", ""]))
