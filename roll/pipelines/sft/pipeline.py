"""The run of the SFT pipeline: demonstrations in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.config.loader import LoadedConfig
from roll.config.roles import DataArguments
from roll.datasets import DataError, EpochOrder, SftDataset, SftRow, ShuffledEpochs
from roll.datasets.images import ImageReader, VisionModel
from roll.datasets.sft import sft_maker
from roll.datasets.store import StoredRow
from roll.datasets.streaming import Drawn, StreamedEpochs
from roll.datasets.templates import TemplateChoice
from roll.distributed import Cluster, PendingCall, ResourceManager
from roll.pipelines.batches import RecordedBatch, is_left_out
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.row_order import balanced_order
from roll.pipelines.run_context import RunContext
from roll.pipelines.sft.config import SFTConfig, SFTPlan
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.protocol.vision import IMAGES
from roll.workers import SFT_WORKER
from roll.workers.model import ModelSettings
from roll.workers.supervised import SftWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS_IN_FLIGHT = 2
"""Workers find the next batch waiting when they finish one."""


class SFTPipeline:
    """A run, from start to summary. A step is one optimizer step."""

    def __init__(self, loaded: LoadedConfig[SFTConfig]) -> None:
        assert isinstance(loaded.plan, SFTPlan)
        self.config = loaded.config
        self.plan = loaded.plan
        self.context = RunContext(loaded)
        self.held_out: Sequence[SftRow] = ()
        self.demonstrations: Drawn[SftRow]
        self.in_flight: deque[tuple[DataProto, PendingCall[Metrics] | None]] = deque()
        """The next steps' batches, and their updates; None: the batch is left out."""

    def run(self) -> None:
        """Train for all steps; everything that was started is stopped again, however it ends."""
        with self.context.running() as resources:
            first_step = self.start(resources)
            self.context.save_when_interrupted(self.state_between_steps, self.save)
            for step in self.context.steps(first_step, self.num_steps):
                ahead = 1 if self.context.stopping else min(STEPS_IN_FLIGHT, self.steps_until_pause(step))
                while len(self.in_flight) < ahead:
                    self.begin_step(step + len(self.in_flight))
                batch, update = self.in_flight.popleft()
                self.context.hold_batch(step, batch)
                with self.context.phase("step_train"):
                    self.context.record(update.result() if update is not None else {})
                self.context.end_step(step)
                self.pause(step + 1)
            self.finish()

    def begin_step(self, step: int) -> None:
        """Send the batch of a step to the workers."""
        batch = self.next_batch(step)
        update = None if is_left_out(step) else self.sft_train.call(SftWorker.update, batch)
        self.in_flight.append((batch, update))

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Take the step of a recorded batch again; the steps that the model had done before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            return steps, to_floats(self.sft_train.call(SftWorker.update, recorded.batch).result())

    def start(self, resources: ResourceManager) -> int:
        """Start the cluster, read the data, continue from a checkpoint if there is one; the steps already done."""
        role = self.plan.roles["sft_train"].section
        self.sft_train = Cluster(
            "sft_train",
            role.worker_cls or SFT_WORKER,
            resources,
            role,
            seed=self.config.seed,
            settings=ModelSettings(self.config.max_grad_norm),
            rpc_timeout=self.config.rpc_timeout,
        )
        self.context.watch([self.sft_train])
        self.load_data()
        self.sft_train.call_all(SftWorker.initialize, self.num_steps).result()
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is None:
            return 0
        self.sft_train.call_all(SftWorker.load_checkpoint, str(checkpoint.role("sft_train"))).result()
        self.demonstrations.load_state_dict(self.context.load_state(checkpoint)["demonstrations"])
        return checkpoint.step

    def load_data(self) -> None:
        """Read the demonstrations; the number of steps follows from them where the file does not say it."""
        config, model_args = self.config, self.config.sft_train.model_args
        tokenizer = load_tokenizer(self.plan.roles["sft_train"].model_path, model_args.trust_remote_code)
        self.tokenizer, self.pad_token_id = tokenizer, pad_token_id(tokenizer)
        if self.plan.val_data_args is not None:
            self.held_out = read_demonstrations(config, self.plan, self.plan.val_data_args, tokenizer)
        if self.plan.data_args.streaming:
            assert config.max_steps is not None, "the checks ask for it"
            stream = stream_demonstrations(config, self.plan, tokenizer)
            self.context.at_end(stream.close)
            self.demonstrations = stream
            self.num_steps = config.max_steps
            return
        training = read_demonstrations(config, self.plan, self.plan.data_args, tokenizer)
        order = EpochOrder.of(self.plan.data_args, len(training), config.seed, "sft", training.difficulties)
        self.demonstrations = ShuffledEpochs(training, config.seed, "sft", order=order)
        epochs = config.sft_train.training_args.num_train_epochs
        self.num_steps = config.max_steps or ceil(len(training) * epochs / self.plan.global_batch_size)

    def next_batch(self, step: int) -> DataProto:
        """The demonstrations of optimizer step ``step``, each rank's share as near as may be to the others' work."""
        rows = self.demonstrations.next_batch(self.plan.global_batch_size)
        if step % self.config.logging_steps == 0:
            self.context.samples.demonstrations(step, rows, self.tokenizer)
        order = balanced_order([len(row.input_ids) for row in rows], self.plan.training["sft_train"].dp_size)
        return demonstration_batch([rows[index] for index in order.tolist()], self.pad_token_id)

    def steps_until_pause(self, step: int) -> int:
        """Steps from ``step`` on, this one included, that may be in flight together: none beyond a save or evaluation,
        so that the data state saved is that of the steps done."""
        ends = [self.num_steps - step]
        ends += [every - step % every for every in (self.plan.save_steps, self.plan.eval_steps) if every]
        return min(ends)

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.held_out and self.plan.eval_steps and steps_done % self.plan.eval_steps == 0:
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1, can_save=not self.in_flight):
            self.save(steps_done, self.state_dict())

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``steps_done`` steps, with what the driver must remember."""
        with self.context.writing_checkpoint(steps_done, state, [self.sft_train]) as path:
            self.sft_train.call_all(SftWorker.save_checkpoint, str(path / "sft_train")).result()

    def state_dict(self) -> dict[str, Any]:
        """State of the driver: plain JSON values."""
        return {"demonstrations": self.demonstrations.state_dict()}

    def state_between_steps(self) -> dict[str, Any] | None:
        """As :meth:`state_dict`; None while a step is in flight, whose rows have been drawn."""
        return None if self.in_flight else self.state_dict()

    def evaluate(self, steps_done: int) -> None:
        """Loss on the held-out demonstrations."""
        size = self.config.sft_train.infer_batch_size * self.sft_train.world_size
        with self.context.phase("val_step"):
            parts: list[Metrics] = []
            for begin in range(0, len(self.held_out), size):
                rows = demonstration_batch(self.held_out[begin : begin + size], self.pad_token_id)
                parts.append(self.sft_train.call(SftWorker.evaluate, rows).result())
        self.context.record_validation({k: m.value() for k, m in merge_metrics(parts).items()}, steps_done)

    def finish(self) -> None:
        """The trained model in Hugging Face format, and the summary."""
        if self.config.sft_train.training_args.save_hf_model:
            export_model(self.sft_train, self.tokenizer, self.plan.output_dir / "model")
        self.context.finish(self.num_steps)


def read_demonstrations(
    config: SFTConfig, plan: SFTPlan, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> SftDataset:
    """One set, rendered by the run's templates."""
    path = str(plan.roles["sft_train"].model_path)
    return SftDataset.build(
        data_args,
        tokenizer,
        config.sequence_length,
        global_template=config.global_template,
        query_key=config.query_key,
        train_on=config.train_on,
        vision=VisionModel.load(path, tokenizer, config.sft_train.model_args.trust_remote_code),
    )


def stream_demonstrations(
    config: SFTConfig, plan: SFTPlan, tokenizer: PreTrainedTokenizerBase
) -> StreamedEpochs[SftRow]:
    """The training set, prepared as it is drawn."""
    data_args, path = plan.data_args, str(plan.roles["sft_train"].model_path)
    vision = VisionModel.load(path, tokenizer, config.sft_train.model_args.trust_remote_code)
    if vision is not None:
        raise DataError("sft_train.data_args.streaming: true: rows with images are prepared at the start; set it false")
    templates = TemplateChoice.of_settings(data_args, config.global_template, None)
    limit, images = config.sequence_length, ImageReader.of(data_args, None)
    maker = sft_maker(data_args, tokenizer, templates, limit, config.query_key, images, config.train_on)
    return StreamedEpochs(maker, row_of, config.seed, "sft")


def row_of(stored: StoredRow) -> SftRow:
    """A demonstration as it is drawn, of a prepared one."""
    assert stored.id is not None, "streams name their rows"
    return SftRow(stored.id, stored.tag, stored.token_ids, stored.prompt_length, spans=stored.spans)


def demonstration_batch(rows: Sequence[SftRow], pad: int) -> DataProto:
    """One row a demonstration, right-padded: ``input_ids`` int64, ``attention_mask``, ``response_mask`` bool (B, L);
    and ``images`` where a row has some."""
    lengths = np.array([len(row.input_ids) for row in rows])
    positions = np.arange(int(lengths.max()))
    attention_mask = positions < lengths[:, None]
    input_ids = np.full(attention_mask.shape, pad, dtype=np.int64)
    input_ids[attention_mask] = np.concatenate([np.asarray(row.input_ids, dtype=np.int64) for row in rows])
    response_mask = np.zeros(attention_mask.shape, dtype=bool)
    response_mask[attention_mask] = np.concatenate([row.response_mask for row in rows])
    tensors: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "response_mask": torch.from_numpy(response_mask),
    }
    images = [row.vision for row in rows]
    return DataProto.from_dict(tensors, {} if all(one is None for one in images) else {IMAGES: images})
