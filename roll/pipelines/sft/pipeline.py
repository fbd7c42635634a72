"""The run of the SFT pipeline: demonstrations in, optimizer steps on them, evaluations between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.config.loader import LoadedConfig
from roll.datasets import DataError, SftDataset, SftRow
from roll.datasets.images import ImageReader
from roll.datasets.sft import sft_maker
from roll.datasets.store import StoredRow
from roll.datasets.streaming import Drawn, StreamedEpochs
from roll.datasets.templates import TemplateChoice
from roll.datasets.vision_model import VisionModel
from roll.distributed import PendingCall
from roll.methods.sft import SftLoss
from roll.pipelines.model_calls import balanced_order
from roll.pipelines.sft.definition import SFTConfig
from roll.pipelines.supervised import SupervisedPlan
from roll.pipelines.supervised_pipeline import SupervisedPipeline, image_column, right_padded
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics, to_floats
from roll.workers.training import TrainWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS_IN_FLIGHT = 2
"""Workers find the next batch waiting when they finish one."""


class SFTPipeline(SupervisedPipeline[SFTConfig, SftRow]):
    """Imitation of demonstrations, two steps in flight at a time."""

    role = "sft_train"
    loss = SftLoss()
    stream = "sft"
    state_key = "demonstrations"
    evaluates_at_end = False

    def __init__(self, loaded: LoadedConfig[SFTConfig]) -> None:
        super().__init__(loaded)
        self.in_flight: deque[tuple[DataProto, PendingCall[Metrics] | None]] = deque()
        """The next steps' batches, and their updates; None: the batch is left out."""

    def train_one_step(self, step: int) -> None:
        """Have the workers find the next batch waiting when they finish this one."""
        ahead = 1 if self.context.stopping else min(STEPS_IN_FLIGHT, self.steps_until_pause(step))
        while len(self.in_flight) < ahead:
            later = step + len(self.in_flight)
            batch, is_left_out = self.next_batch(later), self.context.is_left_out(later)
            update = None if is_left_out else self.learner.call(TrainWorker.step, batch, self.loss)
            self.in_flight.append((batch, update))
        batch, update = self.in_flight.popleft()
        self.context.hold_batch(step, batch)
        with self.context.phase("step_train"):
            self.context.record(update.result() if update is not None else {})
        self.context.end_step(step)

    @classmethod
    def build(cls, config: SFTConfig) -> Callable[..., SftDataset]:
        query_key, system_key = config.query_key, config.system_key
        return partial(SftDataset.build, query_key=query_key, system_key=system_key, train_on=config.train_on)

    def rows_to_learn(self) -> tuple[Drawn[SftRow], int]:
        if not self.plan.data_args.streaming:
            return super().rows_to_learn()
        assert self.config.max_steps is not None, "the checks ask for it"
        stream = stream_demonstrations(self.config, self.plan, self.tokenizer)
        self.context.at_end(stream.close)
        return stream, self.config.max_steps

    def next_batch(self, step: int) -> DataProto:
        """The demonstrations of a step, each rank's share as near as may be to the others' work."""
        rows = self.rows.next_batch(self.plan.global_batch_size)
        if step % self.config.logging_steps == 0:
            self.context.samples.demonstrations(step, rows, self.tokenizer)
        order = balanced_order([len(row.input_ids) for row in rows], self.learner.dp_size)
        return demonstration_batch([rows[index] for index in order.tolist()], self.pad_token_id)

    def steps_until_pause(self, step: int) -> int:
        """Steps from ``step`` on, this one included, that may be in flight together: none beyond a save or evaluation,
        so that the data state saved is that of the steps done."""
        ends = [self.num_steps - step]
        ends += [every - step % every for every in (self.plan.save_steps, self.plan.eval_steps) if every]
        return min(ends)

    def state_between_steps(self) -> dict[str, Any] | None:
        """None while a step is in flight, whose rows have been drawn."""
        return None if self.in_flight else self.state_dict()

    def measure(self) -> dict[str, float]:
        """Loss on the held-out demonstrations."""
        batches = (demonstration_batch(rows, self.pad_token_id) for rows in self.parts(self.held_out))
        loss = SftLoss(prefix="val/")
        return to_floats(merge_metrics([self.learner.call(TrainWorker.measure, one, loss).result() for one in batches]))


def stream_demonstrations(
    config: SFTConfig, plan: SupervisedPlan, tokenizer: PreTrainedTokenizerBase
) -> StreamedEpochs[SftRow]:
    """The training set, prepared as it is drawn."""
    data_args, path = plan.data_args, str(plan.roles["sft_train"].model_path)
    vision = VisionModel.load(path, tokenizer, config.sft_train.model_args.trust_remote_code)
    if vision is not None:
        raise DataError("sft_train.data_args.streaming: true: rows with images are prepared at the start; set it false")
    templates = TemplateChoice.of_settings(data_args, config.global_template, None)
    limit, images = config.sequence_length, ImageReader.of(data_args, None)
    keys = config.query_key, config.system_key
    maker = sft_maker(data_args, tokenizer, templates, limit, keys, images, config.train_on)
    return StreamedEpochs(maker, row_of, config.seed, "sft")


def row_of(stored: StoredRow) -> SftRow:
    """A demonstration as it is drawn, of a prepared one."""
    assert stored.id is not None, "streams name their rows"
    return SftRow(stored.id, stored.tag, stored.token_ids, stored.prompt_length, spans=stored.spans)


def demonstration_batch(rows: Sequence[SftRow], pad: int) -> DataProto:
    """One row a demonstration, right-padded: ``input_ids`` int64, ``attention_mask``, ``response_mask`` bool (B, L);
    and ``images`` where a row has some."""
    input_ids, attention_mask = right_padded([row.input_ids for row in rows], pad)
    response_mask = np.zeros(attention_mask.shape, dtype=bool)
    response_mask[attention_mask] = np.concatenate([row.response_mask for row in rows])
    tensors: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "response_mask": torch.from_numpy(response_mask),
    }
    return DataProto.from_dict(tensors, image_column([row.vision for row in rows]))
