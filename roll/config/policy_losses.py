"""Policy losses by name, each with the dataclass of its options: ``loss: {name: vespo, k_pos: 2}``. Torch-free.

A new policy loss is a row of :data:`POLICY_LOSSES`, a dataclass of its options and a function in
:mod:`roll.algorithms.policy_losses`, which is given the dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.config.reading.fields import Named, Table, setting


@dataclass(frozen=True)
class NoOptions:
    """Options of a loss or an estimator that has none."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """PPO's clip range."""

    clip: float = setting(0.2, ge=0)
    """Clip range of the probability ratio, on both sides."""
    clip_low: float | None = setting(None, ge=0, le=1)
    """Ratios are clipped at 1 - this from below; null: ``clip``."""
    clip_high: float | None = setting(None, ge=0)
    """Ratios are clipped at 1 + this from above; null: ``clip``."""


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """PPO's clip range, with a bound for negative advantages."""

    dual_clip: bool | float = setting(False, gt=1)
    """Bound of the ratio for negative advantages (3.0 in the paper); true: 1 + 2 x ``clip``; false: none."""


@dataclass(frozen=True, kw_only=True)
class PpoOptions(DualClipOptions):
    importance_sampling: Literal["token", "segment", "seq"] = "token"
    """Level of the probability ratio: of each token, each turn (``segment``) or each response (``seq``, as in GSPO)."""


@dataclass(frozen=True, kw_only=True)
class TisOptions:
    lower_bound: float = setting(0.0, ge=0)
    """Least weight."""
    upper_bound: float = setting(1.0, gt=0)
    """Greatest weight."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions:
    epsilon_low: float = setting(0.1, ge=0)
    """Weights are clipped at 1 - this from below."""
    epsilon_high: float = setting(0.1, ge=0)
    """Weights are clipped at 1 + this from above."""
    unified_mask: bool = setting(False, aliases=("use_unified_mask",))
    """Drop the tokens that PPO's clip would drop, too."""


@dataclass(frozen=True, kw_only=True)
class M2poOptions:
    threshold: float = setting(0.04, gt=0)
    """Greatest mean squared log-ratio of the tokens that stay; those of the largest are dropped."""


@dataclass(frozen=True, kw_only=True)
class VespoOptions:
    k_pos: float = setting(2.0, ge=0)
    """Exponent of weights: how fast those below 1 fall, for positive advantages."""
    lambda_pos: float = setting(3.0, ge=0)
    """Rate at which weights above 1 fall, for positive advantages."""
    k_neg: float = setting(3.0, ge=0)
    """Exponent of weights: how fast those below 1 fall, for negative advantages."""
    lambda_neg: float = setting(2.0, ge=0)
    """Rate at which weights above 1 fall, for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class ToprOptions:
    positive_weight: float = setting(1.0, ge=0)
    """Weight of samples with positive reward."""
    negative_weight: float = setting(1.0, ge=0)
    """Weight of samples with negative reward."""
    lower_bound: float = setting(0.0, ge=0)
    """Least importance weight of negative samples."""
    upper_bound: float = setting(1.0, gt=0)
    """Greatest importance weight of negative samples."""


@dataclass(frozen=True, kw_only=True)
class Kimi15Options:
    tau: float = setting(0.1, ge=0)
    """Weight of the squared log-ratio."""


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    tau_pos: float = setting(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_neg: float = setting(1.05, gt=0)
    """Temperature of the gate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class GmpoOptions:
    clip_low: float = setting(0.4, ge=0)
    """A token's ratio is at least exp(-this)."""
    clip_high: float = setting(0.4, ge=0)
    """A token's ratio is at most exp(this)."""


@dataclass(frozen=True, kw_only=True)
class DroOptions:
    tau: float = setting(0.1, gt=0)
    """Strength of the regularisation."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions:
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL of the sampled token's probability."""
    threshold: float = setting(0.15, gt=0)
    """Tokens beyond it lose their gradient where the update would lead further away."""
    ratio_bound: float = setting(20.0, gt=0)
    """The weight is truncated here."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(PpoOptions):
    ratio: float = setting(2e-4, ge=0, le=1)
    """Share of tokens that lose their gradient."""
    low: float = 1.0
    """Least covariance of these tokens."""
    high: float = 5.0
    """Greatest covariance of these tokens."""


@dataclass(frozen=True, kw_only=True)
class KlCovOptions:
    ratio: float = setting(2e-3, ge=0, le=1)
    """Share of tokens that get the KL penalty."""
    coef: float = setting(1.0, ge=0)
    """Weight of that penalty."""


@dataclass(frozen=True)
class PolicyLoss(Named):
    """A policy loss, ``loss``."""

    options: type | None = None  # dataclass of its options; None for a user's own loss, whose function declares them


POLICY_LOSSES = Table(
    "loss",
    PolicyLoss("ppo", options=PpoOptions),
    PolicyLoss("vanilla", options=NoOptions),
    PolicyLoss("gspo", options=DualClipOptions),
    PolicyLoss("gspo_token", ("gspo-token",), options=DualClipOptions),
    PolicyLoss("tis", options=TisOptions),
    PolicyLoss("cispo", options=CispoOptions),
    PolicyLoss("m2po", options=M2poOptions),
    PolicyLoss("vespo", options=VespoOptions),
    PolicyLoss("topr", options=ToprOptions),
    PolicyLoss("raft++", ("raft_plus_plus", "raftpp"), options=ClipOptions),
    PolicyLoss("kimi15", options=Kimi15Options),
    PolicyLoss("sapo", options=SapoOptions),
    PolicyLoss("gmpo", options=GmpoOptions),
    PolicyLoss("dro", options=DroOptions),
    PolicyLoss("dppo", options=DppoOptions),
    PolicyLoss("clip_cov", ("clip-cov",), options=ClipCovOptions),
    PolicyLoss("kl_cov", ("kl-cov",), options=KlCovOptions),
)
