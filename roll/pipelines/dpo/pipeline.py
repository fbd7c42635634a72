"""The run of the DPO pipeline: pairs in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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
from roll.config.preferences import couples_pairs, is_unpaired, needs_mismatched
from roll.config.roles import DataArguments
from roll.datasets import EpochOrder, ShuffledEpochs
from roll.datasets.preferences import PreferenceColumns, PreferenceDataset, PreferenceRow
from roll.datasets.rankings import JudgedColumns, JudgedDataset, JudgedRow
from roll.distributed import Cluster, ResourceManager
from roll.pipelines.batches import RecordedBatch, is_left_out
from roll.pipelines.dpo.config import DPOConfig, DPOPlan, has_base
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.residency import TRAINING, WEIGHTS, Residency, moves_states
from roll.pipelines.row_order import balanced_order
from roll.pipelines.run_context import RunContext
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import Output
from roll.workers import PREFERENCE_WORKER, REFERENCE_WORKER
from roll.workers.model import ModelSettings, ModelWorker
from roll.workers.supervised import PreferenceSettings, PreferenceWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Row = PreferenceRow | JudgedRow
KnownLogProbs = dict[str, list[np.ndarray]]


class DPOPipeline:
    """A run, from start to summary. A step is one optimizer step."""

    def __init__(self, loaded: LoadedConfig[DPOConfig]) -> None:
        assert isinstance(loaded.plan, DPOPlan)
        self.config = loaded.config
        self.plan = loaded.plan
        self.context = RunContext(loaded)
        self.held_out: Sequence[Row] = ()
        self.reference: Cluster | None = None
        self.known: dict[str, KnownLogProbs] = {"train": {}, "validation": {}}
        """The reference's log-probs of the responses, by set and the row's id."""

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
        """Start the clusters, read the data, continue from a checkpoint if there is one; the steps already done."""
        self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
        settings = PreferenceSettings(self.config.max_grad_norm, loss=self.config)
        self.actor_train = self.cluster("actor_train", PREFERENCE_WORKER, settings, resources)
        if "reference" in self.plan.roles:
            self.reference = self.cluster("reference", REFERENCE_WORKER, None, resources)
        self.context.watch([one for one in (self.actor_train, self.reference) if one is not None])
        self.load_data()
        for cluster, steps, states in ((self.actor_train, self.num_steps, TRAINING), (self.reference, 0, WEIGHTS)):
            if cluster is not None:
                cluster.call_all(ModelWorker.initialize, steps).result()
                if self.residency.moves(cluster.name):
                    self.residency.admit(cluster, states)
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is None:
            return 0
        self.residency.bring({"actor_train": TRAINING})
        self.actor_train.call_all(PreferenceWorker.load_checkpoint, str(checkpoint.role("actor_train"))).result()
        self.pairs.load_state_dict(self.context.load_state(checkpoint)["pairs"])
        return checkpoint.step

    def cluster(self, name: str, worker: str, settings: ModelSettings | None, resources: ResourceManager) -> Cluster:
        role = self.plan.roles[name].section
        timeout = self.config.rpc_timeout
        return Cluster(
            *(name, role.worker_cls or worker, resources, role),
            seed=self.config.seed,
            settings=settings,
            rpc_timeout=timeout,
        )

    def load_data(self) -> None:
        """Read the pairs; the number of steps follows from them where the file does not say it."""
        config, model_args = self.config, self.config.actor_train.model_args
        tokenizer = load_tokenizer(self.plan.roles["actor_train"].model_path, model_args.trust_remote_code)
        self.tokenizer, self.pad_token_id = tokenizer, pad_token_id(tokenizer)
        training = read_pairs(config, self.plan.data_args, tokenizer)
        if self.plan.val_data_args is not None:
            self.held_out = read_pairs(config, self.plan.val_data_args, tokenizer)
        order = EpochOrder.of(self.plan.data_args, len(training), config.seed, "preferences", training.difficulties)
        self.pairs: ShuffledEpochs[Any] = ShuffledEpochs(training, config.seed, "preferences", order=order)
        epochs = config.actor_train.training_args.num_train_epochs
        self.num_steps = config.max_steps or ceil(len(training) * epochs / self.plan.global_batch_size)
        self.context.record({"data/dropped_pairs": Mean(sum(training.counts.too_long.values()) + training.counts.bad)})

    def train_one_step(self, step: int) -> None:
        """One optimizer step on the next pairs. Until the model learns, a signal may end it; the step is done again
        when the run goes on."""
        drawn: list[Row] = self.pairs.next_batch(self.plan.global_batch_size)
        lengths = [sum(map(len, row.sides)) for row in drawn]
        order = balanced_order(lengths, self.actor_train.dp_size)
        rows = [drawn[index] for index in order.tolist()]
        batch = pair_batch(rows, self.pad_token_id)
        with self.context.interruptible():
            self.add_reference(batch, rows, "train")
            if couples_pairs(self.config):
                self.add_slopes(batch)
            if needs_mismatched(self.config):
                with self.context.phase("kl_estimate"):
                    self.add_kl(batch, self.mean_ratio(mismatched(drawn, self.config.sequence_length)), "actor/")
            if step % self.config.logging_steps == 0:
                self.context.samples.pairs(step, rows, batch, self.tokenizer)
        self.context.hold_batch(step, batch)
        if not is_left_out(step):
            self.update(batch)
        self.context.record(self.residency.metrics())
        self.context.end_step(step)

    def update(self, batch: DataProto) -> None:
        """One optimizer step."""
        with self.context.phase("step_train"):
            self.residency.bring({"actor_train": TRAINING})
            self.context.record(self.actor_train.call(PreferenceWorker.update, batch).result())

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Take the step of a recorded batch again; the steps that the model had done before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            self.context.recorded()
            if couples_pairs(self.config):
                self.add_slopes(recorded.batch)
            self.update(recorded.batch)
            return steps, self.context.recorded()

    def add_reference(self, batch: DataProto, rows: Sequence[Row], of_set: str) -> None:
        """``ref_log_probs`` float32 (B, L), computed where they are not known."""
        if not self.plan.needs_reference:
            return
        known = self.known[of_set]
        unknown = [row for row in rows if row.row_id not in known]
        if unknown:
            with self.context.phase("ref_log_probs"):
                known |= self.reference_log_probs(unknown)
        column = torch.zeros_like(batch.batch["input_ids"], dtype=torch.float32)
        parts = [torch.from_numpy(part) for row in rows for part in known[row.row_id]]
        column[batch.batch["response_mask"]] = torch.cat(parts)
        batch.batch["ref_log_probs"] = column
        if not self.config.cache_reference:
            known.clear()

    def add_slopes(self, batch: DataProto) -> None:
        """``slopes`` float32 (B,): the derivative of a loss that couples pairs, from a pass over all of them."""
        sums = self.sums_of(batch)
        loss, slope = slopes(sums, self.config)
        self.context.record({"actor/loss": Mean(float(loss))})
        batch.batch["slopes"] = slope.reshape(-1).float()

    def reference_log_probs(self, rows: Sequence[Row]) -> KnownLogProbs:
        """The reference's log-probs of the responses of each row, float32 (tokens,), by the rows' ids."""
        batch = pair_batch(rows, self.pad_token_id)
        flat = self.computed(batch, True, ()).batch["log_probs"][batch.batch["response_mask"]].numpy()
        ends = np.cumsum([len(part) for row in rows for part in row.responses])
        parts = iter(np.split(flat, ends[:-1]))
        return {row.row_id: [next(parts).copy() for _ in row.responses] for row in rows}

    def mean_ratio(self, rows: Sequence[Row]) -> Mean:
        """The mean of log pi(y) - log ref(y) over the responses, under the present policy."""
        batch = pair_batch(rows, self.pad_token_id)
        mask = batch.batch["response_mask"]
        own, reference = (self.computed(batch, of_reference, ()).batch["log_probs"] for of_reference in (False, True))
        return Mean(float(((own - reference) * mask).double().sum()), len(mask))

    def add_kl(self, batch: DataProto, ratio: Mean, prefix: str) -> None:
        """``kl`` float32 (B,): KTO's z0, the same for all rows."""
        estimate = max(0.0, ratio.value())
        self.context.record({f"{prefix}kl_estimate": Mean(estimate)})
        batch.batch["kl"] = torch.full((len(batch),), estimate)

    def computed(self, batch: DataProto, of_reference: bool, outputs: tuple[str, ...]) -> DataProto:
        """Columns that the policy or the reference computes, without gradient."""
        without_adapters = of_reference and self.reference is None
        cluster = self.reference if of_reference and self.reference is not None else self.actor_train
        assert not without_adapters or has_base(self.config), "checked when the file is loaded"
        self.residency.bring({cluster.name: WEIGHTS})

        def work() -> DataProto:
            call = cluster.call(
                ModelWorker.compute_log_probs, batch, without_adapters=without_adapters, outputs=outputs
            )
            return call.result()

        if cluster is self.actor_train:
            return work()
        return self.context.replacing(cluster, partial(cluster.call_all, ModelWorker.initialize, 0), work)

    def sums_of(self, batch: DataProto) -> PairSums:
        """The pairs of a batch as numbers under the present policy."""
        squares = ("sum_of_squares",) if self.config.use_weighting else ()
        outputs = self.computed(batch, False, squares).batch
        columns = batch.batch
        reference = columns["ref_log_probs"] if self.plan.needs_reference else None
        mask = columns["response_mask"]
        return pair_sums(outputs["log_probs"], mask, reference, self.config, outputs.get(Output.SUM_OF_SQUARES))

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.held_out and self.plan.eval_steps and steps_done % self.plan.eval_steps == 0:
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1):
            self.save(steps_done, self.state_dict())

    def evaluate(self, steps_done: int) -> None:
        """Loss, accuracy and rewards on all held-out pairs."""
        size = self.config.actor_train.infer_batch_size * self.actor_train.world_size
        begins, kl = range(0, len(self.held_out), size), None
        with self.context.phase("val_step"), self.context.interruptible():
            parts: list[Metrics] = []
            if needs_mismatched(self.config):
                others = mismatched(self.held_out, self.config.sequence_length)
                ratios: list[Metrics] = [{"kl": self.mean_ratio(others[begin : begin + size])} for begin in begins]
                kl = torch.tensor(max(0.0, merge_metrics(ratios)["kl"].value()))
            for begin in begins:
                rows = self.held_out[begin : begin + size]
                batch = pair_batch(rows, self.pad_token_id)
                self.add_reference(batch, rows, "validation")
                parts.append(self.measured(batch, kl))
        metrics = {name: metric.value() for name, metric in merge_metrics(parts).items()}
        self.context.record_validation(metrics, steps_done)

    def measured(self, batch: DataProto, kl: torch.Tensor | None) -> Metrics:
        """Loss, accuracy and rewards of a batch of held-out rows under the present policy."""
        if not is_unpaired(self.config):
            sums = self.sums_of(batch)
            return preference_metrics(sums, self.config, preference_loss(sums, self.config), "val/")
        mask, desirable = batch.batch["response_mask"], batch.batch["desirable"]
        own = (self.computed(batch, False, ()).batch["log_probs"] * mask).sum(1)
        ratios = own - (batch.batch["ref_log_probs"] * mask).sum(1)
        losses = unpaired_loss(ratios, desirable, kl, self.config)
        return unpaired_metrics(own, ratios, desirable, losses, self.config, "val/")

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``steps_done`` steps, with what the driver must remember."""
        with self.context.writing_checkpoint(steps_done, state, [self.actor_train]) as path:
            self.residency.bring({"actor_train": TRAINING})
            self.actor_train.call_all(PreferenceWorker.save_checkpoint, str(path / "actor_train")).result()

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        return {"pairs": self.pairs.state_dict()}

    def finish(self) -> None:
        """A last evaluation, the trained model in Hugging Face format, and the summary."""
        if self.held_out and self.plan.eval_steps and self.num_steps % self.plan.eval_steps:
            self.evaluate(self.num_steps)
        if self.config.actor_train.training_args.save_hf_model:
            self.residency.bring({"actor_train": WEIGHTS})
            export_model(self.actor_train, self.tokenizer, self.plan.output_dir / "model")
        self.context.finish(self.num_steps)


def read_pairs(
    config: DPOConfig, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> PreferenceDataset | JudgedDataset:
    """One set, rendered by the run's templates."""
    if is_unpaired(config):
        names = JudgedColumns(
            config.chosen_key, config.rejected_key, responses=config.completion_key, scores=config.label_key
        )
        length, template = config.sequence_length, config.global_template
        return JudgedDataset.build(data_args, tokenizer, length, names, "labels", global_template=template)
    columns = PreferenceColumns(config.chosen_key, config.rejected_key)
    return PreferenceDataset.build(
        data_args, tokenizer, config.sequence_length, columns, global_template=config.global_template
    )


def pair_batch(rows: Sequence[Row], pad: int) -> DataProto:
    """Adjacent rows for the responses of each (of a pair the chosen one first), right-padded: ``input_ids`` int64,
    ``attention_mask`` and ``response_mask`` bool (B, L), ``unit_ids`` int64 (B,) the number of the row; of labelled
    responses ``desirable`` bool (B,)."""
    sides = [side for row in rows for side in row.sides]
    counts = [len(row.responses) for row in rows]
    lengths = np.array([len(side) for side in sides])
    prompts = np.repeat([len(row.prompt_ids) for row in rows], counts)
    positions = np.arange(int(lengths.max()))
    attention_mask = positions < lengths[:, None]
    input_ids = np.full(attention_mask.shape, pad, dtype=np.int64)
    input_ids[attention_mask] = np.concatenate([np.asarray(side, dtype=np.int64) for side in sides])
    tensors: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "response_mask": torch.from_numpy(attention_mask & (positions >= prompts[:, None])),
        "unit_ids": torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)),
    }
    if isinstance(rows[0], JudgedRow):
        labels = [score for row in rows if isinstance(row, JudgedRow) for score in row.scores]
        tensors["desirable"] = torch.tensor(labels) > 0.5
    return DataProto.from_dict(tensors)


def mismatched(rows: Sequence[Row], longest: int) -> list[Row]:
    """Each prompt with the responses of the next row of another prompt, cut to ``longest`` tokens: samples for KTO's
    estimate of the KL divergence, on which a response says nothing about its prompt (arXiv 2402.01306, sec. 4.1)."""
    found: list[Row] = []
    for index, row in enumerate(rows):
        others = (rows[(index + step) % len(rows)] for step in range(1, len(rows)))
        other = next((one for one in others if one.prompt_ids != row.prompt_ids), row)
        assert isinstance(other, JudgedRow) and isinstance(row, JudgedRow)
        room = longest - len(row.prompt_ids)
        found.append(replace(row, responses=[ids[:room] for ids in other.responses], scores=other.scores))
    return found
