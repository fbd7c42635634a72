"""Weights on their way from trainer to engine: many named tensors in one flat buffer.

A bucket is one uint8 buffer and a table of contents.  Pickled with protocol 5 the buffer travels out of band, so Ray
writes it to its object store once and every engine on the host reads it there without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll.protocol.views import tensor_over

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and enough for any dtype and vector load."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its bucket; ``offset`` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class WeightBucket:
    """Named tensors in one buffer.

    Attributes:
        entries: the table of contents, in the order of packing.
        buffer: uint8 (N,), contiguous. After unpickling from shared memory it must not be written to.
    """

    entries: tuple[TensorEntry, ...]
    buffer: torch.Tensor

    @classmethod
    def pack(cls, named_tensors: NamedTensors, device: torch.device | str = "cpu") -> WeightBucket:
        """Copy tensors (any device, dtype and layout) into a new buffer on ``device``.

        Raises:
            ValueError: a name that occurs twice.
        """
        tensors = [(name, tensor.detach()) for name, tensor in named_tensors]
        entries = _lay_out(tensors)
        size = _padded(entries[-1].offset + entries[-1].num_bytes) if entries else 0
        # The gaps between tensors are zeroed, so that equal weights make equal buffers.
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        bucket = cls(entries, buffer)
        for (_, source), target in zip(tensors, bucket.tensors().values(), strict=True):
            target.copy_(source)
        return bucket

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, views of the buffer. Copy what you keep: they pin the buffer and may be shared memory."""
        views: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            data = self.buffer[entry.offset : entry.offset + entry.num_bytes]
            views[entry.name] = data.view(entry.dtype).view(entry.shape)
        return views

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors themselves, without the gaps between them."""
        return sum(entry.num_bytes for entry in self.entries)

    def __reduce__(self) -> tuple[Any, ...]:
        entries = [(entry.name, str(entry.dtype), entry.shape, entry.offset) for entry in self.entries]
        # A numpy array is pickled as one out-of-band buffer; a tensor would go through torch.save.
        return _rebuild, (entries, self.buffer.cpu().numpy())


def iter_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of consecutive tensors whose aligned sizes add up to at most ``bucket_bytes``; a larger tensor stands alone.

    Tensors are taken from ``named_tensors`` one at a time, so gathered ones need not all exist at once.

    Raises:
        ValueError: ``bucket_bytes`` below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}; a usual value is {512 * 2**20}")
    return _greedy(named_tensors, bucket_bytes)


def _greedy(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    run: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in named_tensors:
        size = _padded(tensor.nbytes)
        if run and used + size > bucket_bytes:
            yield run
            run, used = [], 0
        run.append((name, tensor))
        used += size
    if run:
        yield run


def _lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, tensor in tensors:
        if name in entries:
            raise ValueError(f"two tensors named {name!r} in one weight bucket: names must be unique")
        entries[name] = TensorEntry(name, tensor.dtype, tuple(tensor.shape), offset)
        offset += _padded(tensor.nbytes)
    return tuple(entries.values())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rebuild(entries: list[tuple[str, str, tuple[int, ...], int]], data: np.ndarray) -> WeightBucket:
    table = (
        TensorEntry(name, getattr(torch, dtype.removeprefix("torch.")), shape, offset)
        for name, dtype, shape, offset in entries
    )
    return WeightBucket(tuple(table), tensor_over(data))
