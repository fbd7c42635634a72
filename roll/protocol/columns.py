"""The tensor columns of a :class:`~roll.protocol.DataProto`: a dict that checks batch sizes, and columns as they were
received, unpacked on demand; and tensors over memory that numpy owns."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """A tensor over ``array``'s memory, also where that is read-only (as in Ray's object store), without a copy.

    Torch has no read-only tensors: whoever takes such a tensor must not write to it.
    """
    if not array.flags.writeable:
        # Through the array interface without its read-only flag, of which torch.from_numpy warns; `owner` keeps the
        # memory alive.
        interface = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}
        exposed = SimpleNamespace(owner=array, __array_interface__=interface)
        array = np.asarray(exposed) if array.size else array.copy()
    return torch.from_numpy(array)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension of stride 1, so that another dtype can be seen in them; copied if not contiguous.

    ``reshape(-1)`` alone is not enough: a tensor of one element counts as contiguous whatever its strides are, and
    keeps them.
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``; by ``memcpy`` where nothing has to be converted, which moves large tensors in host
    memory half as fast again as torch's own loop: it writes past the cache."""
    alike = target.dtype == source.dtype and target.shape == source.shape
    in_host_memory = target.device.type == source.device.type == "cpu"
    if alike and in_host_memory and target.is_contiguous() and source.is_contiguous():
        np.copyto(flat_view(target).view(torch.uint8).numpy(), flat_view(source).view(torch.uint8).numpy())
    else:
        target.copy_(source)


ObjectColumns = dict[str, np.ndarray]


BITS: dict[int, tuple[torch.dtype, type[Any]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}
"""Integers of torch and numpy by their bytes: those that hold a tensor's bits."""


@dataclass(eq=False)
class Spans:
    """The positions ``starts[b] <= t < stops[b]`` of each of B rows of length L that are not padding."""

    starts: np.ndarray
    stops: np.ndarray
    width: int
    _last_rows: tuple[tuple[int, int], Spans] | None = field(default=None, init=False, repr=False)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 (B,): where each row's tokens end in the payload."""
        return np.cumsum(self.stops - self.starts, dtype=np.int64)

    @cached_property
    def total(self) -> int:
        """Tokens inside all spans."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def index(self) -> np.ndarray:
        """int64 (total,): the position of each payload token in the flattened (B * L) column."""
        lengths = self.stops - self.starts
        first = np.arange(len(lengths), dtype=np.int64) * self.width + self.starts
        return np.arange(self.total) + np.repeat(first - (self.ends - lengths), lengths)

    def rows(self, start: int, stop: int) -> Spans:
        """Spans of some rows; the same object for the same rows, so that the columns of a chunk share it too."""
        if self._last_rows is None or self._last_rows[0] != (start, stop):
            part = Spans(self.starts[start:stop], self.stops[start:stop], self.width)
            self._last_rows = ((start, stop), part)
        return self._last_rows[1]

    def covers(self, other: Spans, slack: int) -> bool:
        """True if these spans contain ``other``'s and have at most ``slack`` tokens more in all."""
        if len(self.starts) != len(other.starts) or self.width != other.width:
            return False
        if not other.total <= self.total <= other.total + slack:
            return False
        empty = other.starts == other.stops
        return bool((empty | ((self.starts <= other.starts) & (other.stops <= self.stops))).all())

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cached ends and index (8 bytes a token), which the reader can compute.
        return Spans, (self.starts, self.stops, self.width)


@dataclass(frozen=True, slots=True)
class Packed:
    """A column as received: the number of rows is known, the padded tensor is built on first access.

    Attributes:
        dtype, shape: of the tensor.
        payload: bits inside the spans, (total, ...), maybe narrowed, or of the whole column where there are no spans.
            One int: the same bits everywhere inside.
        spans: None if the column is kept whole.
        padding: bits outside the spans.
    """

    dtype: torch.dtype
    shape: torch.Size
    payload: np.ndarray | int
    spans: Spans | None = None
    padding: int = 0

    def unpack(self) -> torch.Tensor:
        """A fresh tensor that shares memory with nothing and may be written to."""
        bits = BITS[self.dtype.itemsize][1]
        if self.spans is None and isinstance(self.payload, np.ndarray):
            # The payload may be read-only memory of the object store, which all readers on the node share.
            return torch.from_numpy(self.payload.copy()).view(self.dtype)
        value = self.payload if self.spans is None else self.padding
        # Zeros come from untouched pages of the operating system: only what is written later costs memory traffic.
        whole = np.zeros(self.shape, bits) if value == 0 else np.full(self.shape, value, bits)
        if self.spans is not None:
            by_token = whole.reshape(self.shape[0] * self.shape[1], *self.shape[2:])
            by_token[self.spans.index] = self.payload
        return torch.from_numpy(whole).view(self.dtype)

    def peek(self) -> torch.Tensor | None:
        """The tensor over the received bytes without a copy, never to be written to; None if it must be unpacked."""
        if self.spans is not None or not isinstance(self.payload, np.ndarray):
            return None
        return tensor_over(self.payload).view(self.dtype)

    def rows(self, start: int, stop: int) -> Packed:
        """Rows ``start`` to ``stop``, still packed, without a copy."""
        shape = torch.Size((stop - start, *self.shape[1:]))
        payload, spans = self.payload, self.spans
        if isinstance(payload, np.ndarray):
            begin, end = start, stop
            if spans is not None:
                begin = int(spans.ends[start - 1]) if start else 0
                end = int(spans.ends[stop - 1]) if stop > start else begin
            payload = payload[begin:end]
        return Packed(self.dtype, shape, payload, None if spans is None else spans.rows(start, stop), self.padding)


Column = torch.Tensor | Packed


class TensorColumns(MutableMapping[str, torch.Tensor]):
    """Tensors with one common batch dimension (their first), by name.

    It behaves as a dict.  Assigning a column whose number of rows differs from the others' is an error.  Columns that
    arrived over the wire are unpacked when they are first read; what ``[]``, ``get``, ``values`` and ``items`` give is
    then a private, writable tensor, kept for the next access.  :meth:`peek` avoids the copy.
    """

    def __init__(self, columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._columns: dict[str, Column] = {}
        for key, column in columns.stored() if isinstance(columns, TensorColumns) else dict(columns).items():
            self[key] = column

    @property
    def batch_size(self) -> int | None:
        """Rows of every column; None where there is no column."""
        return next((int(column.shape[0]) for column in self._columns.values()), None)

    def stored(self) -> ItemsView[str, Column]:
        """The columns as they are held, packed or not, in their order."""
        return self._columns.items()

    def peek(self, key: str) -> torch.Tensor:
        """Column ``key`` for reading only: a column that travelled dense is seen in place (in Ray's object store), so
        writing to it would change it for every reader."""
        column = self._columns[key]
        view = column.peek() if isinstance(column, Packed) else column
        return self[key] if view is None else view

    def __getitem__(self, key: str) -> torch.Tensor:
        column = self._columns[key]
        if isinstance(column, Packed):
            column = self._columns[key] = column.unpack()
        return column

    def __setitem__(self, key: str, column: Column) -> None:
        """Assign a column, packed or not.

        Raises:
            TypeError: the key is no string or the value no tensor.
            ValueError: the column has no batch dimension, or its length differs from that of the other columns.
        """
        if not isinstance(key, str):
            raise TypeError(f"a column's name must be a str, got {key!r}")
        if not isinstance(column, torch.Tensor | Packed):
            raise TypeError(
                f"batch[{key!r}] must be a torch.Tensor, got {type(column).__name__}; "
                "other values belong into non_tensor_batch (one a row) or meta_info"
            )
        if not column.shape:
            raise ValueError(f"batch[{key!r}] must have a batch dimension, got a 0-dimensional tensor")
        other = next((other for other in self._columns if other != key), None)  # the others agree with this one
        if other is not None and self._columns[other].shape[0] != column.shape[0]:
            raise ValueError(
                f"batch[{key!r}] has {column.shape[0]} rows, but batch[{other!r}] has {self._columns[other].shape[0]}: "
                "all columns of a batch must have the same first dimension"
            )
        self._columns[key] = column

    def __delitem__(self, key: str) -> None:
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, key: object) -> bool:  # the mixin's would unpack it
        return key in self._columns

    def copy(self) -> TensorColumns:
        """The same columns in another dict; nothing is unpacked."""
        return TensorColumns(self)

    def __or__(self, other: Mapping[str, torch.Tensor]) -> TensorColumns:
        merged = self.copy()
        merged.update(other)
        return merged

    def __ior__(self, other: Mapping[str, torch.Tensor]) -> TensorColumns:
        self.update(other)
        return self


def object_array(key: str, values: Collection[object]) -> np.ndarray:
    """``values`` (any sequence, one entry a row) as an object array of shape (B,); such an array is not copied."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    no_rows = isinstance(values, str | bytes | Mapping | torch.Tensor) or not hasattr(values, "__len__")
    if no_rows or (isinstance(values, np.ndarray) and not values.ndim):
        raise TypeError(
            f"non_tensor_batch[{key!r}] must be a list or array with one entry a row, got {type(values).__name__}; "
            "a value for the whole batch belongs into meta_info"
        )
    entries = values.tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else values
    # Not np.array, which makes a 2-dimensional array of lists of equal length.
    return np.fromiter(entries, dtype=object, count=len(entries))
