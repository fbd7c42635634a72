"""Distillation: a student learns the distributions of a teacher on given rows, with a cache of them on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.algorithms.distillation import comparison_metrics, divergence
from roll.algorithms.losses import options_from
from roll.checkpoint.folders import atomic_file
from roll.config.loader import LoadedConfig
from roll.config.losses import DivergenceConfig
from roll.config.model_files import model_folder, model_number, vocabulary_hash
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import ModelArguments
from roll.datasets import SftDataset
from roll.datasets.types import SftRow
from roll.methods.base import MODEL_COLUMNS, Ask, Loss, Totals
from roll.methods.distill_keys import INDEX, DistillConfig
from roll.methods.rows import Completion, Models, RowMethod, demonstration_batch
from roll.methods.teachers import TEACHER, check_vocabularies
from roll.models.layouts import TopTokens
from roll.models.loading import adapter_fingerprint, content_identity
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import TOP_COLUMNS, Comparison, Output, TensorBatch, target_columns

logger = logging.getLogger(__name__)

# Version of the cache's files.
FORMAT = 2
# Tokens after which a shard of the cache is written.
SHARD_TOKENS = 65536
RowTargets = dict[str, torch.Tensor]
"""Targets of one row: ``log_probs`` (n, k), ``ids`` int32 (n, k), ``tail`` float32 (n,)."""


def comparison(options: DivergenceConfig, temperature: float) -> Comparison:
    """The teacher whose columns a batch has, compared by the divergence that ``options`` choose."""
    return Comparison(TEACHER, temperature, partial(divergence, options=options))


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
        # A copy: the column is changed, and the attention mask must not be.
        mask = batch.batch["attention_mask" if self.config.distill_on_prompt else "response_mask"].clone()
        mask[:, 0] = False  # nothing predicts it
        batch.batch["response_mask"] = mask
        return batch

    def request(self, rows: Sequence[SftRow], batch: DataProto, models: Models, of_set: str) -> Completion:
        """The teacher's columns, computed for the rows that the cache does not have."""
        config, keys, missing = self.config, list[bytes](), list(range(len(rows)))
        if self.cache is not None:
            for row, counted in zip(rows, batch.batch["response_mask"].numpy(), strict=True):
                images: Sequence[str] = row.vision.image_keys if row.vision else ()
                keys.append(row_key(np.asarray(row.input_ids), counted[: len(row.input_ids)], images))
            missing = [index for index, key in enumerate(keys) if key not in self.cache]
        begun = None
        if missing and models.frozen is None:
            raise ValueError(
                f"teacher_cache: {config.teacher_cache} lacks {len(missing)} of {len(batch)} rows of this step, "
                "and there is no teacher to compute them; add the section teacher, or fill the cache with this data, "
                "template and sequence_length"
            )
        if missing:
            ask = Ask(
                temperature=config.kd_temperature * config.teacher_temperature,
                top=TopTokens(config.logits_topk, self.limit),
                dtype=config.teacher_log_probs_dtype,
            )
            part = batch if len(missing) == len(batch) else batch[np.asarray(missing)]
            begun = models.begin_frozen(part, ask)

        def complete() -> Metrics:
            with models.phase("teacher_forward"):
                self.add_columns(batch, keys, missing, begun)
            if self.cache is None or of_set != "train":
                return {}
            return {"student/cached_rows": Mean(len(batch) - len(missing), len(batch))}

        return complete

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


def row_key(input_ids: np.ndarray, counted: np.ndarray, images: Sequence[str] = ()) -> bytes:
    """A name for a row: its ids (n,), which of them count (bool (n,)), and the names of its images."""
    # Always int64, whatever type a data set holds ids in: caches outlive data sets.
    digest = hashlib.blake2b(input_ids.astype(np.int64).tobytes(), digest_size=16)
    digest.update(np.packbits(counted).tobytes())
    digest.update(" ".join(images).encode())
    return digest.digest()


def weights_identity(path: str | None, args: ModelArguments) -> dict[str, Any]:
    """Properties of a model that its numbers depend on, whatever its folder is called; the path where there are no
    weights."""
    identity = content_identity(path)
    return {
        **identity,
        "weights": identity["weights"] or path,
        "adapter": adapter_fingerprint(args.adapter_name_or_path),
        "model_config_kwargs": args.model_config_kwargs,
        "dtype_of_teacher": args.dtype,
    }


class TeacherCache:
    """The folder of ``teacher_cache``: a teacher's log-probs in safetensors shards and ``index.json``, so that one pass
    of the teacher serves many epochs and many students.

    A row is found by its token ids and the positions that count, not by its place in a file. Per token that counts a
    shard holds ``log_probs`` (k), ``ids`` int32 (k) and ``tail`` float32; per row ``keys`` uint8 (16) and ``starts``
    int64, where its tokens begin. The index names the shards and what they were made with; a shard that it does not
    name does not count, so a killed run leaves a cache of whole shards.

    A cache is never worth a run: where the folder takes no shard (a full disk, a quota), nothing more is written, which
    is logged once, and later rows are the teacher's again.

    Args:
        made_with: what the log-probs depend on besides the row; plain JSON values.

    Raises:
        ConfigError: the folder was made with something else.
    """

    def __init__(self, folder: str, made_with: Mapping[str, Any]) -> None:
        self._folder = Path(folder).expanduser()
        self._made_with = dict(made_with)
        self._shards: list[str] = []
        self._places: dict[bytes, tuple[int, int, int]] = {}
        self._open: dict[int, Any] = {}
        self._unwritten: dict[bytes, RowTargets] = {}
        self._passing: dict[bytes, RowTargets] = {}
        """Rows of the newest :meth:`put`, where nothing is written any more."""
        self._ended = False
        if not (self._folder / INDEX).is_file():
            return
        index = json.loads((self._folder / INDEX).read_text(encoding="utf-8"))
        found = {"format": index.get("format"), **index.get("made_with", {})}
        wanted = {"format": FORMAT, **self._made_with}
        differing = [name for name in wanted if found.get(name) != wanted[name]]
        if differing:
            said = ", ".join(f"{name} {found.get(name)!r}, not {wanted[name]!r}" for name in differing)
            rule = f"was made with {said}; name another folder, or remove this one"
            raise ConfigError([Problem("teacher_cache", str(self._folder), rule)])
        for number, name in enumerate(index["shards"]):
            self._shards.append(name)
            shard = self._shard(number)
            starts = shard.get_tensor("starts").tolist()
            for row, key in enumerate(shard.get_tensor("keys").numpy()):
                self._places[key.tobytes()] = number, starts[row], starts[row + 1]

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._unwritten

    def __len__(self) -> int:
        return len(self._places) + len(self._unwritten)

    def get(self, key: bytes) -> RowTargets:
        """The cached columns of a row.

        Raises:
            KeyError: the cache does not have it.
        """
        for rows in (self._unwritten, self._passing):
            if key in rows:
                return rows[key]
        number, start, stop = self._places[key]
        shard = self._shard(number)
        return {name: shard.get_slice(name)[start:stop] for name in ("log_probs", "ids", "tail")}

    def put(self, rows: Sequence[tuple[bytes, RowTargets]]) -> None:
        """Take rows over; they are on disk after :meth:`flush`, or when there are enough of them."""
        if self._ended:
            # The caller reads them before its next call. Not one after another, or memory would hold the whole cache.
            self._passing = dict(rows)
            return
        for key, targets in rows:
            if key not in self:
                self._unwritten[key] = targets
        # Few large files: a run of many small shards would open one for each row that it reads.
        if sum(len(one["tail"]) for one in self._unwritten.values()) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet as a shard, then the index that names it."""
        if not self._unwritten or self._ended:
            return
        rows, number = list(self._unwritten.items()), len(self._shards)
        lengths = [len(one["tail"]) for _, one in rows]
        tensors = {
            name: torch.cat([one[name] for _, one in rows]).contiguous() for name in ("log_probs", "ids", "tail")
        }
        tensors["keys"] = torch.from_numpy(np.stack([np.frombuffer(key, dtype=np.uint8) for key, _ in rows]))
        tensors["starts"] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        name = f"shard-{number:05d}.safetensors"
        index = {"format": FORMAT, "made_with": self._made_with, "shards": [*self._shards, name]}
        try:
            # The shard, whose block ends first, before the index, which must never name one that is not whole.
            with atomic_file(self._folder / INDEX) as names, atomic_file(self._folder / name) as shard:
                save_file(tensors, shard)
                names.write_text(json.dumps(index, indent=1), encoding="utf-8")
        except (OSError, SafetensorError) as error:  # of safetensors, whatever the system said
            self._ended = True
            need = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            logger.error(
                "teacher_cache: %s takes no shard of %.1f MB; the run goes on and caches no more rows: %s",
                self._folder,
                need,
                error,
            )
            return
        self._shards.append(name)
        # Not strict: `starts` has one entry more, the end of the last row.
        for (key, _), start, length in zip(rows, tensors["starts"].tolist(), lengths, strict=False):
            self._places[key] = number, start, start + length
        self._unwritten = {}

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = safe_open(self._folder / self._shards[number], framework="pt")
        return self._open[number]


def rows_of(
    columns: Mapping[str, torch.Tensor], mask: torch.Tensor, keys: Sequence[bytes]
) -> list[tuple[bytes, RowTargets]]:
    """The tokens that count of each row, by key, from columns (B, L, ...) as the teacher gives them."""
    log_probs, ids, tail = (columns[name] for name in TOP_COLUMNS)
    return [
        (key, {"log_probs": log_probs[row][own], "ids": ids[row][own], "tail": tail[row][own]})
        for row, (key, own) in enumerate(zip(keys, mask, strict=True))
    ]


def columns_from(rows: Sequence[RowTargets], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse, in the order of :data:`TOP_COLUMNS`."""
    columns = {}
    for name, part in zip(TOP_COLUMNS, ("log_probs", "ids", "tail"), strict=True):
        flat = torch.cat([row[part] for row in rows])
        columns[name] = flat.new_zeros(*mask.shape, *flat.shape[1:])
        columns[name][mask] = flat
    return columns
