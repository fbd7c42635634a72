"""The run of the rm pipeline: judged responses in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.algorithms.losses import options_from
from roll.algorithms.reward_models import (
    calibration_error,
    comparable_pairs,
    correlation,
    reward_model_loss,
    scoring_batch,
)
from roll.config.losses import JUDGEMENTS, RANKS, SCORE_INPUT, SCORE_MEAN, SCORE_STD, RewardLossConfig
from roll.datasets.preferences import JudgedColumns, JudgedDataset, JudgedRow
from roll.methods.base import VALUES, Loss
from roll.methods.reward_model import RewardModelLoss
from roll.models.partitions import balance_partitions, workload
from roll.pipelines.rm.definition import RMConfig
from roll.pipelines.supervised_pipeline import SupervisedPipeline, image_column
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.strategies.base import ModelHead, Output, TensorBatch
from roll.workers.training import TrainWorker

if TYPE_CHECKING:
    from roll.protocol.vision import VisionInputs

STATISTICS_ROWS = 512
"""Training rows whose scores give mean and deviation where nothing is held out."""


class RMPipeline(SupervisedPipeline[RMConfig, JudgedRow]):
    """Learning to score responses as judges have."""

    role = "reward_train"
    head = ModelHead.SCORE
    stream = "rm"
    state_key = "rows"
    dropped_metric = "data/dropped_rows"

    @cached_property
    def loss(self) -> Loss:
        return RewardModelLoss(options_from(RewardLossConfig, vars(self.config)))

    @classmethod
    def build(cls, config: RMConfig) -> Callable[..., JudgedDataset]:
        columns = JudgedColumns(
            config.chosen_key,
            config.rejected_key,
            config.margin_key,
            config.responses_key,
            config.scores_key,
            config.step_separator,
        )
        judgement, score_input = JUDGEMENTS[config.loss_type], config.score_input
        return partial(JudgedDataset.build, columns=columns, judgement=judgement, score_input=score_input)

    def next_batch(self, step: int) -> DataProto:
        rows = self.rows.next_batch(self.plan.global_batch_size)
        batch = judged_batch(rows, self.learner.dp_size)
        if step % self.config.logging_steps == 0:
            self.context.samples.pairs(step, rows, batch, self.tokenizer)
        return batch

    def scored(self, rows: Sequence[JudgedRow]) -> Iterator[tuple[TensorBatch, torch.Tensor]]:
        """The rows in parts, as batches, with the present values float64 (B, L)."""
        for part in self.parts(rows):
            batch = judged_batch(part, 1)
            values = self.learner.call(TrainWorker.forward, batch, VALUES).result().batch[Output.VALUES]
            yield dict(batch.batch.items()), values.double()

    def measure(self) -> dict[str, float]:
        """Loss, accuracy, calibration and the scores' correlation with length on all held-out rows."""
        options, parts = self.config, list[Metrics]()
        scores, lengths, leads, weights = (list[torch.Tensor]() for _ in range(4))
        for batch, values in self.scored(self.held_out):
            parts.append(reward_model_loss(values, batch, options, 1.0, "val/")[1])
            mask = batch["score_mask"]
            scores.append(values[mask])
            lengths.append(mask.nonzero()[:, 1])
            if options.loss_type in RANKS:
                pairs = comparable_pairs(batch["unit_ids"], batch["targets"], mask.any(1))
                leads.append(scores[-1][pairs.better] - scores[-1][pairs.worse])
                weights.append(pairs.weights)
        metrics = to_floats(merge_metrics(parts))
        found = torch.cat(scores)
        metrics |= {"val/score_mean": float(found.mean()), "val/score_std": float(found.std(correction=0))}
        metrics["val/length_correlation"] = correlation(found.numpy(), torch.cat(lengths).numpy())
        if leads:
            metrics["val/ece"] = calibration_error(torch.cat(leads).numpy(), torch.cat(weights).numpy())
        return metrics

    def facts(self) -> dict[str, Any]:
        """Statistics of its scores, and what it scores."""
        rows = self.held_out or self.training[:STATISTICS_ROWS]
        scores = torch.cat([values[batch["score_mask"]] for batch, values in self.scored(rows)])
        return {
            SCORE_INPUT: self.config.score_input,
            SCORE_MEAN: float(scores.mean()),
            SCORE_STD: float(scores.std(correction=0)),
            "pad_token_id": self.pad_token_id,
        }


def judged_batch(rows: Sequence[JudgedRow], dp_size: int) -> DataProto:
    """All responses to all prompts as :func:`roll.algorithms.reward_models.scoring_batch` has them, with ``unit_ids``
    int64 (B,) the number of the prompt, ``targets`` float32 (B,) or of steps (B, L), and ``margins`` float32 (B,) where
    rows have some.

    Each of ``dp_size`` consecutive equal shares holds whole prompts and like work; where responses do not divide, empty
    rows without a score fill a share. ``images`` where a row has some.
    """
    shares = [list(range(len(rows)))]
    if dp_size > 1:
        costs = [float(workload([len(side) for side in row.sides]).sum()) for row in rows]
        shares = balance_partitions(costs, dp_size, equal_counts=len(rows) % dp_size == 0)
    widest = max(sum(len(rows[index].responses) for index in share) for share in shares)
    entries: list[tuple[list[int], int, int, list[int], list[float], float | None, VisionInputs | None]] = []
    for share in shares:
        filled = len(entries) + widest
        for index in share:
            row = rows[index]
            prompt = len(row.prompt_ids)
            for response, side in enumerate(row.sides):
                ends = [prompt + end for end in row.step_ends] or [len(side)]
                scores = row.scores if row.step_ends else [row.scores[response]]
                entries.append((side, prompt, index, ends, scores, row.margin, row.vision))
        entries += [([0], 2, -1, [], [], None, None)] * (filled - len(entries))
    columns: Any = zip(*entries, strict=True)
    sequences, shared, units, places, targets, margins, images = columns
    tensors = scoring_batch(sequences, shared, places)
    of_steps = any(row.step_ends for row in rows)
    wanted = torch.zeros(tensors["score_mask"].shape)
    wanted[tensors["score_mask"]] = torch.tensor(np.concatenate(targets), dtype=torch.float32)
    tensors["targets"] = wanted if of_steps else wanted.sum(1)
    tensors["unit_ids"] = torch.tensor(units)
    if any(margin is not None for margin in margins):
        tensors["margins"] = torch.tensor([margin or 0.0 for margin in margins])
    return DataProto.from_dict(tensors, image_column(images))
