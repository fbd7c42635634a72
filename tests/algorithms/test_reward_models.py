"""Reward-model losses and measures against plain loops in float64, one pair at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.reward_models import (
    calibration_error,
    correlation,
    reward_model_loss,
    units_of,
)
from roll.config.losses import RewardLossConfig
from roll.protocol.metrics import Deviation, merge_metrics
from tests.algorithms.test_preferences import log_sigmoid

UNITS = [0, 0, 0, 0, 1, 1, 2, 2, 2, -1]
"""Four, two and three responses, and a row that fills the batch."""
TARGETS = [2.0, 1.0, 0.0, 0.0, 1.0, 0.0, 3.0, 3.0, 3.0, 0.0]
MARGINS = [0.0, 0.0, 0.0, 0.0, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0]
LENGTH = 7


def rows(seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(UNITS), LENGTH, generator=generator, dtype=torch.float64)
    mask = torch.zeros(len(UNITS), LENGTH, dtype=torch.bool)
    ends = torch.randint(2, LENGTH, (len(UNITS),), generator=generator)
    mask[torch.arange(len(UNITS)), ends] = True
    mask[-1] = False
    batch = {
        "score_mask": mask,
        "unit_ids": torch.tensor(UNITS),
        "targets": torch.tensor(TARGETS),
        "margins": torch.tensor(MARGINS),
    }
    return values.requires_grad_(), batch


def plain_ranking(values: torch.Tensor, batch: dict[str, torch.Tensor], o: RewardLossConfig) -> tuple[float, float]:
    """Loss and accuracy, prompt by prompt."""
    losses, right = [], []
    for unit in (0, 1, 2):
        of_pair = []
        for i, first in enumerate(UNITS):
            for j, second in enumerate(UNITS):
                if first == second == unit and TARGETS[i] > TARGETS[j]:
                    scores = [float(values[k][batch["score_mask"][k]].detach()) for k in (i, j)]
                    lead = scores[0] - scores[1] - MARGINS[i]
                    loss = -(1 - o.label_smoothing) * log_sigmoid(lead) - o.label_smoothing * log_sigmoid(-lead)
                    of_pair.append(
                        (loss + o.center_rewards_coefficient * sum(scores) ** 2, float(scores[0] > scores[1]))
                    )
        if of_pair:  # the third prompt's responses are all as good as each other
            losses.append(sum(loss for loss, _ in of_pair) / len(of_pair))
            right.append(sum(was for _, was in of_pair) / len(of_pair))
    return sum(losses) / len(losses), sum(right) / len(right)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "center_rewards_coefficient": 0.3}])
def test_rankings_are_a_plain_loop_however_they_are_divided(options: dict[str, Any]) -> None:
    settings = RewardLossConfig(**options)
    values, batch = rows()
    units = units_of(batch, settings)
    assert units == pytest.approx(2)
    loss, metrics = reward_model_loss(values, batch, settings, units, "")
    wanted, accuracy = plain_ranking(values, batch, settings)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-12)
    assert metrics["loss"].value() == pytest.approx(wanted, rel=1e-12)
    assert metrics["acc"].value() == pytest.approx(accuracy, rel=1e-12)
    found = {name for name in metrics if name.startswith("acc_margin/")}
    assert found == {"acc_margin/to_0.5", "acc_margin/1_to_2"}, "margins of 0 and 1.5"
    (gradient,) = torch.autograd.grad(loss, values)
    assert not gradient[~batch["score_mask"]].any() and not gradient[6:].any()

    parts = []
    for begin, end in ((0, 4), (4, 6), (6, 10)):
        part = {name: column[begin:end] for name, column in batch.items()}
        parts.append(reward_model_loss(values[begin:end], part, settings, units, ""))
    summed = sum(part for part, _ in parts)
    assert torch.allclose(torch.autograd.grad(summed, values)[0], gradient, rtol=1e-12)
    merged = merge_metrics(part for _, part in parts)
    assert {k: m.value() for k, m in merged.items()} == pytest.approx({k: m.value() for k, m in metrics.items()})


POINTS = {
    "regression": lambda score, target: (score - target) ** 2,
    "process": lambda score, target: -target * log_sigmoid(score) - (1 - target) * log_sigmoid(-score),
}


@pytest.mark.parametrize("name", POINTS)
def test_points_are_a_plain_loop(name: str) -> None:
    settings = RewardLossConfig(loss_type=name)  # type: ignore[arg-type]
    values, batch = rows(1)
    if name == "process":
        batch["score_mask"][0, 1:4] = True
        batch["targets"] = (torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) > 0.4).float()
        batch["targets"][1] = 0.25
    scores = [(float(values[i, t].detach()), i, t) for i, t in batch["score_mask"].nonzero().tolist()]
    targets = [float(batch["targets"][i, t] if name == "process" else batch["targets"][i]) for _, i, t in scores]
    wanted = [POINTS[name](score, target) for (score, _, _), target in zip(scores, targets, strict=True)]
    units = units_of(batch, settings)
    assert units == len(scores)
    loss, metrics = reward_model_loss(values, batch, settings, units, "")
    assert float(loss.detach()) == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)
    assert metrics["loss"].value() == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)


def test_calibration_error_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    leads, weights = rng.normal(size=200), rng.uniform(0.1, 1, size=200)
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for lead, weight in zip(leads.tolist(), weights.tolist(), strict=True):
        confidence = 1 / (1 + math.exp(-abs(lead)))
        bins.setdefault(min(int((confidence - 0.5) * 20), 9), []).append((weight, float(lead > 0), confidence))
    gaps = [abs(sum(w * (right - sure) for w, right, sure in of_bin)) for of_bin in bins.values()]
    assert calibration_error(leads, weights) == pytest.approx(sum(gaps) / weights.sum(), rel=1e-12)
    sure = np.full(50, 20.0)
    assert calibration_error(sure, np.ones(50)) == pytest.approx(0, abs=1e-8)
    assert calibration_error(-sure, np.ones(50)) == pytest.approx(1, abs=1e-8)


def test_correlation_is_pearsons() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=30)
    y = x + rng.normal(size=30)
    assert correlation(x, y) == pytest.approx(float(np.corrcoef(x, y)[0, 1]), rel=1e-12)
    assert correlation(x, np.ones(30)) == 0.0


def test_a_deviation_merges_exactly() -> None:
    values = torch.tensor([1.0, 4.0, 4.0, 7.0])
    ones = torch.ones(4, dtype=torch.float64)
    parts = [Deviation.of(values[:1], ones[:1]), Deviation.of(values[1:], ones[1:])]
    assert parts[0].merge(parts[1]).value() == pytest.approx(float(values.double().std(correction=0)), rel=1e-12)
