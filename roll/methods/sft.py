"""Supervised fine-tuning: imitation of demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from roll.methods.base import Loss, Totals
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Output, TensorBatch


@dataclass(frozen=True)
class SftLoss(Loss):
    """The mean of -log pi(y_t | y_<t) over the response tokens of all ranks."""

    prefix: str = field(default="sft_train/", kw_only=True)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"tokens": batch["response_mask"].sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        mask = batch["response_mask"]
        nll = -(outputs[Output.LOG_PROBS] * mask).sum()
        loss = nll / max(float(totals["tokens"]), 1.0)
        return loss, {f"{self.prefix}loss": Mean(float(nll.detach()), float(mask.sum()))}
