"""Least cost of a transfer of bytes: one copy in memory, and a gloo broadcast between two processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from roll.weight_sync.device_transports import process_group

DEADLINE = 300.0
_CHUNK = 1 << 28
"""Bytes that are copied at a time: more than any cache holds, little compared with a model."""


class RawCopy:
    """``memcpy`` between buffers that exist."""

    def __init__(self, num_bytes: int) -> None:
        size = min(num_bytes, _CHUNK)
        self._sizes = _parts(num_bytes, size)
        self._source, self._target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)

    def __call__(self) -> None:
        for size in self._sizes:
            np.copyto(self._target[:size], self._source[:size])


class RawBroadcast:
    """gloo, in messages of ``message_bytes`` each; the other rank is a process of its own."""

    def __init__(self, num_bytes: int, message_bytes: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._sizes = _parts(num_bytes, message_bytes)
        context = multiprocessing.get_context("spawn")
        self._receiver = context.Process(target=_receive, args=(store.port, self._sizes))
        self._receiver.start()
        self._group = process_group("gloo", store, 0, 2, DEADLINE)
        self._store = store
        self._buffer = torch.ones(self._sizes[0], dtype=torch.uint8)

    def __call__(self) -> None:
        self._say(1)
        _broadcast(self._group, self._buffer, self._sizes)

    def close(self) -> None:
        self._say(0)
        self._receiver.join()

    def _say(self, go_on: int) -> None:
        self._group.broadcast([torch.tensor([go_on])], dist.BroadcastOptions()).wait()


def _receive(port: int, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    group = process_group("gloo", store, 1, 2, DEADLINE)
    buffer = torch.zeros(sizes[0], dtype=torch.uint8)
    go_on = torch.zeros(1, dtype=torch.int64)
    while True:
        group.broadcast([go_on], dist.BroadcastOptions()).wait()
        if not go_on.item():
            return
        _broadcast(group, buffer, sizes)


def _broadcast(group: Any, buffer: torch.Tensor, sizes: list[int]) -> None:
    for size in sizes:
        group.broadcast([buffer[:size]], dist.BroadcastOptions()).wait()
    # The sender of a message is done before it has arrived: the last word is the receiver's.
    group.barrier().wait()


def _parts(num_bytes: int, size: int) -> list[int]:
    return [min(size, num_bytes - start) for start in range(0, num_bytes, size)]


@contextmanager
def raw_transfers(num_bytes: int, message_bytes: int) -> Iterator[dict[str, Any]]:
    """By name, functions that move ``num_bytes`` once."""
    broadcast = RawBroadcast(num_bytes, min(message_bytes, num_bytes))
    yield {"memcpy": RawCopy(num_bytes), "gloo": broadcast}
    broadcast.close()
