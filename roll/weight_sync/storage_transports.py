"""Transports through storage that trainer and engines share: ``object_store`` and ``safetensors``.

- ``object_store``: a bucket is written into Ray's object store once, and read there by every engine of the host. Ray
  copies it to other hosts by itself. Tensors are pickled out of band (protocol 5), so the sender copies them once, into
  shared memory, and an engine not at all.
- ``safetensors``: a bucket is a file on storage that trainer and engines share. It is written under another name and
  renamed once complete, so an engine never reads half of it. It is deleted when every engine has read it; the
  folder of an update at its end, and those of unfinished updates when the next one starts.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roll.protocol.columns import flat_view, tensor_over
from roll.weight_sync.transports import Link, Receiver, Sender, Tensors


@dataclass(frozen=True, eq=False)
class TensorBundle:
    """Named tensors that pickle without copies. After unpickling from shared memory they must not be written to."""

    tensors: dict[str, torch.Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        table = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        # A numpy array is pickled as one out-of-band buffer; a tensor would go through torch.save.
        arrays = [flat_view(tensor.cpu()).view(torch.uint8).numpy() for tensor in self.tensors.values()]
        return _rebuild, (table, arrays)


def _rebuild(table: list[tuple[str, str, tuple[int, ...]]], arrays: list[np.ndarray]) -> TensorBundle:
    tensors = {}
    for (name, dtype, shape), array in zip(table, arrays, strict=True):
        flat = flat_view(tensor_over(array)).view(getattr(torch, dtype.removeprefix("torch.")))
        tensors[name] = flat.view(shape)
    return TensorBundle(tensors)


class _ObjectStoreReceiver(Receiver):
    def receive(self, payload: TensorBundle) -> dict[str, torch.Tensor]:
        return payload.tensors  # Ray resolves a top-level ObjectRef argument before the call


@dataclass(eq=False)
class ObjectStoreSender(Sender):
    receiver = _ObjectStoreReceiver
    slots = 2

    put: Callable[[TensorBundle], Any] = ray.put
    """Puts a bundle where the engines can get at it, and returns what they are handed."""
    _shared: deque[Any] = field(default_factory=deque)

    def pack(self, tensors: Tensors) -> Any:
        self._shared.append(self.put(TensorBundle(dict(tensors))))
        return self._shared[-1]

    def release(self) -> None:
        # The owner's last reference: only now may Ray evict the bucket.
        self._shared.popleft()

    def end(self, succeeded: bool) -> None:
        self._shared.clear()


_PREFIX = "update-"


class _FileReceiver(Receiver):
    def receive(self, payload: str) -> dict[str, torch.Tensor]:
        # Views of an mmap, which stays valid after the sender has unlinked the file.
        with safe_open(payload, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


class FileSender(Sender):
    """Args:
    directory: on shared storage, of this run alone.
    """

    receiver = _FileReceiver
    slots = 2

    def __init__(self, directory: Path) -> None:
        self._directory = self._update = directory
        self._index = 0
        self._files: deque[Path] = deque()

    def start(self, engines: Sequence[object], version: int, seconds: float) -> Sequence[Link]:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Left by a process that was killed in an update. Nobody reads them: the folder is this run's alone.
        for stale in self._directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(stale)
        self._update = self._directory / f"{_PREFIX}{version}"
        self._update.mkdir()
        self._index = 0
        return super().start(engines, version, seconds)

    def pack(self, tensors: Tensors) -> str:
        file = self._update / f"bucket-{self._index:05}.safetensors"
        self._index += 1
        partial = file.with_suffix(".partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.rename(file)
        self._files.append(file)
        return str(file)

    def release(self) -> None:
        self._files.popleft().unlink()

    def end(self, succeeded: bool) -> None:
        self._files.clear()
        shutil.rmtree(self._update, ignore_errors=True)
