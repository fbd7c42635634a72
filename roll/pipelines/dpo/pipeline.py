"""The run of the DPO pipeline: pairs in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

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
from roll.config.losses import PreferenceLossConfig, couples_pairs, is_unpaired, needs_mismatched
from roll.datasets.preferences import JudgedColumns, JudgedDataset, JudgedRow, Judgement
from roll.methods.base import Ask, Loss
from roll.methods.preferences import preference_step
from roll.pipelines.dpo.definition import DPOConfig, has_base
from roll.pipelines.model_calls import balanced_order
from roll.pipelines.run_context import WEIGHTS
from roll.pipelines.supervised_pipeline import SupervisedPipeline, image_column, right_padded
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics, to_floats
from roll.strategies.base import Output
from roll.workers.model import ModelWorker

ReferenceLogProbs = dict[str, list[np.ndarray]]


class DPOPipeline(SupervisedPipeline[DPOConfig, JudgedRow]):
    """Learning which of two responses is preferred, or which responses are desirable."""

    role = "actor_train"
    frozen_role = "reference"
    stream = "preferences"
    state_key = "pairs"
    dropped_metric = "data/dropped_pairs"

    def __init__(self, loaded: LoadedConfig[DPOConfig]) -> None:
        super().__init__(loaded)
        self.reference_cache: dict[str, ReferenceLogProbs] = {"train": {}, "validation": {}}
        """The reference's log-probs of the responses, by set and the row's id."""

    @cached_property
    def loss(self) -> Loss:
        return preference_step(options_from(PreferenceLossConfig, vars(self.config)))

    @classmethod
    def build(cls, config: DPOConfig) -> Callable[..., JudgedDataset]:
        """Pairs, or single responses with labels."""
        names = JudgedColumns(
            config.chosen_key, config.rejected_key, responses=config.completion_key, scores=config.label_key
        )
        kind: Judgement = "labels" if is_unpaired(config) else "pairs"
        return partial(JudgedDataset.build, columns=names, judgement=kind)

    def next_batch(self, step: int) -> DataProto:
        drawn = self.rows.next_batch(self.plan.global_batch_size)
        lengths = [sum(map(len, row.sides)) for row in drawn]
        order = balanced_order(lengths, self.learner.dp_size)
        rows = [drawn[index] for index in order.tolist()]
        batch = pair_batch(rows, self.pad_token_id)
        self.add_reference(batch, rows, "train")
        self.add_own_columns(batch)
        if needs_mismatched(self.config):
            with self.context.phase("kl_estimate"):
                self.add_kl(batch, self.mean_ratio(mismatched(drawn, self.config.sequence_length)), "actor/")
        if step % self.config.logging_steps == 0:
            self.context.samples.pairs(step, rows, batch, self.tokenizer)
        return batch

    def add_reference(self, batch: DataProto, rows: Sequence[JudgedRow], of_set: str) -> None:
        """``ref_log_probs`` float32 (B, L), computed for the rows that the cache does not have."""
        if not self.plan.needs_reference:
            return
        cache = self.reference_cache[of_set]
        uncached = [row for row in rows if row.row_id not in cache]
        if uncached:
            with self.context.phase("ref_log_probs"):
                cache |= self.reference_log_probs(uncached)
        column = torch.zeros_like(batch.batch["input_ids"], dtype=torch.float32)
        parts = [torch.from_numpy(part) for row in rows for part in cache[row.row_id]]
        column[batch.batch["response_mask"]] = torch.cat(parts)
        batch.batch["ref_log_probs"] = column
        if not self.config.cache_reference:
            cache.clear()

    def add_own_columns(self, batch: DataProto) -> None:
        """``slopes`` float32 (B,): the derivative of a loss that couples pairs, from a pass over all of them."""
        if not couples_pairs(self.config):
            return
        sums = self.sums_of(batch)
        loss, slope = slopes(sums, self.config)
        self.context.record({"actor/loss": Mean(float(loss))})
        batch.batch["slopes"] = slope.reshape(-1).float()

    def reference_log_probs(self, rows: Sequence[JudgedRow]) -> ReferenceLogProbs:
        """The reference's log-probs of the responses of each row, float32 (tokens,), by the rows' ids."""
        batch = pair_batch(rows, self.pad_token_id)
        flat = self.computed(batch, True).batch["log_probs"][batch.batch["response_mask"]].numpy()
        ends = np.cumsum([len(part) for row in rows for part in row.responses])
        parts = iter(np.split(flat, ends[:-1]))
        return {row.row_id: [next(parts).copy() for _ in row.responses] for row in rows}

    def mean_ratio(self, rows: Sequence[JudgedRow]) -> Mean:
        """The mean of log pi(y) - log ref(y) over the responses, under the present policy."""
        batch = pair_batch(rows, self.pad_token_id)
        mask = batch.batch["response_mask"]
        own, reference = (self.computed(batch, of_reference).batch["log_probs"] for of_reference in (False, True))
        return Mean(float(((own - reference) * mask).double().sum()), len(mask))

    def add_kl(self, batch: DataProto, ratio: Mean, prefix: str) -> None:
        """``kl`` float32 (B,): KTO's z0, the same for all rows."""
        estimate = max(0.0, ratio.value())
        self.context.record({f"{prefix}kl_estimate": Mean(estimate)})
        batch.batch["kl"] = torch.full((len(batch),), estimate)

    def computed(self, batch: DataProto, of_reference: bool, outputs: tuple[Output, ...] = ()) -> DataProto:
        """Columns that the policy or the reference computes, without gradient."""
        without_adapters = of_reference and self.frozen is None
        cluster = self.frozen if of_reference and self.frozen is not None else self.learner
        assert not without_adapters or has_base(self.config), "checked when the file is loaded"

        def work() -> DataProto:
            self.residency.bring({cluster.name: WEIGHTS})
            ask = Ask((Output.LOG_PROBS, *outputs), without_adapters=without_adapters)
            return cluster.call(ModelWorker.forward, batch, ask).result()

        if cluster is self.learner:
            return work()
        return self.context.replacing(cluster, partial(cluster.call_all, ModelWorker.initialize, 0), work)

    def sums_of(self, batch: DataProto) -> PairSums:
        """The pairs of a batch as numbers under the present policy."""
        squares = (Output.SUM_OF_SQUARES,) if self.config.use_weighting else ()
        outputs = self.computed(batch, False, squares).batch
        columns = batch.batch
        reference = columns["ref_log_probs"] if self.plan.needs_reference else None
        mask = columns["response_mask"]
        return pair_sums(outputs["log_probs"], mask, reference, self.config, outputs.get(Output.SUM_OF_SQUARES))

    def measure(self) -> dict[str, float]:
        """Loss, accuracy and rewards on all held-out pairs."""
        kl = None
        if needs_mismatched(self.config):
            others = self.parts(mismatched(self.held_out, self.config.sequence_length))
            ratios: list[Metrics] = [{"kl": self.mean_ratio(part)} for part in others]
            kl = torch.tensor(max(0.0, merge_metrics(ratios)["kl"].value()))
        measured: list[Metrics] = []
        for rows in self.parts(self.held_out):
            batch = pair_batch(rows, self.pad_token_id)
            self.add_reference(batch, rows, "validation")
            measured.append(self.measured(batch, kl))
        return to_floats(merge_metrics(measured))

    def measured(self, batch: DataProto, kl: torch.Tensor | None) -> Metrics:
        """Loss, accuracy and rewards of a batch of held-out rows under the present policy."""
        if not is_unpaired(self.config):
            sums = self.sums_of(batch)
            return preference_metrics(sums, self.config, preference_loss(sums, self.config), "val/")
        mask, desirable = batch.batch["response_mask"], batch.batch["desirable"]
        own = (self.computed(batch, False).batch["log_probs"] * mask).sum(1)
        ratios = own - (batch.batch["ref_log_probs"] * mask).sum(1)
        losses = unpaired_loss(ratios, desirable, kl, self.config)
        return unpaired_metrics(own, ratios, desirable, losses, self.config, "val/")


def pair_batch(rows: Sequence[JudgedRow], pad: int) -> DataProto:
    """Adjacent rows for the responses of each (of a pair the chosen one first), right-padded: ``input_ids`` int64,
    ``attention_mask`` and ``response_mask`` bool (B, L), ``unit_ids`` int64 (B,) the number of the row; of labelled
    responses ``desirable`` bool (B,); and ``images`` where a row has some."""
    sides = [side for row in rows for side in row.sides]
    counts = [len(row.responses) for row in rows]
    input_ids, attention_mask = right_padded(sides, pad)
    prompts = np.repeat([len(row.prompt_ids) for row in rows], counts)
    in_response = np.arange(attention_mask.shape[1]) >= prompts[:, None]
    tensors: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "response_mask": torch.from_numpy(attention_mask & in_response),
        "unit_ids": torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)),
    }
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
        other = next((one for one in others if prompt_key(one) != prompt_key(row)), row)
        room = longest - len(row.prompt_ids)
        found.append(replace(row, responses=[ids[:room] for ids in other.responses], scores=other.scores))
    return found
