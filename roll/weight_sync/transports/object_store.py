"""``object_store``: a bucket is written into Ray's object store once, and read there by every engine of the host.

Ray carries it to other hosts by itself.  The tensors are written where they will be read: pickled with protocol 5 each
of them travels out of band, so the sender copies once, into shared memory, and an engine not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from roll.protocol.columns import flat_view, tensor_over
from roll.weight_sync.transports.base import Receiver, Sender, Tensors


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


@dataclass(frozen=True)
class ObjectStoreLink:
    """There is nothing to connect: Ray replaces the reference in a call by the bundle."""

    key: str = "object_store"

    def connect(self) -> Receiver:
        return _ObjectStoreReceiver()


class _ObjectStoreReceiver(Receiver):
    def receive(self, parcel: TensorBundle) -> dict[str, torch.Tensor]:
        return parcel.tensors


class ObjectStoreSender(Sender):
    """Args:
    put: puts a bundle where the engines can get at it, and returns what they are handed.
    """

    slots = 2

    def __init__(self, put: Callable[[TensorBundle], Any] = ray.put) -> None:
        self._put = put
        self._shared: deque[Any] = deque()

    def start(self, engines: Sequence[Any], version: int, seconds: float) -> Sequence[ObjectStoreLink]:
        return [ObjectStoreLink()] * len(engines)

    def pack(self, tensors: Tensors) -> Any:
        self._shared.append(self._put(TensorBundle(dict(tensors))))
        return self._shared[-1]

    def release(self) -> None:
        # The last reference here: the store frees the bucket.
        self._shared.popleft()

    def abandon(self) -> None:
        self._shared.clear()
