"""Metrics collected with one transfer from the device, those of a step's batch, and warnings about useless batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from roll.algorithms.aggregation import Groups, row_mean
from roll.protocol.metrics import Max, Mean, Metric, Metrics, Min, Sum


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation as moments, which add up over micro-batches and ranks."""

    count: float
    sum_x: float
    sum_y: float
    sum_xx: float
    sum_yy: float
    sum_xy: float

    def merge(self, other: Correlation) -> Correlation:
        return Correlation(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def value(self) -> float:
        """The correlation; 1 where one of the two does not vary (nothing contradicts agreement)."""
        if self.count < 2:
            return 1.0
        covariance = self.sum_xy - self.sum_x * self.sum_y / self.count
        variance_x = self.sum_xx - self.sum_x**2 / self.count
        variance_y = self.sum_yy - self.sum_y**2 / self.count
        scale = (max(variance_x, 0.0) * max(variance_y, 0.0)) ** 0.5
        # Moments cancel where values hardly vary: below this scale the quotient would be rounding error.
        return min(max(covariance / scale, -1.0), 1.0) if scale > 1e-12 * self.count else 1.0


@dataclass(eq=False)
class MetricBuilder:
    """Collects scalar tensors as they are computed; :meth:`build` copies all of them to the host at once."""

    _recipes: list[tuple[str, Callable[..., Metric], tuple[Tensor | float, ...]]] = field(
        init=False, default_factory=list
    )

    def mean(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """A weighted mean: ``total`` is the sum over this micro-batch, ``weight`` its divisor."""
        self._recipes.append((name, Mean, (total, weight)))

    def sum(self, name: str, total: Tensor | float) -> None:
        self._recipes.append((name, Sum, (total,)))

    def max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The largest masked value; left out of the metrics when nothing is masked."""
        if values.numel():
            self._recipes.append((name, Max, (values.detach().masked_fill(~mask, -torch.inf).amax(),)))

    def min(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The smallest masked value; left out of the metrics when nothing is masked."""
        if values.numel():
            self._recipes.append((name, Min, (values.detach().masked_fill(~mask, torch.inf).amin(),)))

    def correlation(self, name: str, x: Tensor, y: Tensor, count: Tensor) -> None:
        """Pearson's correlation of ``count`` pairs, from moments in float64; all other values are 0."""
        x, y = x.detach().double().flatten(), y.detach().double().flatten()
        self._recipes.append((name, Correlation, (count, x.sum(), y.sum(), x @ x, y @ y, x @ y)))

    def summary(self, name: str, values: Tensor, mask: Tensor | None = None, with_std: bool = False) -> None:
        """``name/mean``, ``max`` and ``min`` of the masked values; with ``with_std`` their Bessel-corrected ``std``."""
        values = values.detach().float()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        total, count = torch.where(mask, values, 0.0).sum(dtype=torch.float64), mask.sum()
        self.mean(f"{name}/mean", total, count)
        self.max(f"{name}/max", values, mask)
        self.min(f"{name}/min", values, mask)
        if with_std:
            # Two passes in float64: the difference of moments would lose a small deviation of large values.
            centred = torch.where(mask, values.double() - total / count.clamp(min=1), 0.0)
            std = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
            self.mean(f"{name}/std", std * count, count)

    @torch.no_grad()
    def build(self) -> Metrics:
        """The metrics; a largest or smallest value of nothing is left out."""
        # Float64 holds counts above 2^24 exactly, which float32 would round.
        tensors = [one.double() for _, _, scalars in self._recipes for one in scalars if isinstance(one, Tensor)]
        # One transfer: each `.item()` would make the host wait for the device.
        moved = iter(torch.stack(tensors).tolist() if tensors else ())
        metrics: Metrics = {}
        for name, kind, scalars in self._recipes:
            arguments = [float(next(moved) if isinstance(one, Tensor) else one) for one in scalars]
            is_of_nothing = (kind is Max and arguments[0] == -torch.inf) or (kind is Min and arguments[0] == torch.inf)
            if not is_of_nothing:
                metrics[name] = kind(*arguments)
        return metrics


@dataclass(frozen=True)
class BatchColumns:
    """Columns of the batch that the metrics are computed from."""

    scores: Tensor
    """float (B,), raw; 1 or more is right."""
    response_level_rewards: Tensor
    """float (B,), normalised."""
    token_level_rewards: Tensor
    """float (B, L), 0 outside the mask."""
    advantages: Tensor
    """float (B, L)."""
    returns: Tensor
    """float (B, L)."""
    response_mask: Tensor
    """bool (B, L)."""
    attention_mask: Tensor
    """bool (B, L)."""
    group_ids: Tensor
    """int64 (B,)."""
    truncated: Tensor
    """bool (B,): cut off at the length limit."""
    raw_advantages: Tensor | None = None
    """float (B, L), before whitening and clipping."""
    values: Tensor | None = None
    """float (B, L), the critic's."""


def compute_data_metrics(columns: BatchColumns) -> Metrics:
    """All ``critic/*``, ``token/*`` and ``group/*`` metrics of one batch, with one transfer from the device."""
    metrics, count = MetricBuilder(), float(columns.scores.numel())
    if not count:
        return {}
    mask, advantages, truncated = columns.response_mask, columns.advantages, columns.truncated
    raw_advantages = advantages if columns.raw_advantages is None else columns.raw_advantages
    is_right, response, total = columns.scores >= 1.0, mask.sum(-1), columns.attention_mask.sum(-1)
    parts = (("right", is_right), ("error", ~is_right))
    metrics.mean("critic/correct/mean", is_right.sum(), count)
    metrics.summary("critic/score", columns.scores)
    metrics.summary("critic/rewards", columns.response_level_rewards)
    metrics.mean("critic/token_level_rewards_mean", columns.token_level_rewards.sum(), response.sum())
    metrics.summary("critic/advantages", advantages, mask)
    metrics.summary("critic/raw_advantages", raw_advantages, mask)
    metrics.summary("critic/returns", columns.returns, mask)
    if columns.values is not None:
        metrics.summary("critic/values", columns.values, mask)
    for name, rows in parts:
        tokens = mask & rows[:, None]
        metrics.summary(f"critic/{name}_response/advantages", advantages, tokens, with_std=True)
        metrics.summary(f"critic/{name}_response/raw_advantages", raw_advantages, tokens, with_std=True)
    # As bytes: torch has no argmax of booleans.
    prompt = torch.where(response > 0, mask.byte().argmax(-1), total) if mask.shape[1] else total
    for name, lengths in (("response", response), ("prompt", prompt), ("total", total)):
        metrics.summary(f"token/{name}_length", lengths)
        metrics.mean(f"token/{name}_length/diff", (lengths.max() - lengths.min()).float(), 1.0)
    metrics.mean("token/total_response_length/clip", truncated.sum(), count)
    for name, rows in parts:
        metrics.mean(f"token/{name}_response_length/clip", (truncated & rows).sum(), rows.sum())
        metrics.summary(f"token/{name}_response_length", response, rows)
    groups, of_row = Groups.of(columns.group_ids), row_mean(advantages, mask)
    metrics.summary("group/response_length_diff", group_range(response.float(), groups))
    metrics.summary("group/advantage_diff", group_range(of_row, groups))
    num_right = groups.sum(is_right.float())
    all_right, all_wrong = num_right == groups.counts, num_right == 0
    mixed = ~(all_right | all_wrong)
    metrics.summary("group/correct_ratio", num_right / groups.counts)
    for name, is_so in (("all_correct", all_right), ("all_incorrect", all_wrong), ("mixed", mixed)):
        metrics.mean(f"group/{name}_groups_ratio", is_so.sum(), float(len(groups.counts)))
    mean_right = groups.sum(of_row * is_right) / num_right.clamp(min=1)
    mean_wrong = groups.sum(of_row * ~is_right) / (groups.counts - num_right).clamp(min=1)
    metrics.summary("group/correct_vs_incorrect_advantage_diff", mean_right - mean_wrong, mixed)
    return metrics.build()


def group_range(values: Tensor, groups: Groups) -> Tensor:
    """Largest minus smallest value of each group: float (B,) -> (G,)."""
    # Without the initial zeros (`include_self`), or a group of negative values would have 0 as its largest.
    extremes = values.new_zeros(2, len(groups.counts))
    for row, reduce in zip(extremes, ("amax", "amin"), strict=True):
        row.scatter_reduce_(0, groups.index, values, reduce, include_self=False)
    return extremes[0] - extremes[1]


# Advantages up to this are 0 but for rounding.
ZERO = 1e-6
# Steps in a row before a warning: one batch of equal scores is chance, three are not.
PATIENCE = 3
# Share of truncated responses beyond which they are a problem.
TRUNCATION_LIMIT = 0.5


@dataclass
class BatchWatch:
    """Warns once when something has been wrong with the samples of :data:`PATIENCE` steps in a row."""

    truncated: str = "were cut off at the length limit"
    remedy: str = "raise response_length, or check the stop tokens"
    learns_from_scores: bool = True
    _steps: Counter[str] = field(default_factory=Counter, init=False)
    """Steps in a row with each problem."""

    def _persists(self, problem: str, is_there: bool) -> bool:
        """Count a step; tell whether ``problem`` has now been there for exactly :data:`PATIENCE` steps in a row."""
        self._steps[problem] = self._steps[problem] + 1 if is_there else 0
        # Equal, not at least: the warning comes once for each such series, not at every further step.
        return self._steps[problem] == PATIENCE

    def observe(self, scores: Tensor, truncated: Tensor) -> list[str]:
        """Messages to log as warnings, usually none.

        Args:
            scores: float (B,), raw.
            truncated: bool (B,), cut off at the length limit.
        """
        if scores.numel() == 0:
            return []
        messages = []
        same = self.learns_from_scores and scores.numel() > 1 and bool((scores == scores[0]).all())
        if self._persists("equal scores", same):
            messages.append(
                f"every response of the last {PATIENCE} steps got the score {float(scores[0]):g}: nothing can be "
                "learned from that; check the reward rule, the ground truth and the answer format"
            )
        share = float(truncated.float().mean())
        if self._persists("truncation", share > TRUNCATION_LIMIT):
            messages.append(
                f"more than {TRUNCATION_LIMIT:.0%} of the responses of the last {PATIENCE} steps "
                f"{self.truncated} ({share:.0%} in this one); {self.remedy}"
            )
        return messages

    def observe_advantages(self, advantages: Tensor, used: Tensor, estimator: str) -> list[str]:
        """Messages about advantages that are all 0; none where equal scores, which :meth:`observe` reports, are why.

        Args:
            advantages: float (B, L), 0 outside the responses.
            used: bool (B,), responses that the loss uses.
            estimator: its name, for the message.
        """
        if advantages.numel() == 0:
            return []
        all_zero = bool((advantages[used].abs() <= ZERO).all())
        if not self._persists("zero advantages", all_zero) or self._steps["equal scores"] >= PATIENCE:
            return []
        return [
            f"every advantage of the last {PATIENCE} steps was 0, so the policy has learned nothing: "
            f"estimator {estimator} found no difference between responses that the loss uses; look at "
            "group/mixed_groups_ratio (prompts all too easy or too hard? groups too small?) and at the masks"
        ]
