"""Distillation: a student learns the distributions of a teacher on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from roll.algorithms.distillation import comparison_metrics, divergence
from roll.config.losses import DivergenceConfig
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Comparison, Output, TensorBatch, teacher_columns

TEACHER = "teacher"
"""The role, and the beginning of the names of its columns and outputs."""


def comparison(options: DivergenceConfig, temperature: float) -> Comparison:
    """The teacher whose columns a batch has, compared by the divergence that ``options`` choose."""
    return Comparison(TEACHER, temperature, partial(_divergence, options))


def _divergence(options: DivergenceConfig, student: Tensor, teacher: Tensor, has_tail: bool) -> Tensor:
    return divergence(student, teacher, options, has_tail)


def of_teacher(outputs: TensorBatch) -> TensorBatch:
    """Outputs of the comparison by their own names."""
    return {name.removeprefix(f"{TEACHER}/"): values for name, values in outputs.items()}


@dataclass(frozen=True)
class DistillLoss(Loss):
    """(1 - w) NLL + w divergence, each the mean over the response tokens of all ranks."""

    options: DivergenceConfig = field(default_factory=DivergenceConfig)
    weight: float = 0.5
    """w."""
    prefix: str = field(default="student/", kw_only=True)
    columns = (*MODEL_COLUMNS, *teacher_columns(TEACHER))

    @property
    def teachers(self) -> Sequence[Comparison]:
        return (comparison(self.options, self.options.kd_temperature),)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"tokens": batch["response_mask"].sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        mask = batch["response_mask"]
        nll = -(outputs[Output.LOG_PROBS] * mask).sum()
        kd = (outputs[f"{TEACHER}/divergence"] * mask).sum()
        total = (1.0 - self.weight) * nll + self.weight * kd
        sums = {"loss": total, "nll": nll, "kd_loss": kd}
        means: Any = {f"{self.prefix}{name}": (value.detach(), mask.sum()) for name, value in sums.items()}
        metrics: Metrics = {name: Mean(*mean) for name, mean in means.items()}
        metrics |= comparison_metrics(of_teacher(outputs), mask, self.prefix)
        return total / max(float(totals["tokens"]), 1.0), metrics
