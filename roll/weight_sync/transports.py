"""Transports: how the bytes of a bucket get from the sending rank to the engines; through host memory and storage.

An update is ``start(version) -> update(bucket)* -> finish(version)``. Control messages (versions, checksums, errors)
are actor calls under every transport; a transport only decides what payload goes with a call and how an engine gets the
tensors from it.

- ``object_store``: a bucket is written into Ray's object store once, and read there by every engine of the host. Ray
  copies it to other hosts by itself. Tensors are pickled out of band (protocol 5), so the sender copies them once, into
  shared memory, and an engine not at all.
- ``safetensors``: a bucket is a file on storage that trainer and engines share. It is written under another name and
  renamed once complete, so an engine never reads half of it. It is deleted when every engine has read it; the
  folder of an update at its end, and those of unfinished updates when the next one starts.
- ``shared_memory``: a bucket in memory that the processes of a host share, for engines on the sender's host. The sender
  keeps two anonymous memory files and fills one while the engines copy out of the other. They stay for the next
  update: page faults of fresh memory cost more than the copy into it. An engine maps a file once, through ``/proc``;
  the kernel frees it with its last user, so no crash leaves it behind.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from roll.protocol.columns import copy_into, flat_view, tensor_over
from roll.weight_sync.encoding import TensorEntry, WeightBucket, lay_out

Tensors = Mapping[str, torch.Tensor]


class Receiver(ABC):
    """Lives in an engine's process."""

    @abstractmethod
    def receive(self, payload: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a bucket. Their memory may be shared, read-only or reused for the next bucket: they are
        valid until the actor call that brought them returns."""

    def settle(self) -> None:
        """The engine has copied the tensors of the last bucket; called before it answers."""

    def close(self) -> None:
        """Free what it holds; it is not used again."""


@dataclass(frozen=True)
class Link:
    """An engine's end of a transport, sent to it at the start of each update; picklable. An engine that gets the same
    link again reuses the receiver of the last update."""

    receiver: type[Receiver]

    def connect(self) -> Receiver:
        """Make the receiver. Most have nothing to connect: the payload says where its tensors are."""
        return self.receiver()


class Sender(ABC):
    """Lives as long as the sending rank's process."""

    receiver: ClassVar[type[Receiver]]
    slots: ClassVar[int] = 1
    """Buckets that may be packed and not yet released: with two, one is packed while the engines take the other."""

    def start(self, engines: Sequence[Any], version: int, seconds: float) -> Sequence[Link]:
        """Begin an update; return a link for each of ``engines``, of which only the identity counts.

        Args:
            seconds: how long the whole exchange may take.
        """
        return [Link(self.receiver)] * len(engines)

    def connect(self, seconds: float) -> None:
        """Called while the engines open their links: the sender's half of a rendezvous, where there is one."""

    @abstractmethod
    def pack(self, tensors: Tensors) -> Any:
        """Return the payload that engines get for this bucket. The tensors must not change until :meth:`release`."""

    def deliver(self, seconds: float) -> None:
        """Called while the engines receive the last payload: send the tensors, where the payload does not hold them."""

    def release(self) -> None:
        """Free the oldest packed bucket, which all engines have copied."""

    def finish(self) -> None:
        """The update has succeeded."""

    def abandon(self) -> None:
        """Close connections after a failed update: the other end may be at any message of it."""


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


class ObjectStoreSender(Sender):
    """Args:
    put: puts a bundle where the engines can get at it, and returns what they are handed.
    """

    receiver = _ObjectStoreReceiver
    slots = 2

    def __init__(self, put: Callable[[TensorBundle], Any] = ray.put) -> None:
        self._put = put
        self._shared: deque[Any] = deque()

    def pack(self, tensors: Tensors) -> Any:
        self._shared.append(self._put(TensorBundle(dict(tensors))))
        return self._shared[-1]

    def release(self) -> None:
        # The owner's last reference: only now may Ray evict the bucket.
        self._shared.popleft()

    def abandon(self) -> None:
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
        self._directory = directory
        self._update = directory
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

    def finish(self) -> None:
        self._update.rmdir()

    def abandon(self) -> None:
        self._files.clear()
        shutil.rmtree(self._update, ignore_errors=True)


_GRAIN = 1 << 21
"""Sizes are rounded up to 2 MiB, the size of a huge page."""


@dataclass(frozen=True)
class SharedPayload:
    """A bucket that lies in a memory file."""

    path: str
    serial: int
    """Tells two files of one path apart: pids and descriptors are reused."""
    slot: int
    size: int
    """Bytes of the file."""
    entries: tuple[TensorEntry, ...]
    used: int
    """Bytes of the bucket."""


class _SharedMemoryReceiver(Receiver):
    def __init__(self) -> None:
        self._mapped: dict[int, tuple[tuple[str, int], np.ndarray]] = {}
        """By slot: which file, and its bytes."""

    def receive(self, payload: SharedPayload) -> dict[str, torch.Tensor]:
        key = (payload.path, payload.serial)
        if payload.slot not in self._mapped or self._mapped[payload.slot][0] != key:
            # The old mapping is freed with its last view; mmap.close() raises BufferError while there is one.
            self._mapped[payload.slot] = key, _mapped(payload.path, payload.size)
        memory = self._mapped[payload.slot][1][: payload.used]
        return WeightBucket(payload.entries, tensor_over(memory)).tensors()

    def close(self) -> None:
        self._mapped.clear()


class SharedMemorySender(Sender):
    receiver = _SharedMemoryReceiver
    slots = 2

    def __init__(self) -> None:
        self._files: list[_MemoryFile | None] = [None] * self.slots
        self._next = 0

    def pack(self, tensors: Tensors) -> SharedPayload:
        named = [(name, tensor.detach()) for name, tensor in tensors.items()]
        entries, used = lay_out(named)
        slot, self._next = self._next, (self._next + 1) % self.slots
        file = self._files[slot]
        if file is None or file.size < used:
            # Freed before the larger one is allocated, so that the sender never holds both.
            self._files[slot] = file = None
            self._files[slot] = file = _MemoryFile(used)
        bucket = WeightBucket(entries, torch.from_numpy(file.memory))
        for target, (_, source) in zip(bucket.tensors().values(), named, strict=True):
            copy_into(target, source)
        return SharedPayload(file.path, file.serial, slot, file.size, entries, used)

    def finish(self) -> None:
        self._next = 0  # a model of one bucket needs one file

    def abandon(self) -> None:
        # An engine may still be copying from them: the next update gets new files.
        self._files, self._next = [None] * self.slots, 0


_serial = itertools.count()


class _MemoryFile:
    """Memory of this process that others on the host can map."""

    def __init__(self, num_bytes: int) -> None:
        self.size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        self.serial = next(_serial)
        self._descriptor = os.memfd_create(f"roll-weights-{self.serial}")
        try:
            # memfd pages are allocated on first write, and running out then is a SIGBUS. fallocate raises ENOSPC.
            os.posix_fallocate(self._descriptor, 0, self.size)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.memory = _mapped(self.path, self.size, writable=True)
        except OSError:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _mapped(path: str, size: int, writable: bool = False) -> np.ndarray:
    """uint8 (size,): the bytes of a memory file."""
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8)
