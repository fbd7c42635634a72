"""Reward models: scores that order responses as judges have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.losses import options_from
from roll.algorithms.reward_models import (
    calibration_error,
    comparable_pairs,
    correlation,
    reward_model_loss,
    scoring_batch,
    units_of,
)
from roll.config.losses import JUDGEMENTS, RANKS, SCORE_INPUT, SCORE_MEAN, SCORE_STD, RewardLossConfig
from roll.datasets.preferences import JudgedColumns, JudgedDataset, JudgedRow
from roll.methods.base import MODEL_COLUMNS, VALUES, Loss, Totals
from roll.methods.reward_model_keys import RMConfig
from roll.methods.rows import Models, RowMethod, image_column
from roll.models.partitions import balance_partitions, workload
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.strategies.base import ModelHead, Output, TensorBatch

if TYPE_CHECKING:
    from roll.protocol.vision import VisionInputs

# Training rows whose scores give mean and deviation where nothing is held out.
STATISTICS_ROWS = 512


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


class RewardModelling(RowMethod[RMConfig, JudgedRow]):
    """Learning to score responses as judges have."""

    head = ModelHead.SCORE
    stream = "rm"
    state_key = "rows"
    dropped_metric = "data/dropped_rows"
    samples = "pairs"

    @cached_property
    def loss(self) -> Loss:
        return RewardModelLoss(options_from(RewardLossConfig, vars(self.config)))

    @classmethod
    def data_set(cls, config: RMConfig) -> Callable[..., JudgedDataset]:
        columns = JudgedColumns(
            config.chosen_key,
            config.rejected_key,
            config.margin_key,
            config.responses_key,
            config.scores_key,
        )
        judgement, score_input = JUDGEMENTS[config.loss_type], config.score_input
        return partial(JudgedDataset.build, columns=columns, judgement=judgement, score_input=score_input)

    def batch(self, rows: Sequence[JudgedRow], pad: int, ranks: int = 1) -> DataProto:
        return judged_batch(rows, ranks)

    def scored(self, rows: Sequence[JudgedRow], models: Models) -> Iterator[tuple[TensorBatch, Tensor]]:
        """The rows in parts, as batches, with the present values float64 (B, L)."""
        for part in models.parts(rows):
            batch = judged_batch(part, 1)
            yield dict(batch.batch.items()), models.forward(batch, VALUES)[Output.VALUES].double()

    def measure(self, rows: Sequence[JudgedRow], models: Models) -> dict[str, float]:
        """Loss, accuracy, calibration and the scores' correlation with length on all held-out rows."""
        options, parts = self.config, list[Metrics]()
        scores, lengths, leads, weights = (list[Tensor]() for _ in range(4))
        for batch, values in self.scored(rows, models):
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

    def facts(self, training: Sequence[JudgedRow], held_out: Sequence[JudgedRow], models: Models) -> dict[str, Any]:
        """Statistics of its scores, and what it scores."""
        parts = self.scored(held_out or training[:STATISTICS_ROWS], models)
        scores = torch.cat([values[batch["score_mask"]] for batch, values in parts])
        return {
            SCORE_INPUT: self.config.score_input,
            SCORE_MEAN: float(scores.mean()),
            SCORE_STD: float(scores.std(correction=0)),
            "pad_token_id": models.pad_token_id,
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
        # Filled up to the widest share, since ranks take equally many rows; without a score mask nothing counts these.
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
