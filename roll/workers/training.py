"""Workers whose model learns: what actor, critic and SFT share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from roll.algorithms.aggregation import LossDenominators, denominators_from, denominators_of, group_tokens_of
from roll.distributed import Dispatch, register
from roll.protocol.metrics import Metrics
from roll.strategies.base import LossFunction, Output, TensorBatch
from roll.workers.model import ModelWorker

STEP_METRICS = ("grad_norm", "lr", "loss_scale", "tokens_per_micro_batch", "padding_ratio")


class TrainingWorker(ModelWorker):
    """A model that learns on one rank."""

    def denominators(
        self,
        masks: list[torch.Tensor],
        norm_length: float | None = None,
        groups: tuple[list[torch.Tensor], int] | None = None,
    ) -> list[LossDenominators]:
        """Collective. Of each mini-batch, summed over all ranks, from the loss masks of this rank's shares.

        Args:
            groups: the ids of each mini-batch's rows and their number, where the loss is aggregated by prompts.
        """
        local = torch.stack([denominators_of(mask) for mask in masks])
        totals = [denominators_from(summed, norm_length) for summed in self.strategy.all_reduce_sum(local).unbind()]
        if groups is None:
            return totals
        ids, number = groups
        tokens = torch.stack([group_tokens_of(mask, of, number) for mask, of in zip(masks, ids, strict=True)])
        by_mini_batch = zip(totals, self.strategy.all_reduce_sum(tokens).unbind(), strict=True)
        return [replace(total, group_tokens=summed) for total, summed in by_mini_batch]

    def optimizer_step(
        self, batch: TensorBatch, loss: LossFunction, outputs: Collection[Output], temperature: float, prefix: str
    ) -> Metrics:
        """Collective. One optimizer step; what the strategy itself reports stands under ``prefix``."""
        metrics = self.strategy.train_step(batch, loss, outputs, temperature)
        return {prefix + name if name in STEP_METRICS else name: metric for name, metric in metrics.items()}

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Collective. Everything needed to continue, written into the folder ``path``; see :meth:`checkpoint_saved`."""
        self.strategy.save(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_saved(self, wait: bool) -> bool:
        """Whether this rank's part of what :meth:`save_checkpoint` was given is on disk; with ``wait``, it is."""
        return self.strategy.saved(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Collective. The inverse of :meth:`save_checkpoint`."""
        self.strategy.load(Path(path))


def mini_batches(batch: TensorBatch, count: int) -> list[TensorBatch]:
    """Cut this rank's rows into ``count`` consecutive mini-batches of equal size."""
    total = len(batch["input_ids"])
    assert total % count == 0, f"{total} rows do not divide into {count} mini-batches"
    rows = total // count
    return [{k: v[begin : begin + rows] for k, v in batch.items()} for begin in range(0, total, rows)]
