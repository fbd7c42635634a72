"""Reward models: scores that order responses as judges have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithms.reward_models import reward_model_loss, units_of
from roll.config.losses import RewardLossConfig
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch


@dataclass(frozen=True)
class RewardModelLoss(Loss):
    """The mean loss of the prompts (responses, steps) of all ranks; see
    :func:`roll.algorithms.reward_models.reward_model_loss`. Rows of one ``unit_ids`` are adjacent and on one rank."""

    options: RewardLossConfig = field(default_factory=RewardLossConfig)
    prefix: str = field(default="reward/", kw_only=True)
    columns = (*MODEL_COLUMNS, "score_mask", "unit_ids", "targets", "margins")

    @property
    def outputs(self) -> Sequence[Output]:
        return (Output.VALUES,)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"units": torch.tensor(float(units_of(batch, self.options)))}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        units = float(totals["units"])
        return reward_model_loss(outputs[Output.VALUES], batch, self.options, units, self.prefix)
