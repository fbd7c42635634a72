"""The run of the distillation pipeline: rows in, the teacher's log-probs of their tokens, optimizer steps of the
student, evaluations between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll.config.loader import LoadedConfig
from roll.config.model_files import check_vocabularies, model_number, vocabulary_hash
from roll.datasets import SftDataset
from roll.datasets.types import SftRow
from roll.distributed import PendingCall, ResourceManager
from roll.pipelines.distill.cache import RowTargets, TeacherCache, row_key
from roll.pipelines.distill.definition import DistillConfig
from roll.pipelines.row_order import balanced_order
from roll.pipelines.run_context import WEIGHTS
from roll.pipelines.sft.pipeline import demonstration_batch
from roll.pipelines.supervised_pipeline import SupervisedPipeline
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics, to_floats
from roll.strategies.base import TEACHER_COLUMNS, teacher_columns
from roll.workers import DISTILL_WORKER
from roll.workers.model import ModelWorker
from roll.workers.supervised import DistillSettings, DistillWorker

TEACHER = "teacher"


@dataclass
class TeacherRequest:
    """Rows whose teacher's log-probs have been requested."""

    batch: DataProto
    keys: list[bytes]
    uncached: list[int]
    """Rows that the cache does not have."""
    call: PendingCall[DataProto] | None
    """Computes those."""
    state: dict[str, Any]
    """Of the data, before the rows were drawn."""


class DistillPipeline(SupervisedPipeline[DistillConfig, SftRow]):
    """Learning a teacher's distributions; a teacher with devices of its own computes a step ahead."""

    role = "student"
    worker = DISTILL_WORKER
    frozen_role = TEACHER
    stream = "distill"
    state_key = "rows"
    dropped_metric = "data/dropped_rows"

    def __init__(self, loaded: LoadedConfig[DistillConfig]) -> None:
        super().__init__(loaded)
        self.cache: TeacherCache | None = None
        self.ahead: deque[TeacherRequest] = deque()

    def start(self, resources: ResourceManager) -> int:
        self.compare_vocabularies()
        return super().start(resources)

    def settings(self) -> DistillSettings:
        return DistillSettings(self.config.max_grad_norm, loss=self.config, weight=self.config.distill_loss_weight)

    @classmethod
    def build(cls, config: DistillConfig) -> Callable[..., SftDataset]:
        """Rows are rendered by the student's templates."""
        return SftDataset.build

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

    def next_batch(self, step: int) -> DataProto:
        """The rows of a step with the teacher's columns; a teacher with devices of its own goes on with those of the
        step after."""
        if not self.ahead:
            self.ahead.append(self.request_next())
        with self.context.phase("teacher_forward"):
            batch = self.with_teacher_columns(self.ahead[0])
        request = self.ahead.popleft()
        if self.cache is not None:
            self.context.record({"student/cached_rows": Mean(len(batch) - len(request.uncached), len(batch))})
        if self.plan.teacher_runs_ahead and step + 1 < self.num_steps:
            self.ahead.append(self.request_next())
        return batch

    def request_next(self) -> TeacherRequest:
        """Draw the rows of a step, and let the teacher begin with them."""
        state = self.rows.state_dict()
        rows = self.rows.next_batch(self.plan.global_batch_size)
        order = balanced_order([len(row.input_ids) for row in rows], self.learner.dp_size)
        return self.request([rows[index] for index in order.tolist()], state)

    def request(self, rows: Sequence[SftRow], state: dict[str, Any]) -> TeacherRequest:
        batch = demonstration_batch(rows, self.pad_token_id)
        mask = batch.batch["attention_mask" if self.config.distill_on_prompt else "response_mask"].clone()
        mask[:, 0] = False  # nothing predicts it
        batch.batch["response_mask"] = mask
        keys: list[bytes] = []
        uncached = list(range(len(rows)))
        if self.cache is not None:
            counted = mask.numpy()
            for row, own in zip(rows, counted, strict=True):
                images = row.vision.image_keys if row.vision is not None else ()
                keys.append(row_key(np.asarray(row.input_ids), own[: len(row.input_ids)], images))
            uncached = [index for index, key in enumerate(keys) if key not in self.cache]
        return TeacherRequest(batch, keys, uncached, self.teacher_call(batch, uncached), state)

    def teacher_call(self, batch: DataProto, uncached: list[int]) -> PendingCall[DataProto] | None:
        if not uncached:
            return None
        if self.frozen is None:
            raise ValueError(
                f"teacher_cache: {self.config.teacher_cache} lacks {len(uncached)} of {len(batch)} rows of this step, "
                "and there is no teacher to compute them; add the section teacher, or fill the cache with this data, "
                "template and sequence_length"
            )
        config = self.config
        self.residency.bring({TEACHER: WEIGHTS})
        return self.frozen.call(
            ModelWorker.compute_top_tokens,
            batch if len(uncached) == len(batch) else batch[np.asarray(uncached)],
            count=config.logits_topk,
            limit=self.limit,
            temperature=config.kd_temperature * config.teacher_temperature,
            dtype=config.teacher_log_probs_dtype,
        )

    def with_teacher_columns(self, request: TeacherRequest) -> DataProto:
        """The batch with the teacher's columns."""
        batch, computed = request.batch, None if request.call is None else request.call.result().batch
        if self.cache is None:
            assert computed is not None
            columns = {name: computed[name] for name in TEACHER_COLUMNS}
        else:
            mask = batch.batch["response_mask"]
            if computed is not None:
                self.cache.put(
                    rows_of(computed, mask[request.uncached], [request.keys[index] for index in request.uncached])
                )
            columns = columns_from([self.cache.get(key) for key in request.keys], mask)
        for name, column in zip(teacher_columns(TEACHER), columns.values(), strict=True):
            batch.batch[name] = column
        return batch

    def measure(self) -> dict[str, float]:
        """Both terms of the loss on all held-out rows, each weighted by its tokens."""
        measured: list[Metrics] = []
        for rows in self.parts(self.held_out):
            batch = self.with_teacher_columns(self.request(rows, {}))
            self.residency.bring({"student": WEIGHTS})
            measured.append(self.learner.call(DistillWorker.evaluate, batch).result())
        return to_floats(merge_metrics(measured))

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        if self.cache is not None:
            self.cache.flush()
        super().save(steps_done, state)

    def state_dict(self) -> dict[str, Any]:
        """Rows that only the teacher has seen are drawn again."""
        return {"rows": self.ahead[0].state if self.ahead else self.rows.state_dict()}

    def export(self) -> None:
        if self.cache is not None:
            self.cache.flush()
        super().export()


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
