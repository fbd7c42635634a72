"""Reward models: the tokens whose score is a reward, their losses, and what is measured of their scores.

The same tokens are scored in training and wherever a reward model scores. A value belongs to the state in which a token
is sampled, so to the tokens before it. One token is therefore added after each sequence, which no model computes; the
score of the sequence is the value at that place, so the model's output at the **last attended token**, whatever id that
is (a padding id among them).

``r`` is the score of a whole response (of a step), a number without unit. Losses are sums over the micro-batch, each
term with its weight; dividing by the number of units of the whole optimizer step is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from roll.config.losses import RANKS, RewardLossConfig
from roll.protocol.metrics import Deviation, Mean, Metrics

# Id of the added token and of padding; no result depends on it.
FILLER = 0


def scoring_batch(
    sequences: Sequence[Sequence[int]],
    shared: Sequence[int] | None = None,
    places: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Right-padded rows of each sequence and one token more: ``input_ids`` int64, ``attention_mask``, ``response_mask``
    and ``score_mask`` bool (B, L).

    Args:
        shared: tokens at the beginning of each sequence that adjacent ones may have in common, which strategies then
            compute once; None: all are computed for each.
        places: of each sequence the numbers of tokens after which scores are read; None: after all of them.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    positions = torch.arange(int(lengths.max()) + 1)
    input_ids = torch.full((len(sequences), len(positions)), FILLER, dtype=torch.long)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    ends = positions == lengths[:, None]
    if places is not None:
        ends = torch.zeros_like(ends)
        for row, after in zip(ends, places, strict=True):
            row[torch.tensor(after, dtype=torch.long)] = True
    attention_mask = positions <= lengths[:, None]
    first = ends if shared is None else attention_mask & (positions >= torch.tensor(shared)[:, None])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": first | ends, "score_mask": ends}


def end_scores(values: Tensor, score_mask: Tensor) -> Tensor:
    """(B,): the only score of each row; 0 for rows without one.

    Args:
        values: (B, L).
        score_mask: bool (B, L), one place a row.
    """
    return (values * score_mask).sum(1)


# Bounds of the buckets of margins by which accuracy is reported.
MARGIN_BUCKETS = (0.5, 1.0, 2.0)
CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Pairs:
    """The comparable pairs of some responses."""

    better: Tensor
    """int64 (P,): index of the response of the higher target."""
    worse: Tensor
    """int64 (P,)."""
    weights: Tensor
    """float64 (P,): 1 / (comparable pairs of the prompt), so that every prompt weighs 1."""


def comparable_pairs(unit_ids: Tensor, targets: Tensor, is_real: Tensor) -> Pairs:
    """All pairs of responses to one prompt with different targets (InstructGPT, arXiv 2203.02155, eq. 1).

    Args:
        unit_ids: int64 (B,), equal for the responses to one prompt.
        targets: float (B,), the higher the better.
        is_real: bool (B,), False for rows that only fill a batch.
    """
    # B x B booleans: a micro-batch has few rows, and a sort per prompt would need a loop.
    same = (unit_ids[:, None] == unit_ids) & is_real[:, None] & is_real
    better, worse = (same & (targets[:, None] > targets)).nonzero(as_tuple=True)
    _, unit, counts = unit_ids[better].unique(return_inverse=True, return_counts=True)
    return Pairs(better, worse, 1 / counts[unit].double())


def units_of(batch: dict[str, Tensor], options: RewardLossConfig) -> float:
    """The denominator's share of some rows: prompts with a comparable pair, scored responses, or labelled steps."""
    if options.loss_type in RANKS:
        pairs = comparable_pairs(batch["unit_ids"], batch["targets"], batch["score_mask"].any(1))
        return float(pairs.weights.sum())
    return float(batch["score_mask"].sum())


def reward_model_loss(
    values: Tensor, batch: dict[str, Tensor], options: RewardLossConfig, units: float, prefix: str
) -> tuple[Tensor, Metrics]:
    """A micro-batch's share of the mean loss, and its numbers.

    Of rankings -log sigmoid(r_w - r_l - m) (Bradley-Terry; Llama 2, arXiv 2307.09288, eq. 2), smoothed, plus
    c (r_w + r_l)^2 (arXiv 2312.09244, eq. 2).  Of numbers (r - y)^2 (HelpSteer2, arXiv 2406.08673, sec. 3); of labels
    the cross-entropy, of which a soft label takes both terms (arXiv 2305.20050, sec. 2.4).

    Args:
        values: (B, L), with gradient.
        batch: ``score_mask`` bool (B, L), where scores are read; ``unit_ids`` int64 (B,); ``targets`` float (B,), of
            steps (B, L); ``margins`` float (B,) or missing.
        units: of the whole optimizer step, :func:`units_of` over all ranks.
    """
    mask, targets = batch["score_mask"], batch["targets"]
    if options.loss_type not in RANKS:
        wanted = targets[mask] if targets.dim() == 2 else targets[mask.any(1)]
        scores = values[mask]
        losses = (scores - wanted) ** 2
        if options.loss_type != "regression":
            losses = F.binary_cross_entropy_with_logits(scores, wanted.to(scores.dtype), reduction="none")
        return losses.sum() / max(units, 1.0), point_metrics(scores.detach(), wanted, losses.detach(), options, prefix)
    scores = end_scores(values, mask)
    pairs = comparable_pairs(batch["unit_ids"], targets, mask.any(1))
    margins = batch["margins"][pairs.better].to(scores.dtype) if "margins" in batch else None
    better, worse = scores[pairs.better], scores[pairs.worse]
    lead = better - worse if margins is None else better - worse - margins
    share = options.label_smoothing
    losses = (share - 1) * F.logsigmoid(lead) - share * F.logsigmoid(-lead)
    losses = losses + options.center_rewards_coefficient * (better + worse) ** 2
    weights = pairs.weights.to(scores.dtype)
    by_pair = (better.detach(), worse.detach(), losses.detach(), pairs.weights)
    metrics = ranking_metrics(*by_pair, margins, prefix)
    return (losses * weights).sum() / max(units, 1.0), metrics


def ranking_metrics(
    better: Tensor, worse: Tensor, losses: Tensor, weights: Tensor, margins: Tensor | None, prefix: str
) -> Metrics:
    """Numbers of P pairs; every prompt weighs 1. A tie counts as wrong."""
    total = float(weights.sum())
    right = (better > worse).double()

    def mean(values: Tensor) -> Mean:
        return Mean(float((values.double() * weights).sum()), total)

    metrics: Metrics = {
        "loss": mean(losses),
        "acc": mean(right),
        "chosen_score": mean(better),
        "reject_score": mean(worse),
        "score_gap": mean(better - worse),
        "chosen_score_std": Deviation.of(better, weights),
        "reject_score_std": Deviation.of(worse, weights),
    }
    if margins is not None:
        bounds = torch.tensor(MARGIN_BUCKETS, device=margins.device, dtype=margins.dtype)
        bucket = torch.bucketize(margins, bounds)
        ends = [f"{bound:g}" for bound in MARGIN_BUCKETS]
        names = [f"to_{ends[0]}", *(f"{a}_to_{b}" for a, b in pairwise(ends)), f"above_{ends[-1]}"]
        for index, name in enumerate(names):
            own = weights * (bucket == index)
            if float(own.sum()):
                metrics[f"acc_margin/{name}"] = Mean(float((right * own).sum()), float(own.sum()))
    return {prefix + name: metric for name, metric in metrics.items()}


def point_metrics(scores: Tensor, targets: Tensor, losses: Tensor, options: RewardLossConfig, prefix: str) -> Metrics:
    """Numbers of N scores. Right is a regression within half a unit, or a label's side."""
    if options.loss_type == "process":
        right = (scores > 0) == (targets > 0.5)
    else:
        right = (scores - targets).abs() < 0.5
    count = len(scores)
    ones = torch.ones(count, dtype=torch.float64, device=scores.device)
    return {
        f"{prefix}loss": Mean(float(losses.double().sum()), count),
        f"{prefix}acc": Mean(float(right.sum()), count),
        f"{prefix}score": Mean(float(scores.double().sum()), count),
        f"{prefix}score_std": Deviation.of(scores, ones),
    }


Floats = NDArray[np.float64]


def calibration_error(leads: Floats, weights: Floats, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error of the probabilities sigmoid(r_1 - r_2), each pair seen from both sides: the mean
    distance, over bins of confidence, of the share that is right from the confidence (arXiv 1706.04599, eq. 3).

    Args:
        leads: (P,), r_w - r_l.
        weights: (P,).
    """
    confidence = 1 / (1 + np.exp(-np.abs(leads)))
    right = (leads > 0).astype(np.float64) + 0.5 * (leads == 0)
    # Confidence of the side that the model prefers lies in 0.5 .. 1.
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    total = weights.sum()
    gaps = [abs(float((weights * (right - confidence))[place == index].sum())) for index in range(bins)]
    return float(sum(gaps) / total) if total else 0.0


def correlation(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Pearson's; 0 where one of them does not vary."""
    x, y = (np.asarray(values, dtype=np.float64) for values in (first, second))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale > 1e-12 else 0.0
