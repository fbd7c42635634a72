"""``shared_memory``: a bucket in memory that the processes of a host share, for engines on the sender's host.

The sender keeps two anonymous memory files, fills them in turn, and fills one while the engines copy out of the other.
They stay for the next update: memory that a process has not touched before costs more than copying into it.  An engine
maps a file by way of ``/proc``, once; the kernel frees it when nobody has it any more, however the processes ended.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll.protocol.columns import copy_into, tensor_over
from roll.weight_sync.buckets import TensorEntry, WeightBucket, lay_out
from roll.weight_sync.transports.base import Receiver, Sender, Tensors

_GRAIN = 1 << 21
"""Sizes are multiples of this many bytes: a huge page."""


@dataclass(frozen=True)
class SharedParcel:
    """A bucket that lies in a memory file."""

    path: str
    serial: int
    """Equal path and serial: the same file, however often numbers are used again."""
    slot: int
    size: int
    """Bytes of the file."""
    entries: tuple[TensorEntry, ...]
    used: int
    """Bytes of the bucket."""


@dataclass(frozen=True)
class SharedMemoryLink:
    """There is nothing to connect: a parcel says where it lies."""

    key: str = "shared_memory"

    def connect(self) -> Receiver:
        return _SharedMemoryReceiver()


class _SharedMemoryReceiver(Receiver):
    def __init__(self) -> None:
        self._mapped: dict[int, tuple[tuple[str, int], np.ndarray]] = {}
        """By slot: which file, and its bytes."""

    def receive(self, parcel: SharedParcel) -> dict[str, torch.Tensor]:
        key = (parcel.path, parcel.serial)
        if parcel.slot not in self._mapped or self._mapped[parcel.slot][0] != key:
            # What was mapped before goes with its last view.
            self._mapped[parcel.slot] = key, _mapped(parcel.path, parcel.size)
        memory = self._mapped[parcel.slot][1][: parcel.used]
        return WeightBucket(parcel.entries, tensor_over(memory)).tensors()

    def close(self) -> None:
        self._mapped.clear()


class SharedMemorySender(Sender):
    slots = 2

    def __init__(self) -> None:
        self._files: list[_MemoryFile | None] = [None] * self.slots
        self._next = 0

    def start(self, engines: Sequence[object], version: int, seconds: float) -> Sequence[SharedMemoryLink]:
        self._next = 0
        return [SharedMemoryLink()] * len(engines)

    def pack(self, tensors: Tensors) -> SharedParcel:
        named = [(name, tensor.detach()) for name, tensor in tensors.items()]
        entries, used = lay_out(named)
        slot, self._next = self._next, (self._next + 1) % self.slots
        file = self._files[slot]
        if file is None or file.size < used:
            # Freed first: where the engines still hold it, so do they when they are handed the next one.
            self._files[slot] = file = None
            self._files[slot] = file = _MemoryFile(used)
        bucket = WeightBucket(entries, torch.from_numpy(file.memory))
        for target, (_, source) in zip(bucket.tensors().values(), named, strict=True):
            copy_into(target, source)
        return SharedParcel(file.path, file.serial, slot, file.size, entries, used)

    def abandon(self) -> None:
        # An engine may still be reading: the next update must not write there.
        self._files = [None] * self.slots


_serial = itertools.count()


class _MemoryFile:
    """Memory of this process that others on the host can map."""

    def __init__(self, num_bytes: int) -> None:
        self.size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        self.serial = next(_serial)
        self._descriptor = os.memfd_create(f"roll-weights-{self.serial}")
        try:
            # Taken now, with an error if there is not as much: a write that finds no memory would end the process.
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
