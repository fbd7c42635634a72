"""Learning from preferences: which of two responses is better (DPO and its relatives), or which are good (KTO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.losses import options_from
from roll.algorithms.preferences import (
    PairSums,
    pair_sums,
    preference_loss,
    preference_metrics,
    slopes,
    unpaired_loss,
    unpaired_metrics,
)
from roll.config.loader import LoadedConfig
from roll.config.losses import PreferenceLossConfig, is_unpaired, loss_rows, needs_mismatched, needs_reference
from roll.datasets.preferences import JudgedColumns, JudgedDataset, JudgedRow, Judgement
from roll.methods.base import MODEL_COLUMNS, Loss, Totals
from roll.methods.preferences_keys import DPOConfig
from roll.methods.rows import Completion, Models, RowMethod, image_column
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics, to_floats
from roll.rollout.groups import token_columns
from roll.strategies.base import Output, TensorBatch

ReferenceLogProbs = list[np.ndarray]
"""Log-probs of each response of a row, float32 (tokens,)."""


@dataclass(frozen=True)
class PairLoss(Loss):
    """The mean loss of the pairs of all ranks.

    Rows come in pairs, the chosen response first, with ``unit_ids`` int64 (B,) equal within a pair, ``ref_log_probs``
    float32 (B, L) where the loss needs a reference, and ``slopes`` float32 (B,) where it couples pairs: the
    derivative of the mean loss by the sum of each row's log-probs, which takes the loss's place.
    """

    options: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    prefix: str = field(default="actor/", kw_only=True)
    columns = (*MODEL_COLUMNS, "unit_ids", "ref_log_probs", "slopes")

    def counts(self, batch: TensorBatch) -> Totals:
        return {"pairs": torch.tensor(len(batch["input_ids"]) / 2)}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        sums = pair_sums(outputs[Output.LOG_PROBS], batch["response_mask"], batch.get("ref_log_probs"))
        slopes = batch.get("slopes")
        # The coupling loss is not a sum over rows, so that micro-batches cannot share it out; its derivative by each
        # row is a number, and sum(slope * log-prob) has the same gradient.
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


class DPO(RowMethod[DPOConfig, JudgedRow]):
    """Learning which of two responses is preferred, or which responses are desirable."""

    frozen_role = "reference"
    stream = "preferences"
    state_key = "pairs"
    dropped_metric = "data/dropped_pairs"
    samples = "pairs"

    def __init__(self, loaded: LoadedConfig[DPOConfig]) -> None:
        super().__init__(loaded)
        self.reference_cache: dict[str, dict[str, ReferenceLogProbs]] = {"train": {}, "validation": {}}
        """By set and the row's id."""

    @cached_property
    def loss(self) -> Loss:
        options = options_from(PreferenceLossConfig, vars(self.config))
        return LabelLoss(options) if is_unpaired(options) else PairLoss(options)

    @classmethod
    def data_set(cls, config: DPOConfig) -> Callable[..., JudgedDataset]:
        """Pairs, or single responses with labels."""
        names = JudgedColumns(
            config.chosen_key, config.rejected_key, responses=config.completion_key, scores=config.label_key
        )
        kind: Judgement = "labels" if is_unpaired(config) else "pairs"
        return partial(JudgedDataset.build, columns=names, judgement=kind)

    def lengths(self, rows: Sequence[JudgedRow]) -> list[int]:
        return [sum(map(len, row.sides)) for row in rows]

    def batch(self, rows: Sequence[JudgedRow], pad: int, ranks: int = 1) -> DataProto:
        return pair_batch(rows, pad)

    def request(self, rows: Sequence[JudgedRow], batch: DataProto, models: Models, of_set: str) -> Completion | None:
        """``ref_log_probs`` float32 (B, L), computed for the rows that the cache does not have."""
        if not needs_reference(self.config):
            return None
        cache = self.reference_cache[of_set]
        # The reference never changes: over several epochs each row is computed once.
        uncached = [row for row in rows if row.row_id not in cache]

        def complete() -> Metrics:
            if uncached:
                with models.phase("ref_log_probs"):
                    cache.update(self.reference_log_probs(uncached, models))
            column = torch.zeros_like(batch.batch["input_ids"], dtype=torch.float32)
            parts = [torch.from_numpy(part) for row in rows for part in cache[row.row_id]]
            column[batch.batch["response_mask"]] = torch.cat(parts)
            batch.batch["ref_log_probs"] = column
            return {}

        return complete

    def reference_log_probs(self, rows: Sequence[JudgedRow], models: Models) -> dict[str, ReferenceLogProbs]:
        """The reference's log-probs of the responses of each row, by the rows' ids."""
        batch = pair_batch(rows, models.pad_token_id)
        flat = models.begin_frozen(batch)()["log_probs"][batch.batch["response_mask"]].numpy()
        ends = np.cumsum([len(part) for row in rows for part in row.responses])
        parts = iter(np.split(flat, ends[:-1]))
        # Copies: a slice in the cache would keep the log-probs of the whole batch in memory.
        return {row.row_id: [next(parts).copy() for _ in row.responses] for row in rows}

    def add_own_columns(self, batch: DataProto, models: Models) -> None:
        """``slopes`` float32 (B,): the derivative of a loss that couples pairs, from a pass over all of them."""
        if not any(row.couples_pairs for row in loss_rows(self.config)):
            return
        sums = self.sums_of(batch, models)
        loss, slope = slopes(sums, self.config)
        models.record({"actor/loss": Mean(float(loss))})
        batch.batch["slopes"] = slope.reshape(-1).float()

    def add_estimates(self, rows: Sequence[JudgedRow], batch: DataProto, models: Models) -> None:
        """``kl`` float32 (B,): KTO's z0, the same for all rows."""
        if not needs_mismatched(self.config):
            return
        with models.phase("kl_estimate"):
            ratio = self.mean_ratio(mismatched(rows, self.config.sequence_length), models)
            # A divergence is not negative, but its estimate from a few responses can be.
            estimate = max(0.0, ratio.value())
            models.record({"actor/kl_estimate": Mean(estimate)})
            batch.batch["kl"] = torch.full((len(batch),), estimate)

    def mean_ratio(self, rows: Sequence[JudgedRow], models: Models) -> Mean:
        """The mean of log pi(y) - log ref(y) over the responses, under the present policy."""
        batch = pair_batch(rows, models.pad_token_id)
        mask = batch.batch["response_mask"]
        own = models.forward(batch)["log_probs"]
        reference = models.begin_frozen(batch)()["log_probs"]
        return Mean(float(((own - reference) * mask).double().sum()), len(mask))

    def sums_of(self, batch: DataProto, models: Models) -> PairSums:
        """The pairs of a batch as numbers under the present policy."""
        log_probs, columns = models.forward(batch)["log_probs"], batch.batch
        reference = columns["ref_log_probs"] if needs_reference(self.config) else None
        return pair_sums(log_probs, columns["response_mask"], reference)

    def measure(self, rows: Sequence[JudgedRow], models: Models) -> dict[str, float]:
        """Loss, accuracy and rewards on all held-out pairs."""
        kl = None
        if needs_mismatched(self.config):
            others = models.parts(mismatched(rows, self.config.sequence_length))
            ratios: list[Metrics] = [{"kl": self.mean_ratio(part, models)} for part in others]
            kl = torch.tensor(max(0.0, merge_metrics(ratios)["kl"].value()))
        batches = (self.held_out_batch(part, models) for part in models.parts(rows))
        return to_floats(merge_metrics([self.measured(batch, kl, models) for batch in batches]))

    def measured(self, batch: DataProto, kl: Tensor | None, models: Models) -> Metrics:
        """Loss, accuracy and rewards of a batch of held-out rows under the present policy."""
        if not is_unpaired(self.config):
            sums = self.sums_of(batch, models)
            return preference_metrics(sums, self.config, preference_loss(sums, self.config), "val/")
        mask, desirable = batch.batch["response_mask"], batch.batch["desirable"]
        own = (models.forward(batch)["log_probs"] * mask).sum(1)
        ratios = own - (batch.batch["ref_log_probs"] * mask).sum(1)
        losses = unpaired_loss(ratios, desirable, kl, self.config)
        return unpaired_metrics(own, ratios, desirable, losses, self.config, "val/")


def pair_batch(rows: Sequence[JudgedRow], pad: int) -> DataProto:
    """Adjacent rows for the responses of each (of a pair the chosen one first), right-padded: ``input_ids`` int64,
    ``attention_mask`` and ``response_mask`` bool (B, L), ``unit_ids`` int64 (B,) the number of the row; of labelled
    responses ``desirable`` bool (B,); and ``images`` where a row has some."""
    sides = [side for row in rows for side in row.sides]
    counts = [len(row.responses) for row in rows]
    prompts = [np.arange(len(side)) >= len(row.prompt_ids) for row in rows for side in row.sides]
    lengths = np.array([len(side) for side in sides])
    tensors = token_columns(lengths, np.concatenate(sides), np.concatenate(prompts), pad)
    tensors["unit_ids"] = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    if rows[0].scores:
        tensors["desirable"] = torch.tensor([score for row in rows for score in row.scores]) > 0.5
    return DataProto.from_dict(tensors, image_column([row.vision for row in rows for _ in row.responses]))


def prompt_key(row: JudgedRow) -> tuple[list[int], tuple[Any, ...]]:
    """Identity of a prompt: its ids and its images."""
    return row.prompt_ids, () if row.vision is None else tuple(row.vision.image_keys)


def mismatched(rows: Sequence[JudgedRow], longest: int) -> list[JudgedRow]:
    """Each prompt with the responses of the next row of another prompt, cut to ``longest`` tokens: samples for KTO's
    estimate of the KL divergence, on which a response says nothing about its prompt (arXiv 2402.01306, sec. 4.1)."""
    found: list[JudgedRow] = []
    for index, row in enumerate(rows):
        others = (rows[(index + step) % len(rows)] for step in range(1, len(rows)))
        # Rows of a single prompt have no other: its own responses are used.
        other = next((one for one in others if prompt_key(one) != prompt_key(row)), row)
        room = longest - len(row.prompt_ids)
        found.append(replace(row, responses=[ids[:room] for ids in other.responses], scores=other.scores))
    return found
