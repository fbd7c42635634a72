"""The worker of supervised learning from demonstrations."""

from __future__ import annotations

from functools import partial

import torch

from roll.algorithms.aggregation import LossDenominators
from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Output, TensorBatch
from roll.workers.model import MODEL_COLUMNS
from roll.workers.training import TrainingWorker


class SftWorker(TrainingWorker):
    """``sft_train`` on one rank."""

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean negative log-likelihood of the response tokens of all ranks."""
        (denominators,) = self.denominators([batch.batch["response_mask"]])
        loss = partial(negative_log_likelihood, denominators=denominators)
        return self.optimizer_step(batch.batch, loss, [Output.LOG_PROBS], 1.0, prefix="sft_train/")

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def evaluate(self, batch: DataProto) -> Metrics:
        """Collective. Mean negative log-likelihood of the response tokens."""
        log_probs = self.strategy.forward(batch.batch, [Output.LOG_PROBS])[Output.LOG_PROBS]
        tokens = float(batch.batch["response_mask"].sum())
        return {"val/loss": Mean(-float(log_probs.sum()), tokens)}


def negative_log_likelihood(
    outputs: TensorBatch, batch: TensorBatch, denominators: LossDenominators
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean negative log-likelihood as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    mask = batch["response_mask"]
    total = -(outputs[Output.LOG_PROBS] * mask).sum()
    return total / max(denominators.tokens, 1.0), {"sft_train/loss": Mean(float(total.detach()), float(mask.sum()))}
