"""Typed options of the policy losses. Torch-free; field names are the keys of the YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RatioLevel = Literal["token", "segment", "seq"]


@dataclass(frozen=True)
class PPOOptions:
    """Clipped surrogate: ``ppo``, ``gspo``, ``gspo_token``, ``raft++``."""

    pg_clip: float = 0.2
    """Symmetric clip: the ratio stays within [1 - pg_clip, 1 + pg_clip]."""
    use_pg_clip_range: bool = False
    """Use ``pg_clip_low`` and ``pg_clip_high`` instead of ``pg_clip`` (DAPO's clip-higher)."""
    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip_loss: bool = False
    """For negative advantages, bound the surrogate below by ``dual_clip_coef`` times the advantage."""
    dual_clip_coef: float | None = None
    """null: 1 + 2 * pg_clip; 3.0 in the paper (arXiv 1912.09729)."""
    importance_sampling: RatioLevel = "token"
    """Ratio of each token, or the geometric mean over a segment (turn) or the whole response (GSPO)."""

    @property
    def clip_low(self) -> float:
        return self.pg_clip_low if self.use_pg_clip_range else self.pg_clip

    @property
    def clip_high(self) -> float:
        return self.pg_clip_high if self.use_pg_clip_range else self.pg_clip

    @property
    def dual_clip_bound(self) -> float | None:
        if not self.dual_clip_loss:
            return None
        return 1.0 + 2.0 * self.pg_clip if self.dual_clip_coef is None else self.dual_clip_coef


@dataclass(frozen=True)
class VanillaOptions:
    """``vanilla`` needs none."""


@dataclass(frozen=True)
class TISOptions:
    """``tis``: REINFORCE weighted by the truncated ratio."""

    tis_lower_bound: float = 0.0
    tis_upper_bound: float = 1.0


@dataclass(frozen=True)
class CISPOOptions:
    """``cispo``."""

    cispo_epsilon_low: float = 0.1
    """The weight is clipped to [1 - low, 1 + high]; the paper leaves the lower side open (low = 1)."""
    cispo_epsilon_high: float = 0.1
    cispo_unified_mask: bool = False
    """Drop what PPO's clip would drop instead of clipping the weight: the unified form with PPO's token mask."""


@dataclass(frozen=True)
class TOPROptions:
    """``topr``."""

    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    topr_lower_bound: float = 0.0
    """a of the truncation interval [a, b] for responses with negative advantage."""
    topr_upper_bound: float = 1.0


@dataclass(frozen=True)
class Kimi15Options:
    """``kimi15``."""

    kimi15_tau: float = 0.1
    """Weight of the squared sequence log-ratio."""


@dataclass(frozen=True)
class SAPOOptions:
    """``sapo``; the defaults are the paper's."""

    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05


@dataclass(frozen=True)
class GMPOOptions:
    """``gmpo``; bounds of the token log-ratio, the paper's defaults."""

    gmpo_clip_low: float = 0.4
    """Lower bound exp(-low) of a token's ratio."""
    gmpo_clip_high: float = 0.4


@dataclass(frozen=True)
class DROOptions:
    """``dro``."""

    dro_tau: float = 0.1
    """Strength of the regularisation towards the reference (or, without one, the old policy)."""


@dataclass(frozen=True)
class DPPOOptions:
    """``dppo``."""

    dppo_divergence: Literal["tv", "kl"] = "tv"
    """Binary total variation or binary KL between old and new probability of the sampled token."""
    dppo_threshold: float = 0.15
    """Tokens beyond it lose their gradient where the update would lead further away; the paper uses 0.15 to 0.2 for
    tv and about 0.05 for kl."""
    dppo_ratio_bound: float = 20.0
    """The weight is truncated here."""


@dataclass(frozen=True)
class M2POOptions:
    """``m2po``."""

    m2po_threshold: float = 0.04
    """Mean squared log-ratio that the tokens which stay may have; the paper's."""
    m2po_all_tokens: bool = False
    """Bound and drop all tokens, not only those whose update leads further away."""


@dataclass(frozen=True)
class VESPOOptions:
    """``vespo``; the defaults are the paper's. k: how fast weights below 1 fall; lambda: how fast those above 1 do."""

    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


@dataclass(frozen=True)
class ClipCovOptions(PPOOptions):
    """``clip_cov``."""

    clip_cov_ratio: float = 2e-4
    """Share of tokens that lose their gradient."""
    clip_cov_low: float = 1.0
    """They are drawn among those whose covariance lies in [low, high]."""
    clip_cov_high: float = 5.0


@dataclass(frozen=True)
class KLCovOptions:
    """``kl_cov``."""

    kl_cov_ratio: float = 2e-3
    """Share of tokens, those of highest covariance, that get the KL penalty."""
    kl_cov_coef: float = 1.0
