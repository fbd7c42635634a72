"""Transports: how the bytes of a bucket get from the sending rank to the engines; and the engine's half of an update.

An update is ``start(version) -> update(bucket)* -> finish(version)``. Control messages (versions, checksums, errors)
are actor calls under every transport; a transport only decides what payload goes with a call and how an engine gets the
tensors from it. The one here is ``shared_memory``: a bucket in memory that the processes of a host share, for engines
on the sender's host. The sender keeps two anonymous memory files and fills one while the engines copy out of the other.
They stay for the next update: page faults of fresh memory cost more than the copy into it. An engine maps a file once,
through ``/proc``; the kernel frees it with its last user, so no crash leaves it behind.

If a LoRA model's base and adapters are sent separately, :class:`WeightReceiver` merges them, or hands them to an engine
that computes with adapters itself.
"""

from __future__ import annotations

import itertools
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from roll.models.lora import DOWN_PART, UP_PART, merged_weight
from roll.platforms import current_platform
from roll.protocol.columns import copy_into, tensor_over
from roll.weight_sync.encoding import (
    INDICES_PART,
    VALUES_PART,
    BucketHeader,
    Checksum,
    ChecksumKind,
    TensorEntry,
    Update,
    WeightBucket,
    apply_delta,
    checksum_kind,
    lay_out,
    tensor_checksum,
)

if TYPE_CHECKING:
    from roll.strategies.engines.base import GenerationStrategy

Tensors = Mapping[str, torch.Tensor]


class Receiver(ABC):
    """Lives in an engine's process."""

    @abstractmethod
    def receive(self, payload: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a bucket. Their memory may be shared, read-only or reused for the next bucket: they are
        valid until the actor call that brought them returns."""

    def settle(self) -> None:
        """Called when the engine has copied the last bucket's tensors, before it answers."""

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

    def end(self, succeeded: bool) -> None:
        """The update is over. After one that failed, close connections: the other end may be at any message of it."""


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

    def end(self, succeeded: bool) -> None:
        self._next = 0  # a model of one bucket needs one file
        if not succeeded:  # an engine may still be copying from them: the next update gets new files
            self._files = [None] * self.slots


_serial = itertools.count()


class _MemoryFile:
    """Memory of this process that others on the host can map."""

    _descriptor = -1

    def __init__(self, num_bytes: int) -> None:
        self.size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        self.serial = next(_serial)
        self._descriptor = os.memfd_create(f"roll-weights-{self.serial}")
        # memfd pages are allocated on first write, and running out then is a SIGBUS. fallocate raises ENOSPC.
        os.posix_fallocate(self._descriptor, 0, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.memory = _mapped(self.path, self.size, writable=True)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _mapped(path: str, size: int, writable: bool = False) -> np.ndarray:
    with open(path, "r+b" if writable else "rb", buffering=0) as file:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(file.fileno(), size, prot=access), dtype=np.uint8)


class WeightReceiver:
    """Lives in the engine's process, with a method for each message of an update."""

    def __init__(self, engine: GenerationStrategy) -> None:
        self._engine = engine
        self._connections: dict[type[Receiver], tuple[Link, Receiver]] = {}
        """By transport."""
        self._receiver: Receiver | None = None
        self._update: Update | None = None
        self._checksum_kind = checksum_kind(current_platform().device())
        self._held_version: int | None = None
        """The last update that was finished."""
        # Of a LoRA model whose base and adapters come separately: the factor of B A by weight, a copy of each part, and
        # the checksums of the merged weights that this update has given to the engine.
        self._scalings: Mapping[str, float] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._merged: dict[str, int] = {}

    def start(self, start: Update) -> ChecksumKind:
        """Begin an update and return the kind of checksum that the engine will report.

        Raises:
            ValueError: the update is a delta to a version that the engine does not hold.
        """
        if start.base_version not in (None, self._held_version):
            raise ValueError(
                f"weight update {start.version} changes version {start.base_version}; this engine holds "
                f"{'none' if self._held_version is None else self._held_version}"
            )
        if self._update is not None:
            # The last one was cut short by another engine's death. This one is full and overwrites what it brought,
            # but the engine cannot start another reload inside an open one.
            self._update = None
            self._engine.finish_weight_update()
        link = start.link
        known, receiver = self._connections.get(link.receiver, (None, None))
        if receiver is None or known != link:
            if receiver is not None:
                # Forgotten first: should connecting fail, a closed receiver must not be found again.
                del self._connections[link.receiver]
                receiver.close()
            receiver = link.connect()
            self._connections[link.receiver] = link, receiver
        self._receiver = receiver
        self._engine.start_weight_update(start.version)
        self._update, self._held_version = start, None  # None until finished: half an update is no version
        self._scalings, self._merged = start.scalings, {}
        if start.base_version is None:  # else it brings changed tensors only, and the other parts remain valid
            self._parts = {}
        return self._checksum_kind

    def update(self, header: BucketHeader, payload: object) -> None:
        """Load one bucket.

        Raises:
            ValueError: a bucket of another update.
        """
        assert self._receiver is not None and self._update is not None, "no update has been started"
        tensors = self._receiver.receive(payload)
        if header.version != self._update.version:
            raise ValueError(
                f"bucket {header.index} with {next(iter(tensors))} belongs to weight update {header.version}, "
                f"not to {self._update.version}"
            )
        if whole := dict(self._whole_tensors(tensors)):
            self._engine.update_weights(whole)
        del tensors, whole  # memory that is mapped for this call is unmapped with its last tensor
        self._receiver.settle()

    def _whole_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in tensors.items():
            name, separator, part = key.partition("#")
            if separator + part == INDICES_PART:
                weights = self._engine.held_weights()
                assert weights is not None, "this engine takes whole models only"
                # In place where it can be; an engine that stores the tensor strided gets the changed copy back.
                held = weights[name].contiguous()
                apply_delta(held, tensor, tensors[name + VALUES_PART])
                yield name, held
            elif self._takes(key):
                # The base is kept too: subtracting B A from a merged bfloat16 weight does not restore its bits.
                if key in self._parts:
                    self._parts[key].copy_(tensor)
                else:
                    self._parts[key] = tensor.clone()  # the transport reuses the bucket's memory
                if separator + part == UP_PART and {name, name + DOWN_PART} <= self._parts.keys():
                    base, down, up = (self._parts[name + suffix] for suffix in ("", DOWN_PART, UP_PART))
                    merged = merged_weight(base, down, up, self._scalings[name])
                    self._merged[name] = tensor_checksum(merged)
                    yield name, merged
            elif not separator:
                yield name, tensor

    def _takes(self, key: str) -> bool:
        """A or B of an adapted weight, or W where it is merged here."""
        name, separator, _ = key.partition("#")
        return name in self._scalings and (bool(separator) or not self._engine.takes_adapters)

    def finish(self, unsent: Sequence[str] = ()) -> dict[str, Checksum]:
        """Make the new weights current and return the checksum of each tensor that the engine now holds.

        Args:
            unsent: tensors that the update did not bring and that are verified too.
        """
        assert self._update is not None, "no update has been started"
        if self._engine.takes_adapters:
            # Only the whole adapter: if some of it is missing, the verification reports that.
            wanted = {weight + part for weight in self._scalings for part in (DOWN_PART, UP_PART)}
            if wanted and self._parts.keys() >= wanted:
                self._engine.update_adapter(self._parts, self._scalings)
            self._parts = {}
        checksums = dict(self._engine.finish_weight_update())
        others = [name for name in unsent if not self._takes(name)]
        if others:
            checksums |= self._engine.held_checksums(others)
        # The sender never sees a merged weight, so that is verified here: if the engine's differs from the one given,
        # its checksum takes the place of the base's, and the comparison fails.
        wrong = {name: held for name, own in self._merged.items() if (held := checksums.get(name, 0)) != own}
        checksums |= {key: tensor_checksum(tensor) for key, tensor in self._parts.items()}
        checksums |= wrong
        self._held_version, self._update = self._update.version, None
        return checksums

    def close(self) -> None:
        for _, receiver in self._connections.values():
            receiver.close()
        self._connections.clear()
