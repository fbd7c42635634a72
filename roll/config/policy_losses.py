"""Policy losses by name, each with the dataclass of its options: ``loss: {name: vespo, k_pos: 2}``. Torch-free.

A new policy loss is a row of :data:`POLICY_LOSSES`, a dataclass of its options and a function in
:mod:`roll.algorithms.policy_losses`, which is given the dataclass. Options that several losses share, such as
``pg_clip``, are keys of :class:`roll.config.algorithm.PPOConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from roll.config.reading.fields import RULES, FlatName, Named, Table, setting


@dataclass(frozen=True)
class NoOptions:
    """Options of a loss that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class TisOptions:
    """Options of ``tis``."""

    lower_bound: float = setting(0.0, ge=0)
    """Least weight."""
    upper_bound: float = setting(1.0, gt=0)
    """Greatest weight."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions:
    """Options of ``cispo``."""

    epsilon_low: float = setting(0.1, ge=0)
    """Weights are clipped at 1 - this from below."""
    epsilon_high: float = setting(0.1, ge=0)
    """Weights are clipped at 1 + this from above."""
    unified_mask: bool = setting(False, aliases=("use_unified_mask",))
    """Drop the tokens that PPO's clip would drop, too."""


@dataclass(frozen=True, kw_only=True)
class M2poOptions:
    """Options of ``m2po``."""

    threshold: float = setting(0.04, gt=0)
    """Greatest mean squared log-ratio of the tokens that stay; those of the largest are dropped."""
    all_tokens: bool = False
    """Bound and drop all tokens, not only those whose update leads further from the policy that sampled."""


@dataclass(frozen=True, kw_only=True)
class VespoOptions:
    """Options of ``vespo``."""

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
    """Options of ``topr``."""

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
    """Options of ``kimi15``."""

    tau: float = setting(0.1, ge=0)
    """Weight of the squared log-ratio."""


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    """Options of ``sapo``."""

    tau_pos: float = setting(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_neg: float = setting(1.05, gt=0)
    """Temperature of the gate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class GmpoOptions:
    """Options of ``gmpo``."""

    clip_low: float = setting(0.4, ge=0)
    """A token's ratio is at least exp(-this)."""
    clip_high: float = setting(0.4, ge=0)
    """A token's ratio is at most exp(this)."""


@dataclass(frozen=True, kw_only=True)
class DroOptions:
    """Options of ``dro``."""

    tau: float = setting(0.1, gt=0)
    """Strength of the regularisation."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions:
    """Options of ``dppo``."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL of the sampled token's probability."""
    threshold: float = setting(0.15, gt=0)
    """Tokens beyond it lose their gradient where the update would lead further away."""
    ratio_bound: float = setting(20.0, gt=0)
    """The weight is truncated here."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions:
    """Options of ``clip_cov``."""

    ratio: float = setting(2e-4, ge=0, le=1)
    """Share of tokens that lose their gradient."""
    low: float = 1.0
    """Least covariance of these tokens."""
    high: float = 5.0
    """Greatest covariance of these tokens."""


@dataclass(frozen=True, kw_only=True)
class KlCovOptions:
    """Options of ``kl_cov``."""

    ratio: float = setting(2e-3, ge=0, le=1)
    """Share of tokens that get the KL penalty."""
    coef: float = setting(1.0, ge=0)
    """Weight of that penalty."""


@dataclass(frozen=True)
class PolicyLoss(Named):
    """A policy loss, ``loss``."""

    clips: bool = False
    """PPO's clipped surrogate, with a dual clip where asked."""
    options: type | None = None
    """Dataclass of its options; None for a user's own loss, whose function declares them."""


POLICY_LOSSES = Table(
    "loss",
    PolicyLoss("ppo", clips=True, options=NoOptions),
    PolicyLoss("vanilla", options=NoOptions),
    PolicyLoss("gspo", clips=True, options=NoOptions),
    PolicyLoss("gspo_token", ("gspo-token",), clips=True, options=NoOptions),
    PolicyLoss("tis", options=TisOptions),
    PolicyLoss("cispo", options=CispoOptions),
    PolicyLoss("m2po", options=M2poOptions),
    PolicyLoss("vespo", options=VespoOptions),
    PolicyLoss("topr", options=ToprOptions),
    PolicyLoss("raft++", ("raft_plus_plus", "raftpp"), options=NoOptions),
    PolicyLoss("kimi15", options=Kimi15Options),
    PolicyLoss("sapo", options=SapoOptions),
    PolicyLoss("gmpo", options=GmpoOptions),
    PolicyLoss("dro", options=DroOptions),
    PolicyLoss("dppo", options=DppoOptions),
    PolicyLoss("clip_cov", ("clip-cov",), clips=True, options=ClipCovOptions),
    PolicyLoss("kl_cov", ("kl-cov",), options=KlCovOptions),
)
CLIPPED = tuple(row.name for row in POLICY_LOSSES.rows if row.clips)


def _flat_names() -> dict[str, FlatName]:
    """ROLL's flat names and those of files written before ``loss`` was a section."""
    found: dict[str, FlatName] = {}
    for row in POLICY_LOSSES.rows:
        for item in fields(row.options or NoOptions):
            for name in (item.name, *(item.metadata[RULES].aliases if item.metadata else ())):
                found[f"{row.name}_{name}"] = FlatName(row.name, item.name)
    return found | {
        "pg_variant_args": FlatName(None, None),
        "actor_train.pg_variant": FlatName(None, "name"),
        "actor_train.topr_positive_weight": FlatName("topr", "positive_weight"),
        "actor_train.topr_negative_weight": FlatName("topr", "negative_weight"),
    }


FLAT_NAMES = _flat_names()
"""Every other name of an option of ``loss``, with its place."""
