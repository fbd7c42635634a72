"""The run of the distillation pipeline: rows in, the teacher's log-probs of their tokens, optimizer steps of the
student, evaluations between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.config.loader import LoadedConfig
from roll.config.model_files import model_number
from roll.config.roles import DataArguments
from roll.config.vocabularies import check_vocabularies, vocabulary_hash
from roll.datasets import EpochOrder, SftDataset, ShuffledEpochs
from roll.datasets.images import VisionModel
from roll.datasets.types import SftRow
from roll.distributed import Cluster, PendingCall, ResourceManager
from roll.pipelines.batches import RecordedBatch, is_left_out
from roll.pipelines.distill.cache import RowTargets, TeacherCache, row_key
from roll.pipelines.distill.config import DistillConfig, DistillPlan
from roll.pipelines.files import export_model, load_tokenizer, pad_token_id
from roll.pipelines.residency import TRAINING, WEIGHTS, Residency, moves_states
from roll.pipelines.row_order import balanced_order
from roll.pipelines.run_context import RunContext
from roll.pipelines.sft.pipeline import demonstration_batch
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import TEACHER_COLUMNS, teacher_columns
from roll.workers import DISTILL_WORKER, REFERENCE_WORKER
from roll.workers.model import ModelSettings, ModelWorker
from roll.workers.supervised import DistillSettings, DistillWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER = "teacher"


@dataclass
class Asked:
    """Rows whose teacher's log-probs have been asked for."""

    batch: DataProto
    keys: list[bytes]
    unknown: list[int]
    """Rows that the cache does not have."""
    call: PendingCall[DataProto] | None
    """Computes those."""
    state: dict[str, Any]
    """Of the data, before the rows were drawn."""


class DistillPipeline:
    """A run, from start to summary. A step is one optimizer step."""

    def __init__(self, loaded: LoadedConfig[DistillConfig]) -> None:
        assert isinstance(loaded.plan, DistillPlan)
        self.loaded = loaded
        self.config = loaded.config
        self.plan = loaded.plan
        self.context = RunContext(loaded)
        self.held_out: Sequence[SftRow] = ()
        self.teacher: Cluster | None = None
        self.cache: TeacherCache | None = None
        self.ahead: deque[Asked] = deque()

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
        """Compare vocabularies, start the clusters, read the data, continue from a checkpoint if there is one; the
        steps already done."""
        self.compare_vocabularies()
        self.residency = Residency(self.plan, moves_states(self.config.is_offload_states))
        settings = DistillSettings(self.config.max_grad_norm, loss=self.config, weight=self.config.distill_loss_weight)
        self.student = self.cluster("student", DISTILL_WORKER, settings, resources)
        if TEACHER in self.plan.roles:
            self.teacher = self.cluster(TEACHER, REFERENCE_WORKER, None, resources)
        self.context.watch([one for one in (self.student, self.teacher) if one is not None])
        self.load_data()
        for cluster, steps, states in ((self.student, self.num_steps, TRAINING), (self.teacher, 0, WEIGHTS)):
            if cluster is not None:
                cluster.call_all(ModelWorker.initialize, steps).result()
                if self.residency.moves(cluster.name):
                    self.residency.admit(cluster, states)
        checkpoint = self.context.checkpoint_to_resume()
        if checkpoint is None:
            return 0
        self.residency.bring({"student": TRAINING})
        self.student.call_all(DistillWorker.load_checkpoint, str(checkpoint.role("student"))).result()
        self.rows.load_state_dict(self.context.load_state(checkpoint)["rows"])
        return checkpoint.step

    def compare_vocabularies(self) -> None:
        """Tokenizers of the hub are on this machine only now. And open the cache, which knows the teacher's."""
        config, student = self.config, str(self.plan.roles["student"].model_path)
        teacher = config.teacher_pretrain
        if TEACHER in self.plan.roles:
            teacher = str(self.plan.roles[TEACHER].model_path)
            check_vocabularies(student, teacher, "teacher_pretrain", self.loaded.source, fetch=True)
        sizes = [model_number(path, "vocab_size") for path in (student, teacher)]
        self.limit = min(size for size in (*sizes, 2**31 - 1) if size is not None)
        if config.teacher_cache is not None:
            made_with = {
                "vocabulary": vocabulary_hash(student),
                "logits_topk": config.logits_topk,
                "temperature": config.kd_temperature * config.teacher_temperature,
                "dtype": config.teacher_log_probs_dtype,
            }
            self.cache = TeacherCache(config.teacher_cache, {"teacher": teacher, **made_with} if teacher else made_with)

    def cluster(self, name: str, worker: str, settings: ModelSettings | None, resources: ResourceManager) -> Cluster:
        role = self.plan.roles[name].section
        return Cluster(
            *(name, role.worker_cls or worker, resources, role),
            seed=self.config.seed,
            settings=settings,
            rpc_timeout=self.config.rpc_timeout,
        )

    def load_data(self) -> None:
        """Read the rows; the number of steps follows from them where the file does not say it."""
        config, model_args = self.config, self.config.student.model_args
        tokenizer = load_tokenizer(self.plan.roles["student"].model_path, model_args.trust_remote_code)
        self.tokenizer, self.pad_token_id = tokenizer, pad_token_id(tokenizer)
        training = read_rows(config, self.plan, self.plan.data_args, tokenizer)
        if self.plan.val_data_args is not None:
            self.held_out = read_rows(config, self.plan, self.plan.val_data_args, tokenizer)
        order = EpochOrder.of(self.plan.data_args, len(training), config.seed, "distill", training.difficulties)
        self.rows = ShuffledEpochs(training, config.seed, "distill", order=order)
        epochs = config.student.training_args.num_train_epochs
        self.num_steps = config.max_steps or ceil(len(training) * epochs / self.plan.global_batch_size)
        self.context.record({"data/dropped_rows": Mean(sum(training.counts.too_long.values()) + training.counts.bad)})

    def train_one_step(self, step: int) -> None:
        """One optimizer step on the next rows; a teacher with devices of its own goes on with those of the step after.
        Until the student learns, a signal may end the step; it is done again when the run goes on."""
        with self.context.interruptible():
            if not self.ahead:
                self.ahead.append(self.ask_next())
            with self.context.phase("teacher_forward"):
                batch = self.answered(self.ahead[0])
            if self.plan.teacher_runs_ahead and step + 1 < self.num_steps:
                self.ahead.append(self.ask_next())
        self.context.hold_batch(step, batch)
        if not is_left_out(step):
            self.update(batch)
        self.ahead.popleft()
        self.context.record(self.residency.metrics())
        self.context.end_step(step)

    def update(self, batch: DataProto) -> None:
        """One optimizer step."""
        with self.context.phase("step_train"):
            self.residency.bring({"student": TRAINING})
            self.context.record(self.student.call(DistillWorker.update, batch).result())

    def replay(self, recorded: RecordedBatch) -> tuple[int, dict[str, float]]:
        """Take the step of a recorded batch again, with what the teacher said; the steps that the student had done
        before, and the metrics."""
        with self.context.running() as resources:
            steps = self.start(resources)
            self.context.recorded()
            self.update(recorded.batch)
            return steps, self.context.recorded()

    def ask_next(self) -> Asked:
        """Draw the rows of a step, and let the teacher begin with them."""
        state = self.rows.state_dict()
        rows = self.rows.next_batch(self.plan.global_batch_size)
        order = balanced_order([len(row.input_ids) for row in rows], self.student.dp_size)
        return self.ask([rows[index] for index in order.tolist()], state)

    def ask(self, rows: Sequence[SftRow], state: dict[str, Any]) -> Asked:
        batch = demonstration_batch(rows, self.pad_token_id)
        mask = batch.batch["attention_mask" if self.config.distill_on_prompt else "response_mask"].clone()
        mask[:, 0] = False  # nothing predicts it
        batch.batch["response_mask"] = mask
        keys: list[bytes] = []
        unknown = list(range(len(rows)))
        if self.cache is not None:
            counted = mask.numpy()
            for row, own in zip(rows, counted, strict=True):
                images = row.vision.image_keys if row.vision is not None else ()
                keys.append(row_key(np.asarray(row.input_ids), own[: len(row.input_ids)], images))
            unknown = [index for index, key in enumerate(keys) if key not in self.cache]
        return Asked(batch, keys, unknown, self.teacher_call(batch, unknown), state)

    def teacher_call(self, batch: DataProto, unknown: list[int]) -> PendingCall[DataProto] | None:
        if not unknown:
            return None
        if self.teacher is None:
            raise ValueError(
                f"teacher_cache: {self.config.teacher_cache} lacks {len(unknown)} of {len(batch)} rows of this step, "
                "and there is no teacher to compute them; add the section teacher, or fill the cache with this data, "
                "template and sequence_length"
            )
        config = self.config
        self.residency.bring({TEACHER: WEIGHTS})
        return self.teacher.call(
            ModelWorker.compute_top_tokens,
            batch if len(unknown) == len(batch) else batch[np.asarray(unknown)],
            count=config.logits_topk,
            limit=self.limit,
            temperature=config.kd_temperature * config.teacher_temperature,
            dtype=config.teacher_log_probs_dtype,
        )

    def answered(self, asked: Asked) -> DataProto:
        """The batch with the teacher's columns."""
        batch, computed = asked.batch, None if asked.call is None else asked.call.result().batch
        if self.cache is None:
            assert computed is not None
            columns = {name: computed[name] for name in TEACHER_COLUMNS}
        else:
            mask = batch.batch["response_mask"]
            if computed is not None:
                self.cache.put(rows_of(computed, mask[asked.unknown], [asked.keys[index] for index in asked.unknown]))
            columns = columns_from([self.cache.get(key) for key in asked.keys], mask)
            self.context.record({"student/cached_rows": Mean(len(batch) - len(asked.unknown), len(batch))})
        for name, column in zip(teacher_columns(TEACHER), columns.values(), strict=True):
            batch.batch[name] = column
        return batch

    def pause(self, steps_done: int) -> None:
        """Evaluate and save where that is due after ``steps_done`` steps."""
        if self.held_out and self.plan.eval_steps and steps_done % self.plan.eval_steps == 0:
            self.evaluate(steps_done)
        if self.context.is_save_due(steps_done - 1):
            self.save(steps_done, self.state_dict())

    def evaluate(self, steps_done: int) -> None:
        """Both terms of the loss on all held-out rows, each weighted by its tokens."""
        size = self.config.student.infer_batch_size * self.student.world_size
        with self.context.phase("val_step"), self.context.interruptible():
            parts: list[Metrics] = []
            for begin in range(0, len(self.held_out), size):
                batch = self.answered(self.ask(self.held_out[begin : begin + size], {}))
                self.residency.bring({"student": WEIGHTS})
                parts.append(self.student.call(DistillWorker.evaluate, batch).result())
        self.context.record_validation({k: m.value() for k, m in merge_metrics(parts).items()}, steps_done)

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        """A checkpoint after ``steps_done`` steps, with what the driver must remember."""
        if self.cache is not None:
            self.cache.flush()
        with self.context.writing_checkpoint(steps_done, state, [self.student]) as path:
            self.residency.bring({"student": TRAINING})
            self.student.call_all(DistillWorker.save_checkpoint, str(path / "student")).result()

    def state_dict(self) -> dict[str, Any]:
        """State of the driver, plain JSON values: rows that only the teacher has seen are drawn again."""
        return {"rows": self.ahead[0].state if self.ahead else self.rows.state_dict()}

    def finish(self) -> None:
        """A last evaluation, the trained student in Hugging Face format, and the summary."""
        if self.held_out and self.plan.eval_steps and self.num_steps % self.plan.eval_steps:
            self.evaluate(self.num_steps)
        if self.cache is not None:
            self.cache.flush()
        if self.config.student.training_args.save_hf_model:
            self.residency.bring({"student": WEIGHTS})
            export_model(self.student, self.tokenizer, self.plan.output_dir / "model")
        self.context.finish(self.num_steps)


def rows_of(columns: Any, mask: torch.Tensor, keys: Sequence[bytes]) -> list[tuple[bytes, RowTargets]]:
    """The tokens that count of each row, by key, from columns (B, L, ...) as the teacher gives them."""
    log_probs, ids, tail = (columns[name] for name in TEACHER_COLUMNS)
    return [
        (key, {"log_probs": log_probs[row][own], "ids": ids[row][own], "tail": tail[row][own]})
        for row, (key, own) in enumerate(zip(keys, mask, strict=True))
    ]


def columns_from(rows: Sequence[RowTargets], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse, in the order of :data:`TEACHER_COLUMNS`."""
    columns = {}
    for name, part in zip(TEACHER_COLUMNS, ("log_probs", "ids", "tail"), strict=True):
        flat = torch.cat([row[part] for row in rows])
        columns[name] = flat.new_zeros(*mask.shape, *flat.shape[1:])
        columns[name][mask] = flat
    return columns


def read_rows(
    config: DistillConfig, plan: DistillPlan, data_args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> SftDataset:
    """One set, rendered by the student's templates."""
    path = str(plan.roles["student"].model_path)
    return SftDataset.build(
        data_args,
        tokenizer,
        config.sequence_length,
        global_template=config.global_template,
        vision=VisionModel.load(path, tokenizer, config.student.model_args.trust_remote_code),
    )
