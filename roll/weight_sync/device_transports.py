"""Transports that move a bucket between devices, past host memory: ``broadcast`` and ``cuda_ipc``.

``broadcast``: a process group of the sending rank and the engines, separate from the trainer's. Large tensors are sent
from where they are, small ones together in one buffer. The group stays for the next update and is formed anew when
the engines have changed or an update has failed.

``cuda_ipc``: a bucket in the trainer's GPU memory, read there by an engine on the same GPU. The sender packs the bucket
into one allocation and hands out CUDA's handle of it (by torch's own reductions, which multiprocessing uses to share
CUDA tensors). An engine maps the allocation, copies from it and unmaps it before it answers; only then does the sender
free or reuse it.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from roll.protocol.columns import flat_view
from roll.weight_sync.encoding import TensorEntry, WeightBucket, lay_out
from roll.weight_sync.transports import Link, Receiver, Sender, Tensors

_LARGE = 1 << 20
"""Bytes from which a tensor is sent by itself, without a copy: the latency of a message is then small compared with
its transfer."""

_serial = itertools.count()

Group = Any
"""A backend of torch.distributed; untyped, since the classes that exist depend on how torch was built."""


@dataclass(frozen=True)
class BroadcastLink(Link):
    key: str
    """Identity of the group: a new one may get the same port, and an engine compares links."""
    host: str
    port: int
    rank: int
    size: int
    backend: str
    seconds: float

    def connect(self) -> Receiver:
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.seconds))
        return _BroadcastReceiver(process_group(self.backend, store, self.rank, self.size, self.seconds), self)


@dataclass(frozen=True)
class BroadcastPayload:
    """The messages of a bucket: first a buffer of small tensors, then the large ones."""

    small: tuple[TensorEntry, ...]
    small_bytes: int
    large: tuple[TensorEntry, ...]
    """Offsets are those in a buffer of them all."""
    large_bytes: int
    seconds: float


class _BroadcastReceiver(Receiver):
    def __init__(self, group: Group, link: BroadcastLink) -> None:
        self._group: Group | None = group
        self._device = group_device(link.backend)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def receive(self, payload: BroadcastPayload) -> dict[str, torch.Tensor]:
        assert self._group is not None, "closed"
        if self._buffer.numel() < payload.large_bytes:
            del self._buffer  # before the larger one is allocated: an engine has little memory to spare
            self._buffer = torch.empty(payload.large_bytes, dtype=torch.uint8, device=self._device)
        small = WeightBucket(payload.small, torch.empty(payload.small_bytes, dtype=torch.uint8, device=self._device))
        large = WeightBucket(payload.large, self._buffer)
        tensors = large.tensors()
        messages = [small.buffer] if payload.small_bytes else []
        messages += [flat_view(tensor).view(torch.uint8) for tensor in tensors.values()]
        for work in broadcasts(self._group, messages, payload.seconds):
            work.wait(timedelta(seconds=payload.seconds))
        return small.tensors() | tensors

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()  # without waiting for the other members
        self._group = None


class BroadcastSender(Sender):
    """Args:
    backend: ``gloo`` or ``nccl``.
    host: an address of this host at which the engines reach it.
    """

    def __init__(self, backend: str, host: str) -> None:
        self._host, self._backend, self._device = host, backend, group_device(backend)
        self._members: list[Any] | None = None
        self._links: list[BroadcastLink] = []
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._messages: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._seconds = 0.0

    def start(self, engines: Sequence[Any], version: int, seconds: float) -> Sequence[BroadcastLink]:
        self._seconds = seconds
        if self._members != list(engines):
            # A process group's members are fixed: a lost or replaced engine means a new group.
            self.end(succeeded=False)
            size = len(engines) + 1
            # TCPStore has no authentication and would listen on every interface; this socket listens on one.
            listener = socket.create_server((self._host, 0), backlog=1024)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )  # without waiting: the engines get the port only in the call that follows
            key = f"{self._host}/{os.getpid()}/{next(_serial)}"
            self._links = [
                BroadcastLink(_BroadcastReceiver, key, self._host, self._store.port, rank, size, self._backend, seconds)
                for rank in range(1, size)
            ]
            self._members = list(engines)
        return self._links

    def connect(self, seconds: float) -> None:
        if self._group is None:
            assert self._store is not None
            self._group = process_group(self._backend, self._store, 0, len(self._links) + 1, seconds)

    def pack(self, tensors: Tensors) -> BroadcastPayload:
        small: list[tuple[str, torch.Tensor]] = []
        large: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors.items():
            (large if tensor.nbytes >= _LARGE else small).append((name, tensor.to(self._device)))
        bucket = WeightBucket.pack(small, self._device)
        entries, size = lay_out(large)
        self._messages = [bucket.buffer] if bucket.buffer.numel() else []
        self._messages += [flat_view(tensor).view(torch.uint8) for _, tensor in large]
        return BroadcastPayload(bucket.entries, bucket.buffer.numel(), entries, size, self._seconds)

    def deliver(self, seconds: float) -> None:
        assert self._group is not None
        self._works = list(broadcasts(self._group, self._messages, seconds))

    def release(self) -> None:
        for work in self._works:
            work.wait(timedelta(seconds=self._seconds))
        self._works, self._messages = [], []

    def end(self, succeeded: bool) -> None:
        if not succeeded:
            if self._group is not None:
                self._group.abort()
            self._group = self._store = self._members = None
            self._works, self._messages = [], []


def broadcasts(group: Group, messages: Sequence[torch.Tensor], seconds: float) -> Iterator[Any]:
    """Start sending ``messages`` (receiving, on ranks other than 0) in their order."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=seconds)
    for message in messages:
        yield group.broadcast([message], options)


def process_group(backend: str, store: Store, rank: int, size: int, seconds: float) -> Group:
    """Collective. Form a group outside torch's registry of groups, which knows one world per process: the sender's is
    the trainer's, an engine's its own."""
    timeout = timedelta(seconds=seconds)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def group_device(backend: str) -> torch.device:
    """The device of a group's messages."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


@dataclass(frozen=True)
class CudaIpcPayload:
    entries: tuple[TensorEntry, ...]
    rebuild: Callable[..., torch.Tensor]
    handle: tuple[Any, ...]


class _CudaIpcReceiver(Receiver):
    def receive(self, payload: CudaIpcPayload) -> dict[str, torch.Tensor]:
        return WeightBucket(payload.entries, payload.rebuild(*payload.handle)).tensors()

    def settle(self) -> None:
        # The engine's copies are asynchronous; once it answers, the sender writes to this memory again.
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


class CudaIpcSender(Sender):
    receiver = _CudaIpcReceiver
    _bucket: WeightBucket | None = None

    def pack(self, tensors: Tensors) -> CudaIpcPayload:
        from torch.multiprocessing.reductions import reduce_tensor

        self._bucket = WeightBucket.pack(tensors.items(), torch.device("cuda", torch.cuda.current_device()))
        # Another process does not wait for this one's stream: it could read before the bucket is filled.
        torch.cuda.synchronize()
        rebuild, handle = reduce_tensor(self._bucket.buffer)
        return CudaIpcPayload(self._bucket.entries, rebuild, handle)

    def release(self) -> None:
        self._bucket = None

    def end(self, succeeded: bool) -> None:
        self._bucket = None
