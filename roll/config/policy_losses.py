"""Options of single policy losses (``pg_variant``); the functions are in :mod:`roll.algorithms.policy_losses`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.config.fields import setting


@dataclass(frozen=True)
class PolicyLossConfig:
    """Keys at the top of an RLVR configuration that belong to one ``pg_variant`` each."""

    tis_lower_bound: float = setting(0.0, ge=0)
    """``tis``: least weight."""
    tis_upper_bound: float = setting(1.0, gt=0)
    """``tis``: greatest weight."""
    cispo_epsilon_low: float = setting(0.1, ge=0)
    """``cispo``: weights are clipped at 1 - this from below."""
    cispo_epsilon_high: float = setting(0.1, ge=0)
    """``cispo``: weights are clipped at 1 + this from above."""
    cispo_unified_mask: bool = False
    """``cispo``: drop the tokens that PPO's clip would drop, and weigh the others by their ratio, instead of clipping
    the weight."""
    m2po_threshold: float = setting(0.04, gt=0)
    """``m2po``: greatest mean squared log-ratio of the tokens that stay; those of the largest are dropped."""
    m2po_all_tokens: bool = False
    """``m2po``: bound and drop all tokens, not only those whose update leads further from the policy that sampled."""
    vespo_k_pos: float = setting(2.0, ge=0)
    """``vespo``: how fast weights below 1 fall, for positive advantages."""
    vespo_lambda_pos: float = setting(3.0, ge=0)
    """``vespo``: how fast weights above 1 fall, for positive advantages."""
    vespo_k_neg: float = setting(3.0, ge=0)
    """``vespo``: how fast weights below 1 fall, for negative advantages."""
    vespo_lambda_neg: float = setting(2.0, ge=0)
    """``vespo``: how fast weights above 1 fall, for negative advantages."""
    topr_positive_weight: float = setting(1.0, ge=0)
    """``topr``: weight of samples with positive reward."""
    topr_negative_weight: float = setting(1.0, ge=0)
    """``topr``: weight of samples with negative reward."""
    topr_lower_bound: float = setting(0.0, ge=0)
    """``topr``: least importance weight of negative samples."""
    topr_upper_bound: float = setting(1.0, gt=0)
    """``topr``: greatest importance weight of negative samples."""
    kimi15_tau: float = setting(0.1, ge=0)
    """``kimi15``: weight of the squared log-ratio."""
    sapo_tau_pos: float = setting(1.0, gt=0)
    """``sapo``: temperature of the gate for positive advantages."""
    sapo_tau_neg: float = setting(1.05, gt=0)
    """``sapo``: temperature of the gate for negative advantages."""
    gmpo_clip_low: float = setting(0.4, ge=0)
    """``gmpo``: a token's ratio is at least exp(-this)."""
    gmpo_clip_high: float = setting(0.4, ge=0)
    """``gmpo``: a token's ratio is at most exp(this)."""
    dro_tau: float = setting(0.1, gt=0)
    """``dro``: strength of the regularisation."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """``dppo``: total variation or KL of the sampled token's probability."""
    dppo_threshold: float = setting(0.15, gt=0)
    """``dppo``: tokens beyond it lose their gradient where the update would lead further away."""
    dppo_ratio_bound: float = setting(20.0, gt=0)
    """``dppo``: the weight is truncated here."""
    clip_cov_ratio: float = setting(2e-4, ge=0, le=1)
    """``clip_cov``: share of tokens that lose their gradient."""
    clip_cov_low: float = 1.0
    """``clip_cov``: least covariance of these tokens."""
    clip_cov_high: float = 5.0
    """``clip_cov``: greatest covariance of these tokens."""
    kl_cov_ratio: float = setting(2e-3, ge=0, le=1)
    """``kl_cov``: share of tokens that get the KL penalty."""
    kl_cov_coef: float = setting(1.0, ge=0)
    """``kl_cov``: weight of that penalty."""
