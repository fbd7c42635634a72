"""The run of the distillation pipeline: rows in, the teacher's log-probs of their tokens, optimizer steps of the
student, evaluations between; and the cache of those log-probs on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roll.algorithms.losses import options_from
from roll.config.loader import LoadedConfig
from roll.config.losses import DivergenceConfig
from roll.config.model_files import check_vocabularies, model_folder, model_number, vocabulary_hash
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import ModelArguments
from roll.datasets import SftDataset
from roll.datasets.types import SftRow
from roll.distributed import PendingCall, ResourceManager
from roll.methods.base import Ask
from roll.methods.distill import TEACHER, DistillLoss
from roll.models.layouts import TopTokens
from roll.models.loading import adapter_fingerprint, content_identity
from roll.pipelines.distill.definition import INDEX, DistillConfig
from roll.pipelines.model_calls import balanced_order
from roll.pipelines.run_context import WEIGHTS
from roll.pipelines.sft.pipeline import demonstration_batch
from roll.pipelines.supervised_pipeline import SupervisedPipeline
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics, merge_metrics, to_floats
from roll.strategies.base import TEACHER_COLUMNS, TensorBatch, teacher_columns
from roll.workers.model import ModelWorker
from roll.workers.training import TrainWorker

FORMAT = 2
"""Version of the cache's files."""
SHARD_TOKENS = 65536
"""Tokens after which a shard of the cache is written."""
RowTargets = dict[str, torch.Tensor]
"""Of one row: ``log_probs`` (n, k), ``ids`` int32 (n, k), ``tail`` float32 (n,)."""


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

    @cached_property
    def loss(self) -> DistillLoss:
        return DistillLoss(options_from(DivergenceConfig, vars(self.config)), self.config.distill_loss_weight)

    @classmethod
    def build(cls, config: DistillConfig) -> Callable[..., SftDataset]:
        """Rows are rendered by the student's templates."""
        return partial(SftDataset.build, system_key=config.system_key)

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
            if TEACHER in self.plan.roles:
                made_with |= weights_identity(teacher, self.plan.roles[TEACHER].section.model_args)
            elif model_folder(teacher) is not None:
                made_with |= {name: known for name, known in content_identity(teacher).items() if known}
            self.cache = TeacherCache(config.teacher_cache, made_with)

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
        ask = Ask(
            temperature=config.kd_temperature * config.teacher_temperature,
            top=TopTokens(config.logits_topk, self.limit),
            dtype=config.teacher_log_probs_dtype,
        )
        rows = batch if len(uncached) == len(batch) else batch[np.asarray(uncached)]
        return self.frozen.call(ModelWorker.forward, rows, ask)

    def with_teacher_columns(self, request: TeacherRequest) -> DataProto:
        """The batch with the teacher's columns."""
        batch, computed = request.batch, self.computed(request)
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

    def computed(self, request: TeacherRequest) -> TensorBatch | None:
        """The teacher's columns of the rows that it was asked about; None where it was not.

        Its workers are replaced once, and asked again, if one dies.
        """
        teacher, calls = self.frozen, deque([request.call])
        if teacher is None or request.call is None:
            return None

        def work() -> TensorBatch:
            call = calls.popleft() if calls else self.teacher_call(request.batch, request.uncached)
            assert call is not None
            return call.result().batch

        return self.context.replacing(teacher, partial(teacher.call_all, ModelWorker.initialize, 0), work)

    def measure(self) -> dict[str, float]:
        """Both terms of the loss on all held-out rows, each weighted by its tokens."""
        measured: list[Metrics] = []
        for rows in self.parts(self.held_out):
            batch = self.with_teacher_columns(self.request(rows, {}))
            self.residency.bring({"student": WEIGHTS})
            loss = replace(self.loss, prefix="val/")
            measured.append(self.learner.call(TrainWorker.measure, batch, loss).result())
        return to_floats(merge_metrics(measured))

    def save(self, steps_done: int, state: dict[str, Any]) -> None:
        if self.cache is not None:
            self.cache.flush()
        super().save(steps_done, state)

    def state_dict(self) -> dict[str, Any]:
        """Rows that only the teacher has seen are drawn again."""
        state = super().state_dict()
        return state | {self.state_key: self.ahead[0].state} if self.ahead else state

    def export(self) -> None:
        if self.cache is not None:
            self.cache.flush()
        super().export()


def row_key(input_ids: np.ndarray, counted: np.ndarray, images: Sequence[str] = ()) -> bytes:
    """A name for a row: its ids (n,), which of them count (bool (n,)), and the names of its images."""
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
        if (self._folder / INDEX).is_file():
            self._read_index()

    def _read_index(self) -> None:
        index = json.loads((self._folder / INDEX).read_text(encoding="utf-8"))
        found = {"format": index.get("format"), **index.get("made_with", {})}
        wanted = {"format": FORMAT, **self._made_with}
        differing = [name for name in wanted if found.get(name) != wanted[name]]
        if differing:
            said = ", ".join(f"{name} {found.get(name)!r}, not {wanted[name]!r}" for name in differing)
            rule = f"was made with {said}; name another folder, or remove this one"
            raise ConfigError([Problem("teacher_cache", str(self._folder), rule)])
        for name in index["shards"]:
            number = len(self._shards)
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
        if key in self._unwritten:
            return self._unwritten[key]
        number, start, stop = self._places[key]
        shard = self._shard(number)
        return {name: shard.get_slice(name)[start:stop] for name in ("log_probs", "ids", "tail")}

    def put(self, rows: Sequence[tuple[bytes, RowTargets]]) -> None:
        """Take rows over; they are on disk after :meth:`flush`, or when there are enough of them."""
        for key, targets in rows:
            if key not in self:
                self._unwritten[key] = targets
        if sum(len(one["tail"]) for one in self._unwritten.values()) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet as a shard, then the index that names it."""
        if not self._unwritten:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rows, number = list(self._unwritten.items()), len(self._shards)
        lengths = [len(one["tail"]) for _, one in rows]
        tensors = {
            name: torch.cat([one[name] for _, one in rows]).contiguous() for name in ("log_probs", "ids", "tail")
        }
        tensors["keys"] = torch.from_numpy(np.stack([np.frombuffer(key, dtype=np.uint8) for key, _ in rows]))
        tensors["starts"] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        name = f"shard-{number:05d}.safetensors"
        save_file(tensors, self._folder / f"{name}.part")
        os.replace(self._folder / f"{name}.part", self._folder / name)
        self._shards.append(name)
        index = {"format": FORMAT, "made_with": self._made_with, "shards": self._shards}
        (self._folder / f"{INDEX}.part").write_text(json.dumps(index, indent=1), encoding="utf-8")
        os.replace(self._folder / f"{INDEX}.part", self._folder / INDEX)
        for (key, _), start, length in zip(rows, tensors["starts"].tolist(), lengths, strict=False):
            self._places[key] = number, start, start + length
        self._unwritten = {}

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = safe_open(self._folder / self._shards[number], framework="pt")
        return self._open[number]


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
