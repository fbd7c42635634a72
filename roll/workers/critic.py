"""The value model's worker."""

from __future__ import annotations

from functools import partial

import torch

from roll.algorithms.aggregation import LossDenominators, needs_groups
from roll.algorithms.losses import value_loss
from roll.distributed import Dispatch, register
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics
from roll.strategies.base import ModelHead, Output, TensorBatch
from roll.workers.model import MODEL_COLUMNS
from roll.workers.training import TrainingWorker, mini_batches


class CriticWorker(TrainingWorker):
    """``critic`` on one rank. ``context.extra["loss"]``: ``value_clip``, which bounds the change of a value in one
    update, ``value_loss_type``, and ``loss_agg_mode``, the key ``value_loss_agg_mode``."""

    head = ModelHead.VALUE

    @register(Dispatch.DP_MP_COMPUTE, columns=MODEL_COLUMNS)
    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` float32 (B, L): the value of the state in which each response token was sampled."""
        return DataProto.from_dict(self.strategy.forward(batch.batch, [Output.VALUES]))

    @register(Dispatch.DP_MP_COMPUTE, columns=(*MODEL_COLUMNS, "loss_mask", "values", "returns", "group_ids"))
    def update(self, batch: DataProto) -> Metrics:
        """Collective. ``meta_info["mini_batches"]`` optimizer steps over the rows, ``meta_info["epochs"]`` times."""
        shares = mini_batches(batch.batch, batch.meta_info["mini_batches"])
        groups = None
        if needs_groups(self.context.extra["loss"]["loss_agg_mode"]):
            groups = [share["group_ids"] for share in shares], int(batch.meta_info["num_groups"])
        masks = [share["loss_mask"] for share in shares]
        denominators = self.denominators(masks, batch.meta_info["norm_length"], groups)
        metrics = []
        for _ in range(batch.meta_info["epochs"]):
            for share, denominator in zip(shares, denominators, strict=True):
                loss = partial(value_update_loss, **self.context.extra["loss"], denominators=denominator)
                metrics.append(self.optimizer_step(share, loss, [Output.VALUES], 1.0, prefix="critic/"))
        return merge_metrics(metrics)


def value_update_loss(
    outputs: TensorBatch,
    batch: TensorBatch,
    value_clip: float | None,
    value_loss_type: str,
    loss_agg_mode: str,
    denominators: LossDenominators,
) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss as a strategy's :class:`~roll.strategies.base.LossFunction`."""
    result = value_loss(
        values=outputs[Output.VALUES],
        old_values=batch["values"],
        returns=batch["returns"],
        mask=batch["loss_mask"],
        value_clip=value_clip,
        value_loss_type=value_loss_type,
        loss_agg_mode=loss_agg_mode,
        denominators=denominators,
        group_ids=batch.get("group_ids"),
    )
    return result.loss, result.metrics
