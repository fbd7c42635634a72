"""The cache of a teacher's log-probs on disk, found by what a row holds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import ModelArguments
from roll.methods.distill_keys import INDEX
from roll.models.loading import adapter_fingerprint, content_identity
from roll.strategies.base import TOP_COLUMNS

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the cache's files."""
SHARD_TOKENS = 65536
"""Tokens after which a shard of the cache is written."""
RowTargets = dict[str, torch.Tensor]
"""Targets of one row: ``log_probs`` (n, k), ``ids`` int32 (n, k), ``tail`` float32 (n,)."""


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
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, self._folder / f"{name}.part")
            (self._folder / f"{INDEX}.part").write_text(json.dumps(index, indent=1), encoding="utf-8")
            os.replace(self._folder / f"{name}.part", self._folder / name)
            os.replace(self._folder / f"{INDEX}.part", self._folder / INDEX)
        except (OSError, SafetensorError) as error:  # of safetensors, whatever the system said
            self._ended = True
            need = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            logger.error(
                "teacher_cache: %s takes no shard of %.1f MB; the run goes on and caches no more rows: %s",
                self._folder,
                need,
                error,
            )
            for part in (f"{name}.part", f"{INDEX}.part"):
                with suppress(OSError):
                    (self._folder / part).unlink(missing_ok=True)
            return
        self._shards.append(name)
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
