"""Policy losses that act on the few tokens whose covariance of log-prob and advantage drives the entropy down.

Source: "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv 2505.22617), eq. 10-13.
Which tokens are chosen depends on the micro-batch that they stand in, so these two losses, alone in the family, are not
invariant to how a batch is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.loss_types import LossInputs
from roll.algorithms.masked import masked_mean
from roll.algorithms.metric_builder import MetricBuilder
from roll.algorithms.options import ClipCovOptions, KLCovOptions
from roll.algorithms.policy_losses import ppo
from roll.algorithms.policy_registry import register_policy_loss


@torch.no_grad()
def token_covariance(inputs: LossInputs) -> Tensor:
    """(log pi - mean log pi) (A - mean A) over the masked tokens: float (B, L), 0 outside the mask."""
    log_probs = inputs.log_probs - masked_mean(inputs.log_probs, inputs.mask)
    advantages = inputs.advantages - masked_mean(inputs.advantages, inputs.mask)
    return torch.where(inputs.mask, log_probs * advantages, 0.0)


@register_policy_loss("clip_cov", options=ClipCovOptions, aliases=("clip-cov",))
def clip_cov(inputs: LossInputs, options: ClipCovOptions, metrics: MetricBuilder) -> Tensor:
    """PPO's clip, and no gradient for a random share of the tokens whose covariance lies in (low, high).

    Tokens that PPO's clip leaves without gradient are not drawn.
    """
    covariance = token_covariance(inputs)
    in_range = (covariance > options.clip_cov_low) & (covariance < options.clip_cov_high)
    eligible = inputs.mask & in_range & ~_clipped_by_ppo(inputs, options)
    candidates = eligible.flatten().nonzero().squeeze(-1)
    wanted = max(int(options.clip_cov_ratio * int(inputs.num_tokens)), 1)
    chosen = candidates[torch.randperm(len(candidates), device=candidates.device)[:wanted]]
    keep = torch.ones(inputs.mask.numel(), device=inputs.mask.device).index_fill(0, chosen, 0.0)
    metrics.mean("actor/cov_clipfrac", float(len(chosen)), inputs.num_tokens)
    return ppo(inputs, options, metrics) * keep.view_as(inputs.mask)


def _clipped_by_ppo(inputs: LossInputs, options: ClipCovOptions) -> Tensor:
    """bool (B, L): the clipped surrogate is the smaller one."""
    clipped = inputs.ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return clipped * inputs.advantages < inputs.ratio * inputs.advantages


@register_policy_loss("kl_cov", options=KLCovOptions, aliases=("kl-cov",))
def kl_cov(inputs: LossInputs, options: KLCovOptions, metrics: MetricBuilder) -> Tensor:
    """-r A, plus coef |log r| on the tokens of highest covariance."""
    covariance = token_covariance(inputs).masked_fill(~inputs.mask, -torch.inf).flatten()
    count = int(inputs.num_tokens)
    wanted = min(max(int(options.kl_cov_ratio * count), 1), count)
    chosen = covariance.topk(wanted).indices
    penalised = torch.zeros_like(covariance).index_fill(0, chosen, options.kl_cov_coef).view_as(inputs.mask)
    metrics.mean("actor/kl_cov_frac", float(wanted), inputs.num_tokens)
    return -inputs.log_ratio.exp() * inputs.advantages + penalised * inputs.log_ratio.abs()
