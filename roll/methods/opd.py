"""On-policy distillation: the loss of a student that is compared with teachers on its own samples.

``opd_form: advantage`` needs no loss of its own, since teachers act on advantages; ``topk`` and ``full_vocabulary``
differentiate the divergence of the distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from roll.algorithms.distillation import comparison_metrics
from roll.algorithms.policy_losses import LossInputs
from roll.config.losses import DivergenceConfig
from roll.methods.base import POLICY_COLUMNS, Totals
from roll.methods.distill import TEACHER, comparison, of_teacher
from roll.methods.policy import LOSS_COLUMNS, PolicyLoss
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Comparison, TensorBatch, teacher_columns

TEACHER_INDEX, TEACHER_WEIGHTS = f"{TEACHER}/index", f"{TEACHER}/weights"
"""Columns: int64 (B,) the number of a row's teacher, -1 for none; float32 (B,) the weight of its divergence."""


@dataclass(frozen=True)
class TaughtPolicyLoss(PolicyLoss):
    """:class:`PolicyLoss` plus each row's weighted divergence from its teacher."""

    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    names: tuple[str, ...] = ()
    """Of the teachers, by number."""
    columns = (*POLICY_COLUMNS, *LOSS_COLUMNS, *teacher_columns(TEACHER), TEACHER_INDEX, TEACHER_WEIGHTS)

    @property
    def teachers(self) -> Sequence[Comparison]:
        return (comparison(self.divergence, self.temperature),)

    def inputs(self, outputs: TensorBatch, batch: TensorBatch) -> LossInputs:
        divergence = outputs[f"{TEACHER}/divergence"] * batch[TEACHER_WEIGHTS][:, None]
        return replace(super().inputs(outputs, batch), teacher_divergence=divergence)

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(outputs, batch, totals)
        return loss, metrics | self.teacher_metrics(outputs, batch)

    def teacher_metrics(self, outputs: TensorBatch, batch: TensorBatch) -> Metrics:
        """Of each teacher over the response tokens of its rows: the divergence, and how the distributions compare."""
        metrics: Metrics = {}
        compared = of_teacher(outputs)
        for number, name in enumerate(self.names):
            mask = batch["response_mask"] & (batch[TEACHER_INDEX] == number)[:, None]
            total: Any = (compared["divergence"] * mask).sum().detach()
            tokens: Any = mask.sum()
            metrics[f"opd/{name}/kl"] = Mean(total, tokens)
            metrics |= comparison_metrics(compared, mask, f"opd/{name}/")
        return metrics
