"""How a DataProto is pickled: columns packed (:mod:`roll.protocol.packing`), arrays out of band, no torch.save.

With pickle protocol 5 (Ray's arguments, results and ``ray.put``; multiprocessing falls back to copies) the payload of
each column is a buffer of its own, so Ray writes it to the object store once and readers map it.  On arrival nothing is
unpacked: a column costs its reader something when it is first touched, ``select``, ``chunk`` and slices work on the
packed form, and a batch that is passed on is sent as it came.

What a reader gets from ``batch[key]`` is private and writable, ``batch.peek(key)`` is read-only and free for dense
columns.  Tensors inside objects and ``meta_info`` arrive as private copies.  Devices and gradients do not travel:
every tensor arrives on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.protocol.columns import Column
from roll.protocol.packing import Packed, Spans, pack, to_bits

if TYPE_CHECKING:
    from roll.protocol.data_proto import DataProto

_PLAIN = {type(None), bool, int, float, complex, str, bytes}


def reduce(data: DataProto) -> tuple[Any, ...]:
    """What ``DataProto.__reduce_ex__`` returns."""
    data.check()
    columns = dict(data.batch.stored())
    fresh = {key: column for key, column in columns.items() if isinstance(column, torch.Tensor)}
    packed = dict(zip(fresh, pack(list(fresh.values())), strict=True))
    states = [_state(key, packed.get(key, column)) for key, column in columns.items()]
    objects = {key: _without_tensors(list(values)) for key, values in data.non_tensor_batch.items()}
    return rebuild, (states, objects, _without_tensors(data.meta_info))


def rebuild(states: list[tuple[Any, ...]], objects: dict[str, list[Any]], meta_info: dict[str, Any]) -> DataProto:
    from roll.protocol.data_proto import DataProto

    columns: dict[str, Column] = {}
    for key, dtype, shape, payload, spans, padding in states:
        columns[key] = Packed(getattr(torch, dtype), torch.Size(shape), payload, spans, padding)
    arrays = {key: np.fromiter(values, dtype=object, count=len(values)) for key, values in objects.items()}
    return DataProto._build(columns, arrays, meta_info)


def _state(key: str, column: Column) -> tuple[str, str, tuple[int, ...], np.ndarray | int, Spans | None, int]:
    assert isinstance(column, Packed)
    return key, _name(column.dtype), tuple(column.shape), column.payload, column.spans, column.padding


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_tensors(value: Any) -> Any:
    """``value`` with the tensors in its lists, tuples and dicts in a form that pickles without torch.save."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _TensorInTransit(value)
    if kind is list or kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else kind(map(_without_tensors, value))
    if kind is dict:
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return value


class _TensorInTransit:
    """Stands for a tensor while it is pickled; unpickling gives the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (to_bits(self._tensor), _name(self._tensor.dtype))


def _arrived(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(getattr(torch, dtype))
