"""The run of the rm pipeline: judged responses in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.algorithms.reward_models import (
    calibration_error,
    comparable_pairs,
    correlation,
    reward_model_loss,
)
from roll.config.loader import LoadedConfig
from roll.config.reward_models import JUDGEMENTS, RANKS, SCORE_INPUT, SCORE_MEAN, SCORE_STD
from roll.config.roles import DataArguments
from roll.datasets import EpochOrder, ShuffledEpochs
from roll.datasets.rankings import JudgedColumns, JudgedDataset, JudgedRow
from roll.distributed import Cluster, ResourceManager
from roll.models.partitions import balance_partitions, workload
from roll.models.scoring import scoring_batch
from roll.pipelines.batches import RecordedBatch, is_left_out
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.rm.config import RMConfig, RMPlan
from roll.pipelines.run_context import RunContext
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics, to_floats
from roll.strategies.base import Output, TensorBatch
from roll.workers import REWARD_TRAIN_WORKER
from roll.workers.model import ModelWorker
from roll.workers.supervised import RewardTrainSettings, RewardTrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATISTICS_ROWS = 512
"""Training rows whose scores give mean and deviation where nothing is held out."""


class RMPipeline:
    """A run, from start to summary. A step is one optimizer step."""

    def __init__(self, loaded: LoadedConfig[RMConfig]) -> None:
        assert isinstance(loaded.plan, RMPlan)
        self.config = loaded.config
        self.plan = loaded.plan
        self.context = RunContext(loaded)
        self.held_out: Sequence[JudgedRow] = ()

    def run(self) -> None:
        """Train for all steps; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            first_step = self.start(resources)
            self.context.save_when_interrupted(self.state_dict, self.save)
            for step in self.context.steps(first_step, self.num_steps):
                self.train_one_step(step)
                self.pause(step + 1)
            self.finish()

    def start(self, resources: ResourceManager) -> int:
        """Start the cluster, read the data, continue from a checkpoint if there is one; the steps already done."""
        role = self.plan.roles["reward_train"].section
        self.reward_train = Cluster(
            "reward_train",
            role.worker_cls or REWARD_TRAIN_WORKER,
            resources,
            role,
            seed=self.config.seed,
            settings=RewardTrainSettings(self.config.max_grad_norm, loss=self.config),
            rpc_timeout=self.config.rpc_timeout,
        )
        self.context.watch([self.reward_train])
        self.load_data()
        self.reward_train.call_all(ModelWorker.initialize, self.num_steps).result()
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is None:
            return 0
        self.reward_train.call_all(RewardTrainWorker.load_checkpoint, str(checkpoint.role("reward_train"))).result()
        self.rows.load_state_dict(self.context.load_state(checkpoint)["rows"])
        return checkpoint.step

    def load_data(self) -> None:
        """Read the rows; the number of steps follows from them where the file does not say it."""
        config, model_args = self.config, self.config.reward_train.model_args
        tokenizer = load_tokenizer(self.plan.roles["reward_train"].model_path, model_args.trust_remote_code)
        self.tokenizer = tokenizer
        self.training = read_judged(config, self.plan.data_args, tokenizer)
        if self.plan.val_data_args is not None:
            self.held_out = read_judged(config, self.plan.val_data_args, tokenizer)
        order = EpochOrder.of(self.plan.data_args, len(self.training), config.seed, "rm", self.training.difficulties)
        self.rows = ShuffledEpochs(self.training, config.seed, "rm", order=order)
        epochs = config.reward_train.training_args.num_train_epochs
        self.num_steps = config.max_steps or ceil(len(self.training) * epochs / self.plan.global_batch_size)
        counts = self.training.counts
        self.context.record({"data/dropped_rows": Mean(sum(counts.too_long.values()) + counts.bad)})

    def train_one_step(self, step: int) -> None:
        """One optimizer step on the next rows."""
        rows = self.rows.next_batch(self.plan.global_batch_size)
        batch = judged_batch(rows, self.reward_train.dp_size)
        if step % self.config.logging_steps == 0:
            self.context.samples.pairs(step, rows, batch, self.tokenizer)
        self.context.hold_batch(step, batch)
        if not is_left_out(step):
            self.update(batch)
        self.context.end_step(step)

    def update(self, batch: DataProto) -> None:
        """One optimizer step."""
        with self.context.phase("step_train"):
            self.context.record(self.reward_train.call(RewardTrainWorker.update, batch).result())

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Take the step of a recorded batch again; the steps that the model had done before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            self.context.recorded()
            self.update(recorded.batch)
            return steps, self.context.recorded()

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.held_out and self.plan.eval_steps and steps_done % self.plan.eval_steps == 0:
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1):
            self.save(steps_done, self.state_dict())

    def scored(self, rows: Sequence[JudgedRow]) -> Iterator[tuple[TensorBatch, torch.Tensor]]:
        """The rows in parts, as batches, with the present values float64 (B, L)."""
        size = self.config.reward_train.infer_batch_size * self.reward_train.world_size
        for begin in range(0, len(rows), size):
            batch = judged_batch(rows[begin : begin + size], 1)
            values = self.reward_train.call(RewardTrainWorker.compute_scores, batch).result().batch[Output.VALUES]
            yield dict(batch.batch.items()), values.double()

    def evaluate(self, steps_done: int) -> None:
        """Loss, accuracy, calibration and the scores' correlation with length on all held-out rows."""
        options, parts = self.config, list[Metrics]()
        scores, lengths, leads, weights = (list[torch.Tensor]() for _ in range(4))
        with self.context.phase("val_step"), self.context.interruptible():
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
        self.context.record_validation(metrics, steps_done)

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``steps_done`` steps, with what the driver must remember."""
        with self.context.writing_checkpoint(steps_done, state, [self.reward_train]) as path:
            self.reward_train.call_all(RewardTrainWorker.save_checkpoint, str(path / "reward_train")).result()

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        return {"rows": self.rows.state_dict()}

    def finish(self) -> None:
        """A last evaluation, the trained model in Hugging Face format with the statistics of its scores, and the
        summary."""
        if self.held_out and self.plan.eval_steps and self.num_steps % self.plan.eval_steps:
            self.evaluate(self.num_steps)
        if self.config.reward_train.training_args.save_hf_model:
            rows = self.held_out or self.training[:STATISTICS_ROWS]
            scores = torch.cat([values[batch["score_mask"]] for batch, values in self.scored(rows)])
            facts = {
                SCORE_INPUT: self.config.score_input,
                SCORE_MEAN: float(scores.mean()),
                SCORE_STD: float(scores.std(correction=0)),
                "pad_token_id": pad_token_id(self.tokenizer),
            }
            export_model(self.reward_train, self.tokenizer, self.plan.output_dir / "model", facts)
        self.context.finish(self.num_steps)


def read_judged(config: RMConfig, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> JudgedDataset:
    """One set, rendered as the configuration says."""
    columns = JudgedColumns(
        config.chosen_key,
        config.rejected_key,
        config.margin_key,
        config.responses_key,
        config.scores_key,
        config.step_separator,
    )
    return JudgedDataset.build(
        data_args,
        tokenizer,
        config.sequence_length,
        columns,
        JUDGEMENTS[config.loss_type],
        score_input=config.score_input,
        global_template=config.global_template,
    )


def judged_batch(rows: Sequence[JudgedRow], dp_size: int) -> DataProto:
    """All responses to all prompts as :func:`roll.models.scoring.scoring_batch` has them, with ``unit_ids`` int64 (B,)
    the number of the prompt, ``targets`` float32 (B,) or of steps (B, L), and ``margins`` float32 (B,) where rows have
    some.

    Each of ``dp_size`` consecutive equal shares holds whole prompts and like work; where responses do not divide, empty
    rows without a score fill a share.
    """
    shares = [list(range(len(rows)))]
    if dp_size > 1:
        costs = [float(workload([len(side) for side in row.sides]).sum()) for row in rows]
        shares = balance_partitions(costs, dp_size, equal_counts=len(rows) % dp_size == 0)
    widest = max(sum(len(rows[index].responses) for index in share) for share in shares)
    sequences, places, targets = list[list[int]](), list[list[int]](), list[list[float]]()
    shared, units, margins = list[int](), list[int](), list[float | None]()
    for share in shares:
        filled = len(sequences) + widest
        for index in share:
            row = rows[index]
            for response, side in enumerate(row.sides):
                sequences.append(side)
                shared.append(len(row.prompt_ids))
                units.append(index)
                places.append([len(row.prompt_ids) + end for end in row.step_ends] or [len(side)])
                targets.append(row.scores if row.step_ends else [row.scores[response]])
                margins.append(row.margin)
        for _ in range(filled - len(sequences)):
            sequences.append([0])
            shared.append(2)
            units.append(-1)
            places.append([])
            targets.append([])
            margins.append(None)
    tensors = scoring_batch(sequences, shared, places)
    of_steps = any(row.step_ends for row in rows)
    wanted = torch.zeros(tensors["score_mask"].shape)
    wanted[tensors["score_mask"]] = torch.tensor(np.concatenate(targets), dtype=torch.float32)
    tensors["targets"] = wanted if of_steps else wanted.sum(1)
    tensors["unit_ids"] = torch.tensor(units)
    if any(margin is not None for margin in margins):
        tensors["margins"] = torch.tensor([margin or 0.0 for margin in margins])
    return DataProto.from_dict(tensors)
