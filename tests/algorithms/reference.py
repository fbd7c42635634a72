"""Slow, obvious float64 references of roll.algorithms: plain Python loops over rows and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import Groups, LossDenominators, denominators_from, denominators_of, group_tokens_of
from roll.algorithms.policy_losses import LossInputs

Matrix = list[list[float]]


@dataclass
class Batch:
    """A random batch in the house layout: masks with holes, empty rows, uneven groups; 0 outside the mask."""

    mask: torch.Tensor
    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    rollout_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    entropy: torch.Tensor
    old_sum_of_squares: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor
    values: torch.Tensor
    response_rewards: torch.Tensor
    group_ids: torch.Tensor
    sample_weights: torch.Tensor


def make_batch(seed: int, rows: int, length: int, density: float = 0.7) -> Batch:
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) < density
    mask[rng.random(rows) < 0.2] = False

    def column(scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(np.where(mask, rng.normal(shift, scale, mask.shape), 0.0))

    spread = np.random.default_rng(seed + 1).random(mask.shape)
    log_probs = -column(0.6).abs() - 0.05 * torch.from_numpy(mask)
    old = torch.where(torch.from_numpy(mask), (log_probs + column(0.4)).clamp(max=-0.01), 0.0)
    rollout = torch.where(torch.from_numpy(mask), (old + column(0.1)).clamp(max=-0.01), 0.0)
    return Batch(
        mask=torch.from_numpy(mask),
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=rollout,
        ref_log_probs=torch.where(torch.from_numpy(mask), (log_probs + column(0.5)).clamp(max=-0.01), 0.0),
        entropy=column(0.5).abs(),
        # The token's own square, and some of what is left for the other tokens.
        old_sum_of_squares=old.exp().square() + (1 - old.exp()).square() * torch.from_numpy(spread),
        advantages=column(1.0),
        rewards=column(1.0),
        values=column(1.0),
        response_rewards=torch.from_numpy(rng.integers(0, 3, rows) / 2.0),
        group_ids=torch.from_numpy(rng.integers(0, max(rows // 2, 1), rows) * 7 - 3),
        sample_weights=torch.from_numpy(rng.random(rows) + 0.5),
    )


batches = st.builds(
    make_batch,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 7),
    length=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)


def each_batch(share: int = 3, **more: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with batches, and with ``more`` arguments drawn for it; one in ``share`` of the usual examples."""
    return lambda test: settings(max_examples=settings().max_examples // share)(given(batch=batches, **more)(test))


def gae(rewards: Matrix, values: Matrix, mask: list[list[bool]], gamma: float, lambd: float) -> torch.Tensor:
    advantages = [[0.0] * len(row) for row in rewards]
    for i, row in enumerate(mask):
        next_value, running = 0.0, 0.0
        for t in reversed(range(len(row))):
            if row[t]:
                delta = rewards[i][t] + gamma * next_value - values[i][t]
                running = delta + gamma * lambd * running
                next_value = values[i][t]
                advantages[i][t] = running
    return torch.tensor(advantages, dtype=torch.float64).view(len(mask), -1)


def returns(rewards: Matrix, mask: list[list[bool]], gamma: float) -> torch.Tensor:
    result = [[0.0] * len(row) for row in rewards]
    for i, row in enumerate(mask):
        running = 0.0
        for t in reversed(range(len(row))):
            if row[t]:
                running = rewards[i][t] + gamma * running
                result[i][t] = running
    return torch.tensor(result, dtype=torch.float64).view(len(mask), -1)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """Bessel-corrected; 0 for one value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def members(group_ids: list[int], row: int) -> list[int]:
    return [i for i, group in enumerate(group_ids) if group == group_ids[row]]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = [float(values[i, t]) for i, t in mask.nonzero().tolist()]
    if len(kept) < 2:
        return torch.where(mask, values, 0.0)
    centre, spread = mean(kept), std(kept)
    result = torch.zeros_like(values)
    for i, t in mask.nonzero().tolist():
        result[i, t] = (values[i, t] - centre) / math.sqrt(spread**2 + 1e-8)
    return result


def aggregate(
    loss: torch.Tensor, mask: torch.Tensor, mode: str, norm_length: float, weights: torch.Tensor, group_ids: list[int]
) -> float:
    by_group: dict[int, int] = {}
    for row, group in zip(mask.tolist(), group_ids, strict=True):
        by_group[group] = by_group.get(group, 0) + sum(row)
    prompts = sum(1 for count in by_group.values() if count)
    tokens = sum(1 for row in mask.tolist() for m in row if m)
    samples = sum(1 for row in mask.tolist() if any(row))
    total = 0.0
    for i, row in enumerate(mask.tolist()):
        kept = [float(loss[i, t]) for t, m in enumerate(row) if m]
        if not kept:
            continue
        share = {
            "token-mean": 1.0 / tokens,
            "seq-mean-token-mean": 1.0 / (len(kept) * samples),
            "seq-mean-token-sum": 1.0 / samples,
            "seq-mean-token-sum-norm": 1.0 / (samples * norm_length),
            "prompt-mean": 1.0 / (prompts * by_group[group_ids[i]]),
            "token-sum": 1.0,
        }[mode]
        total += float(weights[i]) * share * sum(kept)
    return total


def inputs_of(batch: Batch, rows: slice | torch.Tensor = slice(None), **changes: object) -> LossInputs:
    names = ("log_probs", "advantages", "mask", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
    columns = {name: getattr(batch, name)[rows] for name in (*names, "sample_weights")}
    return replace(LossInputs(**columns, group_ids=Groups.of(batch.group_ids).index[rows]), **changes)


def whole(batch: Batch) -> LossDenominators:
    groups = Groups.of(batch.group_ids)
    tokens = group_tokens_of(batch.mask, groups.index, len(groups.counts))
    return replace(denominators_from(denominators_of(batch.mask), norm_length=10.0), group_tokens=tokens)
