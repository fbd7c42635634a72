"""The worker of a model that learns from preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from roll.algorithms.preferences import pair_sums, preference_loss, preference_metrics
from roll.config.preferences import PreferenceLossConfig
from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch
from roll.workers.model import MODEL_COLUMNS, ModelSettings
from roll.workers.training import TrainingWorker

PAIR_COLUMNS = ("unit_ids", "ref_log_probs", "slopes")


@dataclass(frozen=True)
class PreferenceSettings(ModelSettings):
    """The loss of ``actor_train``."""

    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


class PreferenceWorker(TrainingWorker):
    """``actor_train`` of a DPO run on one rank."""

    settings_class = PreferenceSettings
    settings: PreferenceSettings

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS + PAIR_COLUMNS)
    def update(self, batch: DataProto) -> Metrics:
        """Collective. One optimizer step on the mean loss of the pairs of all ranks.

        Args:
            batch: rows in pairs, the chosen response first; ``unit_ids`` int64 (B,) equal within a pair;
                ``ref_log_probs`` float32 (B, L) where the loss asks for a reference; ``slopes`` float32 (B,) in place
                of the loss: the derivative of the mean loss by the sum of each row's log-probs.
        """
        options = self.settings.loss
        pairs = self.strategy.all_reduce_sum(torch.tensor([len(batch) / 2], dtype=torch.float64)).item()
        outputs = [Output.LOG_PROBS] + ([Output.SUM_OF_SQUARES] if options.use_weighting else [])
        loss = partial(preference_update_loss, options=options, pairs=pairs)
        return self.optimizer_step(batch.batch, loss, outputs, 1.0, prefix="actor/")


def preference_update_loss(
    outputs: TensorBatch, batch: TensorBatch, options: PreferenceLossConfig, pairs: float
) -> tuple[torch.Tensor, Metrics]:
    """The preference loss as a strategy's :class:`~roll.strategies.base.LossFunction`; ``pairs`` over all ranks."""
    sums = pair_sums(
        outputs[Output.LOG_PROBS],
        batch["response_mask"],
        batch.get("ref_log_probs"),
        options,
        outputs.get(Output.SUM_OF_SQUARES),
    )
    slopes = batch.get("slopes")
    if slopes is not None:  # of the mean over all pairs
        return (sums.policy * slopes.view(-1, 2)).sum(), preference_metrics(sums, options, None, "actor/")
    losses = preference_loss(sums, options)
    return losses.sum() / pairs, preference_metrics(sums, options, losses, "actor/")
