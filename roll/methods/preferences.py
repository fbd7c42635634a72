"""Learning from preferences: which of two responses is better (DPO and its relatives), or which are good (KTO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithms.preferences import (
    pair_sums,
    preference_loss,
    preference_metrics,
    unpaired_loss,
    unpaired_metrics,
)
from roll.config.losses import PreferenceLossConfig, is_unpaired
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.protocol.metrics import Metrics
from roll.strategies.base import Output, TensorBatch


@dataclass(frozen=True)
class PairLoss(Loss):
    """The mean loss of the pairs of all ranks.

    Rows come in pairs, the chosen response first, with ``unit_ids`` int64 (B,) equal within a pair, ``ref_log_probs``
    float32 (B, L) where the loss asks for a reference, and ``slopes`` float32 (B,) where it couples pairs: the
    derivative of the mean loss by the sum of each row's log-probs, which takes the loss's place.
    """

    options: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    prefix: str = field(default="actor/", kw_only=True)
    columns = (*MODEL_COLUMNS, "unit_ids", "ref_log_probs", "slopes")

    @property
    def outputs(self) -> Sequence[Output]:
        return (Output.LOG_PROBS, Output.SUM_OF_SQUARES) if self.options.use_weighting else (Output.LOG_PROBS,)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"pairs": torch.tensor(len(batch["input_ids"]) / 2)}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        squares = outputs.get(Output.SUM_OF_SQUARES)
        reference = batch.get("ref_log_probs")
        sums = pair_sums(outputs[Output.LOG_PROBS], batch["response_mask"], reference, self.options, squares)
        slopes = batch.get("slopes")
        if slopes is not None:
            loss = (sums.policy * slopes.view(-1, 2)).sum()
            return loss, preference_metrics(sums, self.options, None, self.prefix)
        losses = preference_loss(sums, self.options)
        return losses.sum() / float(totals["pairs"]), preference_metrics(sums, self.options, losses, self.prefix)


@dataclass(frozen=True)
class LabelLoss(Loss):
    """The mean loss of the labelled responses of all ranks (KTO); rows without a response only fill a batch.

    Rows have ``ref_log_probs`` float32 (B, L), ``desirable`` bool (B,), and ``kl`` float32 (B,), the same for all.
    """

    options: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    prefix: str = field(default="actor/", kw_only=True)
    columns = (*MODEL_COLUMNS, "ref_log_probs", "desirable", "kl")

    def counts(self, batch: TensorBatch) -> Totals:
        return {"rows": batch["response_mask"].any(1).sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        mask, options = batch["response_mask"], self.options
        real, kl = mask.any(1), batch.get("kl")
        log_probs = (outputs[Output.LOG_PROBS] * mask).sum(1)[real]
        ratios = log_probs - (batch["ref_log_probs"] * mask).sum(1)[real]
        desirable = batch["desirable"][real]
        losses = unpaired_loss(ratios, desirable, None if kl is None else kl[real], options)
        metrics = unpaired_metrics(log_probs, ratios, desirable, losses, options, self.prefix)
        return losses.sum() / float(totals["rows"]), metrics


def preference_step(options: PreferenceLossConfig) -> Loss:
    """The loss that ``preference_loss`` names."""
    return LabelLoss(options) if is_unpaired(options) else PairLoss(options)
