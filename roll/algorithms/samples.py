"""Rewards from raw scores: normalisation, placement on tokens; the responses that the loss uses, and their weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.aggregation import Groups
from roll.algorithms.metrics import MetricBuilder
from roll.config.algorithm import NORM_TYPES, PPOConfig
from roll.config.choices import traits
from roll.config.reading.fields import Choice
from roll.protocol.metrics import Metrics

NormType = Literal["batch", "group", "running"] | None

# Added to a spread before something is divided by it; a spread up to this counts as 0, as does this part of a mean.
EPS = 1e-6


def resolve_norm_types(
    estimator: Choice, norm_mean_type: str | None = "auto", norm_std_type: str | None = "auto"
) -> tuple[NormType, NormType]:
    """The reward normalisation: what the user chose, or the estimator's own where that is ``auto``.

    An explicit choice, null included, is never overridden: ``grpo`` with a null std type is Dr. GRPO.
    """
    own, chosen = traits(estimator).norm, (norm_mean_type, norm_std_type)
    mean, std = (kind if kind != "auto" else default for kind, default in zip(chosen, own, strict=True))
    return mean, std  # type: ignore[return-value]


def exceeds_rounding(spread: Tensor, mean: Tensor) -> Tensor:
    """True where a spread of values about ``mean`` is more than their float32 rounding."""
    return spread > EPS * mean.abs().clamp(min=1.0)


def divisor(std: Tensor, mean: Tensor) -> Tensor:
    """std + 1e-6; 1 where values about ``mean`` have no spread."""
    return torch.where(exceeds_rounding(std, mean), std + EPS, 1.0)


@dataclass
class RunningMoments:
    """Mean and variance of all rewards seen so far, merged batch by batch (Chan, Golub, LeVeque 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def update(self, values: Tensor) -> None:
        """Include float (N,), finite values only: any other would stay for the rest of the run."""
        values = values[values.isfinite()]
        count = float(values.numel())
        if count == 0:
            return
        mean, squares = torch.stack([values.mean(), (values - values.mean()).square().sum()]).tolist()
        total = self.count + count
        # Merging by differences of means: sums of squares would cancel after many batches of similar rewards.
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Bessel-corrected; 0 for fewer than two values."""
        return (self.squares / (self.count - 1.0)) ** 0.5 if self.count > 1 else 0.0


@dataclass(frozen=True)
class RewardOptions:
    """Normalisation of response-level rewards: (R - mean) / std, each over its own set, then clipped."""

    norm_mean_type: NormType = None
    """Whose mean is subtracted: batch, group, running (all batches so far) or none."""
    norm_std_type: NormType = None
    """Whose standard deviation is divided by; none: no division (Dr. GRPO)."""
    reward_clip: float | None = None
    """Normalised rewards stay within +- this bound."""

    def __post_init__(self) -> None:
        for key in ("norm_mean_type", "norm_std_type"):
            if getattr(self, key) not in (*NORM_TYPES, None):
                raise ValueError(f"{key} {getattr(self, key)!r} is unknown; known: batch, group, running, null")
        if self.reward_clip is not None and self.reward_clip <= 0:
            raise ValueError(f"reward_clip must be positive, got {self.reward_clip}; null switches it off")


@dataclass(eq=False)
class RewardPostprocessor:
    """Normalises rewards; keeps running moments for each domain, so it belongs into the checkpoint.

    A group of one keeps its raw score under the group mean (nothing to compare it with), and a standard deviation of 0
    or of a single value does not divide, so no pair of norm types gives NaN or explodes.
    """

    options: RewardOptions
    _running: dict[str, RunningMoments] = field(default_factory=dict)

    def __call__(self, rewards: Tensor, group_ids: Tensor, domain: str = "") -> tuple[Tensor, Metrics]:
        """Normalise the rewards of one domain's batch.

        Args:
            rewards: float (B,), raw.
            group_ids: int64 (B,); rows with the same id answer the same prompt.
            domain: whose running moments to use.

        Returns:
            float32 (B,), and ``critic/reward_clip_frac``.
        """
        raw = rewards.double()
        mean, std = self.moments(raw, group_ids, domain)
        return self.applied(raw, mean, std)

    def moments(self, raw: Tensor, group_ids: Tensor, domain: str = "") -> tuple[Tensor, Tensor]:
        """Offset and divisor, each float64 (B,) or a scalar; running moments include the rewards."""
        mean_type, std_type = self.options.norm_mean_type, self.options.norm_std_type
        # By domain: rewards of code and of mathematics have scales of their own.
        running = self._running.setdefault(domain, RunningMoments())
        mean = std = level = raw.new_zeros(())
        if "running" in (mean_type, std_type):
            # Before they are used, so that the first batch is normalised by its own moments instead of by none.
            running.update(raw)
            level = raw.new_full((), running.mean)
            mean = level if mean_type == "running" else mean
            std = raw.new_full((), running.std) if std_type == "running" else std
        if mean_type == "batch":
            mean = raw.mean()
        if std_type == "batch" and raw.numel() > 1:
            std, level = raw.std(), raw.mean()
        if "group" in (mean_type, std_type):
            groups = Groups.of(group_ids)
            own, spread = groups.moments(raw)
            if mean_type == "group":
                mean = torch.where(groups.counts > 1, own, 0.0)[groups.index]
            if std_type == "group":
                return mean, divisor(spread, own)[groups.index]
        return mean, divisor(std, level)

    def applied(self, raw: Tensor, mean: Tensor, divisor: Tensor) -> tuple[Tensor, Metrics]:
        """(raw - mean) / divisor within the clip: float32 (B,), and ``critic/reward_clip_frac``."""
        normalised = (raw - mean) / divisor
        metrics, bound = MetricBuilder(), self.options.reward_clip
        if bound is not None:
            clipped = normalised.clamp(-bound, bound)
            metrics.mean("critic/reward_clip_frac", (clipped != normalised).sum(), float(raw.numel()))
            normalised = clipped
        return normalised.float(), metrics.build()

    def state_dict(self) -> dict[str, Any]:
        return {domain: asdict(moments) for domain, moments in self._running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = {domain: RunningMoments(**moments) for domain, moments in state.items()}


def token_level_rewards(
    response_rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Place each response's reward on its last masked token and subtract ``kl_coef`` times the divergence per token.

    Args:
        response_rewards: float (B,).
        mask: bool (B, L), the response mask; an empty row gets no reward.
        kl: float (B, L), per-token estimate of KL(policy || reference).
        kl_coef: coefficient, e.g. a controller's value.

    Returns:
        float32 (B, L), 0 outside the mask.
    """
    rewards = torch.zeros(mask.shape, device=mask.device)
    if mask.shape[1]:
        columns = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
        last = (mask * columns).amax(-1, keepdim=True).long() - 1
        # An empty row has last = -1, and writes a 0 into its first column.
        at_last = torch.where(last >= 0, response_rewards.float().unsqueeze(-1), 0.0)
        rewards.scatter_(1, last.clamp(min=0), at_last)
    if kl is not None and kl_coef != 0.0:
        rewards -= kl_coef * torch.where(mask, kl, 0.0)
    return rewards


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft over-long punishment, to be added to the raw reward; arXiv 2503.14476 eq. 13.

    0 up to ``max_length - buffer`` tokens, falling linearly to ``-factor`` at ``max_length`` and beyond.

    Args:
        lengths: (B,) response lengths in tokens.
        max_length, buffer: tokens, 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"the over-long buffer must lie in (0, {max_length}], got {buffer}; try {max_length // 5 or 1}"
        )
    excess = (lengths.float() - (max_length - buffer)) / buffer
    return -factor * excess.clamp(0.0, 1.0)


def sample_mask(
    options: PPOConfig,
    scores: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    group_ids: Tensor,
    response_filter: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Choose the responses that the loss uses.

    Args:
        scores: float (B,), raw; 1 or more is right.
        lengths: int64 (B,), response tokens.
        truncated: bool (B,), cut off at the length limit.
        group_ids: int64 (B,).
        response_filter: bool (B,), False for responses that the user's own filter rejects; None: there is none.

    Returns:
        bool (B,), responses that the loss uses, and ``actor/*_mask_ratio`` (shares kept by each reason).
    """
    metrics = MetricBuilder()
    total = float(scores.numel())
    # Every reason is counted over all samples, also those that another one has dropped already.
    keep = torch.ones_like(truncated)
    kept: dict[str, Tensor] = {}
    if options.max_len_mask:
        kept["max_len"] = ~truncated
    if options.difficulty_mask:
        groups = Groups.of(group_ids)
        mean = groups.mean(scores.double())[groups.index]
        # In the type of the scores: a group of scores of 0.1 is at a threshold of 0.1, not above it.
        mean = mean.to(scores.dtype)
        kept["difficulty"] = (mean > options.difficulty_low_threshold) & (mean < options.difficulty_high_threshold)
    if options.error_max_len_clip:
        kept["error_len"] = (scores >= 1.0) | (lengths <= options.error_max_len_threshold)
    if response_filter is not None:
        kept["response_filter"] = response_filter
    for name, passed in kept.items():
        metrics.mean(f"actor/{name}_mask_ratio", passed.sum(), total)
        keep = keep & passed
    used = keep.sum()
    metrics.mean("actor/final_mask_ratio", used, total)
    metrics.sum("actor/samples_used", used)
    metrics.sum("actor/samples_total", total)
    metrics.sum("mask/final_mask_sum_eq_0", (used == 0).long())
    return keep, metrics.build()


def sample_weights(options: PPOConfig, scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor | None:
    """Weight of each response, float32 (B,), or None when nothing weighs.

    ``scores`` float (B,) in [0, 1] (others are clamped for the difficulty), ``lengths`` int64 (B,) response tokens.
    """
    if not (options.difficulty_loss_weight or options.length_loss_weight):
        return None
    weights = torch.ones_like(scores, dtype=torch.float32)
    if options.difficulty_loss_weight:
        groups = Groups.of(group_ids)
        difficulty = 1.0 - groups.mean(scores.double()).clamp(0.0, 1.0)[groups.index]
        weights = weights * (0.5 + 1.5 * difficulty).float()
    if options.length_loss_weight and lengths.numel():
        low, high = lengths.min(), lengths.max()
        weights = weights * (1.5 - (lengths - low) / (high - low).clamp(min=1))
    return weights


def top_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The ``fraction`` of masked tokens with the highest entropy ("forking tokens"); arXiv 2506.01939 eq. 5.

    Apply it to a whole batch before it is split, with the entropy of the policy before the update, and use the result
    as :attr:`~roll.algorithms.policy_losses.LossInputs.policy_mask`: then it does not depend on micro-batches, and the
    loss is divided by all tokens, as in the paper.

    Args:
        entropy: float (B, L), nats.
        mask: bool (B, L).
        fraction: in (0, 1]; 0.2 in the paper. 1 keeps everything.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the entropy fraction must lie in (0, 1], got {fraction}; the paper uses 0.2")
    kept = entropy[mask]
    count = max(round(fraction * kept.numel()), 1)
    if count >= kept.numel():
        return mask.clone()
    threshold = kept.topk(count).values[-1]
    # By value, not by index: tokens that tie at the threshold are all kept, whatever the order of the rows.
    return mask & (entropy >= threshold)
