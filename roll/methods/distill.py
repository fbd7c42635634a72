"""Distillation: a student learns the distributions of a teacher on given rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor

from roll.algorithms.distillation import comparison_metrics, divergence
from roll.algorithms.losses import options_from
from roll.config.loader import LoadedConfig
from roll.config.losses import DivergenceConfig
from roll.config.model_files import model_folder, model_number, vocabulary_hash
from roll.datasets import SftDataset
from roll.datasets.types import SftRow
from roll.methods.base import MODEL_COLUMNS, Ask, Loss, Totals
from roll.methods.distill_keys import DistillConfig
from roll.methods.rows import Completion, Models, RowMethod, demonstration_batch
from roll.methods.teacher_cache import TeacherCache, columns_from, row_key, rows_of, weights_identity
from roll.methods.teachers import check_vocabularies
from roll.models.layouts import TopTokens
from roll.models.loading import content_identity
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import TOP_COLUMNS, Comparison, Output, TensorBatch, target_columns

TEACHER = "teacher"
"""The role, and the beginning of the names of its columns and outputs."""


def comparison(options: DivergenceConfig, temperature: float) -> Comparison:
    """The teacher whose columns a batch has, compared by the divergence that ``options`` choose."""
    return Comparison(TEACHER, temperature, partial(_divergence, options))


def _divergence(options: DivergenceConfig, student: Tensor, teacher: Tensor, has_tail: bool) -> Tensor:
    return divergence(student, teacher, options, has_tail)


def of_teacher(outputs: TensorBatch) -> TensorBatch:
    """Outputs of the comparison by their own names."""
    return {name.removeprefix(f"{TEACHER}/"): values for name, values in outputs.items()}


@dataclass(frozen=True)
class DistillLoss(Loss):
    """(1 - w) NLL + w divergence, each the mean over the response tokens of all ranks."""

    options: DivergenceConfig = field(default_factory=DivergenceConfig)
    weight: float = 0.5
    """w."""
    prefix: str = field(default="student/", kw_only=True)
    columns = (*MODEL_COLUMNS, *target_columns(TEACHER))

    @property
    def comparisons(self) -> Sequence[Comparison]:
        return (comparison(self.options, self.options.kd_temperature),)

    def counts(self, batch: TensorBatch) -> Totals:
        return {"tokens": batch["response_mask"].sum()}

    def __call__(self, outputs: TensorBatch, batch: TensorBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        mask = batch["response_mask"]
        nll = -(outputs[Output.LOG_PROBS] * mask).sum()
        kd = (outputs[f"{TEACHER}/divergence"] * mask).sum()
        total = (1.0 - self.weight) * nll + self.weight * kd
        sums = {"loss": total, "nll": nll, "kd_loss": kd}
        means: Any = {f"{self.prefix}{name}": (value.detach(), mask.sum()) for name, value in sums.items()}
        metrics: Metrics = {name: Mean(*mean) for name, mean in means.items()}
        metrics |= comparison_metrics(of_teacher(outputs), mask, self.prefix)
        return total / max(float(totals["tokens"]), 1.0), metrics


class Distillation(RowMethod[DistillConfig, SftRow]):
    """Learning a teacher's distributions; a teacher with devices of its own computes a step ahead."""

    frozen_role = TEACHER
    stream = "distill"
    state_key = "rows"
    dropped_metric = "data/dropped_rows"

    def __init__(self, loaded: LoadedConfig[DistillConfig]) -> None:
        super().__init__(loaded)
        self.cache: TeacherCache | None = None

    @cached_property
    def loss(self) -> Loss:
        return DistillLoss(options_from(DivergenceConfig, vars(self.config)), self.config.distill_loss_weight)

    @classmethod
    def data_set(cls, config: DistillConfig) -> Callable[..., SftDataset]:
        """Rows are rendered by the student's templates."""
        return partial(SftDataset.build, system_key=config.system_key)

    def open(self) -> None:
        """Compare vocabularies, since tokenizers of the hub are on this machine only now; and open the cache, which
        knows its teacher's."""
        config, student = self.config, str(self.plan.roles["student"].model_path)
        teacher = config.teacher_pretrain
        if TEACHER in self.plan.roles:
            teacher = str(self.plan.roles[TEACHER].model_path)
            check_vocabularies(student, teacher, "teacher_pretrain", self.loaded.source, fetch=True)
        sizes = [model_number(path, "vocab_size") for path in (student, teacher)]
        # Output matrices are padded differently: only ids that both models have can be compared, as int32.
        self.limit = min(size for size in (*sizes, 2**31 - 1) if size is not None)
        if config.teacher_cache is not None:
            made_with = {
                "vocabulary": vocabulary_hash(student),
                "logits_topk": config.logits_topk,
                "temperature": config.kd_temperature * config.teacher_temperature,
                "dtype": config.teacher_log_probs_dtype,
            }
            if TEACHER in self.plan.roles:
                made_with |= weights_identity(teacher, self.plan.roles[TEACHER].section.model_args)
            elif model_folder(teacher) is not None:
                made_with |= {name: known for name, known in content_identity(teacher).items() if known}
            self.cache = TeacherCache(config.teacher_cache, made_with)

    def lengths(self, rows: Sequence[SftRow]) -> list[int]:
        return [len(row.input_ids) for row in rows]

    def batch(self, rows: Sequence[SftRow], pad: int, ranks: int = 1) -> DataProto:
        batch = demonstration_batch(rows, pad)
        mask = batch.batch["attention_mask" if self.config.distill_on_prompt else "response_mask"].clone()
        mask[:, 0] = False  # nothing predicts it
        batch.batch["response_mask"] = mask
        return batch

    def request(self, rows: Sequence[SftRow], batch: DataProto, models: Models, of_set: str) -> Completion:
        """The teacher's columns, computed for the rows that the cache does not have."""
        keys, missing = self.row_keys(rows, batch), list(range(len(rows)))
        if self.cache is not None:
            missing = [index for index, key in enumerate(keys) if key not in self.cache]
        begun = self.begin(batch, missing, models) if missing else None

        def complete() -> Metrics:
            with models.phase("teacher_forward"):
                self.add_columns(batch, keys, missing, begun)
            if self.cache is None or of_set != "train":
                return {}
            return {"student/cached_rows": Mean(len(batch) - len(missing), len(batch))}

        return complete

    def row_keys(self, rows: Sequence[SftRow], batch: DataProto) -> list[bytes]:
        """Names of the rows in the cache; none without one."""
        if self.cache is None:
            return []
        return [
            row_key(
                np.asarray(row.input_ids), counted[: len(row.input_ids)], row.vision.image_keys if row.vision else ()
            )
            for row, counted in zip(rows, batch.batch["response_mask"].numpy(), strict=True)
        ]

    def begin(self, batch: DataProto, missing: Sequence[int], models: Models) -> Callable[[], TensorBatch]:
        """Let the teacher compute the rows ``missing``."""
        config = self.config
        if not models.has_frozen:
            raise ValueError(
                f"teacher_cache: {config.teacher_cache} lacks {len(missing)} of {len(batch)} rows of this step, "
                "and there is no teacher to compute them; add the section teacher, or fill the cache with this data, "
                "template and sequence_length"
            )
        ask = Ask(
            temperature=config.kd_temperature * config.teacher_temperature,
            top=TopTokens(config.logits_topk, self.limit),
            dtype=config.teacher_log_probs_dtype,
        )
        return models.begin_frozen(batch if len(missing) == len(batch) else batch[np.asarray(missing)], ask)

    def add_columns(
        self, batch: DataProto, keys: list[bytes], missing: list[int], begun: Callable[[], TensorBatch] | None
    ) -> None:
        """Wait for the teacher, keep what it has computed, and add its columns to the batch."""
        computed = begun() if begun is not None else None
        if self.cache is None:
            assert computed is not None
            columns = {name: computed[name] for name in TOP_COLUMNS}
        else:
            mask = batch.batch["response_mask"]
            if computed is not None:
                self.cache.put(rows_of(computed, mask[missing], [keys[index] for index in missing]))
            columns = columns_from([self.cache.get(key) for key in keys], mask)
        for name, column in zip(target_columns(TEACHER), columns.values(), strict=True):
            batch.batch[name] = column

    def flush(self) -> None:
        if self.cache is not None:
            self.cache.flush()
