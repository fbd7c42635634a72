"""Tensors from an engine's process to its ranks' processes: written once, into memory that all of them map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from roll.weight_sync.encoding import TensorEntry, WeightBucket, lay_out

_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class SharedTensors:
    """Says where tensors lie; what the ranks are handed."""

    path: str
    num_bytes: int
    entries: tuple[TensorEntry, ...]

    def open(self) -> dict[str, torch.Tensor]:
        """The tensors, in host memory that others write to once they may."""
        return WeightBucket(self.entries, _mapped(self.path, self.num_bytes)).tensors()


class SharedBucket:
    """A mapped file that holds one bucket after the other; it grows with them."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._num_bytes = 0

    def write(self, tensors: Mapping[str, torch.Tensor]) -> SharedTensors:
        """Copy tensors (any device) there. What was there before is gone."""
        entries, num_bytes = lay_out(list(tensors.items()))
        if self._path is None or num_bytes > self._num_bytes:
            self.close()
            self._path, self._num_bytes = _new_file(max(1, num_bytes)), num_bytes
        shared = SharedTensors(self._path, max(1, num_bytes), entries)
        for name, target in shared.open().items():
            target.copy_(tensors[name])
        return shared

    def close(self) -> None:
        """Give the memory back."""
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)
            self._path = None


def _new_file(num_bytes: int) -> str:
    """A file of that size, in memory if there is room for it.

    Raises:
        OSError: there is none on the disk either.
    """
    folders = [_MEMORY, tempfile.gettempdir()] if Path(_MEMORY).is_dir() else [tempfile.gettempdir()]
    for folder in folders:
        descriptor, path = tempfile.mkstemp(prefix="roll-weights-", dir=folder)
        try:
            # To write beyond what the file system has left would end the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            Path(path).unlink()
            if folder == folders[-1]:
                raise
        else:
            return path
        finally:
            os.close(descriptor)
    raise AssertionError("the last folder returns or raises")


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
