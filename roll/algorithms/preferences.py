"""Losses on pairs of responses, of which one is preferred, and on single responses with a label.

All are functions of the same few numbers of a pair: the summed log-probs of both responses under the policy and the
reference, and their lengths.  y_w is the chosen, y_l the rejected response, r(y) = log pi(y) - log ref(y).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms.registry import Registry
from roll.config.losses import PREFERENCE_LOSSES, PreferenceLossConfig, loss_names, weighted_losses
from roll.protocol.metrics import Mean, Metrics


@dataclass(frozen=True)
class PairSums:
    """P pairs as numbers; every field is (P, 2), the chosen response first. Losses are written in its properties."""

    policy: Tensor
    """Summed log-probs under the policy, with gradient."""
    reference: Tensor | None
    """The same under the reference; None: no loss needs it."""
    lengths: Tensor
    """Tokens of the responses, as floats."""

    @cached_property
    def ratios(self) -> Tensor:
        """(P, 2): log-ratios r(y)."""
        assert self.reference is not None, "the plan computes a reference for the losses that need one"
        return self.policy - self.reference

    @cached_property
    def lead(self) -> Tensor:
        """(P,): log-ratio of the chosen response minus that of the rejected one."""
        return self.ratios[:, 0] - self.ratios[:, 1]

    @cached_property
    def mean_lead(self) -> Tensor:
        """(P,): the same, each log-ratio divided by the length of its response."""
        means = self.ratios / self.lengths.clamp(min=1)
        return means[:, 0] - means[:, 1]

    @cached_property
    def means(self) -> Tensor:
        """(P, 2): mean log-prob of a token under the policy."""
        return self.policy / self.lengths.clamp(min=1)


def pair_sums(log_probs: Tensor, mask: Tensor, reference: Tensor | None) -> PairSums:
    """Add up the tokens of adjacent rows, chosen and rejected in turn.

    Args:
        log_probs: (2P, L), with gradient; 0 outside ``mask``.
        mask: bool (2P, L), tokens of the responses.
        reference: (2P, L), likewise.
    """
    lengths = mask.sum(1).view(-1, 2)
    return PairSums(
        policy=(log_probs * mask).sum(1).view(-1, 2),
        reference=None if reference is None else (reference * mask).sum(1).view(-1, 2),
        lengths=lengths.to(log_probs.dtype),
    )


PairLoss = Callable[[PairSums, PreferenceLossConfig], Tensor]
pair_losses: Registry[PairLoss] = Registry("loss_type", PREFERENCE_LOSSES)
register = pair_losses.register


@register("sigmoid")
def sigmoid(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7); smoothed: cDPO (E. Mitchell, "A note on DPO with noisy preferences", eq. 3)."""
    return _smoothed(options.beta * pairs.lead, options.label_smoothing)


@register("robust")
def robust(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """Robust DPO (arXiv 2403.00409, eq. 12): unbiased for the loss without swapped labels."""
    lead, share = options.beta * pairs.lead, options.label_smoothing
    return ((share - 1) * F.logsigmoid(lead) + share * F.logsigmoid(-lead)) / (1 - 2 * share)


@register("hinge")
def hinge(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """SLiC-HF's ranking loss on log-ratios (arXiv 2305.10425; RSO, arXiv 2309.06657, eq. 11)."""
    return torch.relu(1 - options.beta * pairs.lead)


@register("ipo")
def ipo(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """IPO (arXiv 2310.12036, eq. 17)."""
    return (pairs.mean_lead - 1 / (2 * options.beta)) ** 2


@register("exo_pair")
def exo_pair(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """EXO on preferences (arXiv 2402.00856, eq. 16): the reverse KL of two distributions over the responses."""
    lead, share = options.beta * pairs.lead, options.label_smoothing
    chosen, rejected = F.logsigmoid(lead), F.logsigmoid(-lead)
    return chosen.exp() * (chosen - math.log1p(-share)) + rejected.exp() * (rejected - math.log(share))


@register("sigmoid_norm")
def sigmoid_norm(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """DPO on log-ratios per token (Tulu 3, arXiv 2411.15124, eq. 6)."""
    return -F.logsigmoid(options.beta * pairs.mean_lead)


@register("nca_pair")
def nca_pair(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """NCA on pairs (arXiv 2402.05369, eq. 12)."""
    chosen, rejected = (options.beta * pairs.ratios).unbind(1)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


@register("bco_pair")
def bco_pair(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """Binary classifier optimisation on pairs (arXiv 2404.04656, eq. 8), with no shift of the rewards."""
    chosen, rejected = (options.beta * pairs.ratios).unbind(1)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@register("sppo_hard")
def sppo_hard(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """SPPO with probabilities 1 and 0 (arXiv 2405.00675, eq. 4.7)."""
    chosen, rejected = pairs.ratios.unbind(1)
    return (chosen - 0.5 / options.beta) ** 2 + (rejected + 0.5 / options.beta) ** 2


@register("apo_zero")
def apo_zero(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """APO-zero (arXiv 2408.06266, eq. 7): chosen responses become more probable, rejected ones less."""
    chosen, rejected = (options.beta * pairs.ratios).unbind(1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


@register("apo_down")
def apo_down(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """APO-down (arXiv 2408.06266, eq. 8): both become less probable, rejected ones more so."""
    chosen, rejected = (options.beta * pairs.ratios).unbind(1)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


@register("aot")
def aot(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """AOT on pairs (arXiv 2406.05882, alg. 1): the sorted leads of the policy against the sorted leads of the
    reference, over all pairs of the optimizer step."""
    policy, reference = pairs.policy, pairs.reference
    assert reference is not None
    # Sorted apart: the coupling of pairs is one of distributions, not of the pairs themselves.
    leads, bounds = (torch.sort(sums[:, 0] - sums[:, 1]).values for sums in (policy, reference))
    return _smoothed(options.beta * (leads - bounds), options.label_smoothing)


@register("aot_unpaired")
def aot_unpaired(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """AOT on unpaired responses (arXiv 2406.05882, alg. 1): the sorted log-ratios of the chosen against those of the
    rejected responses."""
    chosen, rejected = torch.sort(pairs.ratios, dim=0).values.unbind(1)
    return _smoothed(options.beta * (chosen - rejected), options.label_smoothing)


@register("simpo")
def simpo(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """SimPO (arXiv 2405.14734, eq. 6)."""
    lead = pairs.means[:, 0] - pairs.means[:, 1]
    return _smoothed(options.beta * lead - options.simpo_gamma, options.label_smoothing)


@register("orpo")
def orpo(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """ORPO (arXiv 2403.07691, eq. 6), weight ``beta``: likelihood of the chosen response, and the log odds ratio."""
    # A mean log-prob of 0 (a certain response) would have infinite odds.
    odds = pairs.means - torch.log(-torch.expm1(pairs.means.clamp(max=-1e-7)))
    return -pairs.means[:, 0] - options.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


@register("sft")
def sft(pairs: PairSums, options: PreferenceLossConfig) -> Tensor:
    """Mean negative log-likelihood of the chosen response's tokens (the NLL term of RPO, arXiv 2404.19733, eq. 1)."""
    return -pairs.means[:, 0]


def _smoothed(lead: Tensor, share: float) -> Tensor:
    return (share - 1) * F.logsigmoid(lead) - share * F.logsigmoid(-lead)


def preference_loss(sums: PairSums, options: PreferenceLossConfig) -> Tensor:
    """The loss of each pair, (P,)."""
    parts = [weight * pair_losses.resolve(name)(sums, options) for name, weight in weighted_losses(options)]
    return torch.stack(parts).sum(0)


def slopes(sums: PairSums, options: PreferenceLossConfig) -> tuple[Tensor, Tensor]:
    """The mean loss and its derivative by each policy sum, (P, 2): a loss that couples pairs becomes a weighted sum of
    log-probs, which any split into micro-batches adds up to the same gradient."""
    # A leaf of its own: the derivative by the sums is all that is needed, no graph of the model is kept.
    policy = sums.policy.detach().requires_grad_()
    loss = preference_loss(PairSums(policy, sums.reference, sums.lengths), options).mean()
    (slope,) = torch.autograd.grad(loss, policy)
    return loss.detach(), slope


def preference_metrics(sums: PairSums, options: PreferenceLossConfig, losses: Tensor | None, prefix: str) -> Metrics:
    """Numbers about P pairs, to be merged over micro-batches and ranks.

    Args:
        losses: (P,); None: known elsewhere.
    """
    # The implicit rewards; without a reference mean log-probs replace the log-ratios.
    rewards = options.beta * (sums.means if sums.reference is None else sums.ratios).detach()
    margin = rewards[:, 0] - rewards[:, 1]
    chosen, rejected = sums.policy.detach().unbind(1)
    count = len(margin)

    def mean(values: Tensor) -> Mean:
        return Mean(values.double().sum().item(), count)

    metrics: Metrics = {
        "acc": mean(margin > 0),
        "chosen_reward": mean(rewards[:, 0]),
        "reject_reward": mean(rewards[:, 1]),
        "margin": mean(margin),
        "chosen_log_prob": mean(chosen),
        "reject_log_prob": mean(rejected),
        "chosen_length": mean(sums.lengths[:, 0]),
        "reject_length": mean(sums.lengths[:, 1]),
    }
    if sums.reference is not None:
        metrics["chosen_log_ratio"] = mean(chosen - sums.reference[:, 0])
    if losses is not None:
        metrics["loss"] = mean(losses.detach())
    return {prefix + name: metric for name, metric in metrics.items()}


def unpaired_loss(ratios: Tensor, desirable: Tensor, kl: Tensor | None, options: PreferenceLossConfig) -> Tensor:
    """The loss of each of N single responses, (N,).

    ``kto`` (arXiv 2402.01306, eq. 8): lambda_D (1 - sigmoid(beta (r - z0))) of a desirable response,
    lambda_U (1 - sigmoid(beta (z0 - r))) of an undesirable one, where z0 is the KL divergence of policy from reference
    over the whole optimizer step, without gradient.  ``apo_zero_unpaired`` (arXiv 2408.06266, eq. 7): the same with
    z0 = 0.

    Args:
        ratios: (N,), r = log pi(y) - log ref(y), with gradient.
        desirable: bool (N,).
        kl: (N,), z0; None: 0.
    """
    assert loss_names(options)[0] in ("kto", "apo_zero_unpaired")
    lead = ratios if kl is None else ratios - kl
    # 1 - sigmoid(x) is sigmoid(-x), which keeps its digits where the sigmoid is near 1.
    side = torch.where(desirable, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(desirable, options.desirable_weight, options.undesirable_weight).to(ratios.dtype)
    return weights * torch.sigmoid(-options.beta * side * lead)


def unpaired_metrics(
    log_probs: Tensor, ratios: Tensor, desirable: Tensor, losses: Tensor, options: PreferenceLossConfig, prefix: str
) -> Metrics:
    """Numbers about N responses, to be merged over micro-batches and ranks. ``acc`` is the share whose implicit
    reward has the sign of the label."""
    rewards = options.beta * ratios.detach()
    metrics: Metrics = {
        "loss": Mean(losses.detach().double().sum().item(), len(losses)),
        "acc": Mean(((rewards > 0) == desirable).double().sum().item(), len(losses)),
    }
    for name, of_kind in (("chosen", desirable), ("reject", ~desirable)):
        count = int(of_kind.sum())
        for what, values in (("reward", rewards), ("log_prob", log_probs.detach())):
            if count:
                metrics[f"{name}_{what}"] = Mean(values[of_kind].double().sum().item(), count)
    return {prefix + name: metric for name, metric in metrics.items()}
