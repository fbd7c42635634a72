"""The tensor columns of a :class:`~roll.protocol.DataProto`: a dict that checks batch sizes and unpacks on demand; and
tensors over memory that numpy owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, SupportsIndex, cast

import numpy as np
import torch


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """A tensor over ``array``'s memory, also where that is read-only (as in Ray's object store), without a copy.

    Torch has no read-only tensors: whoever takes such a tensor must not write to it.
    """
    if not array.flags.writeable:
        array = np.asarray(_Exposed(array)) if array.size else array.copy()
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


class _Exposed:
    """An array's memory under the array interface, without its read-only flag: ``torch.from_numpy`` warns of that."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


ObjectColumns = dict[str, np.ndarray]


class PackedColumn(ABC):
    """A column as received: the number of rows is known, the padded tensor is built on first access."""

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """A fresh tensor that shares memory with nothing and may be written to."""

    @abstractmethod
    def peek(self) -> torch.Tensor | None:
        """The tensor over the received bytes without a copy, never to be written to; None if it must be unpacked."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> PackedColumn:
        """Rows ``start`` to ``stop``, still packed, without a copy."""


Column = torch.Tensor | PackedColumn


class TensorColumns(dict[str, torch.Tensor]):
    """A dict of tensors with one common batch dimension (their first).

    It behaves as a plain dict.  Assigning a column whose number of rows differs from the others' is an error.  Columns
    that arrived over the wire are unpacked when they are first read; what ``[]``, ``get``, ``values`` and ``items``
    give is then a private, writable tensor, kept for the next access.  :meth:`peek` avoids the copy.
    """

    def __init__(self, columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        for key, column in columns.stored() if isinstance(columns, TensorColumns) else dict(columns).items():
            self.put(key, column)

    @property
    def batch_size(self) -> int | None:
        """Rows of every column; None where there is no column."""
        for _, column in self.stored():
            return int(column.shape[0])
        return None

    def stored(self) -> Iterator[tuple[str, Column]]:
        """The columns as they are held, packed or not, in their order."""
        return cast("Iterator[tuple[str, Column]]", iter(dict.items(self)))

    def peek(self, key: str) -> torch.Tensor:
        """Column ``key`` for reading only: a column that travelled dense is seen in place (in Ray's object store), so
        writing to it would change it for every reader."""
        column: Column = dict.__getitem__(self, key)
        view = column.peek() if isinstance(column, PackedColumn) else column
        return self[key] if view is None else view

    def put(self, key: str, column: Column) -> None:
        """Assign a column, packed or not.

        Raises:
            TypeError: the key is no string or the value no tensor.
            ValueError: the column has no batch dimension, or its length differs from that of the other columns.
        """
        if not isinstance(key, str):
            raise TypeError(f"a column's name must be a str, got {key!r}")
        if not isinstance(column, torch.Tensor | PackedColumn):
            raise TypeError(
                f"batch[{key!r}] must be a torch.Tensor, got {type(column).__name__}; "
                "other values belong into non_tensor_batch (one a row) or meta_info"
            )
        if not column.shape:
            raise ValueError(f"batch[{key!r}] must have a batch dimension, got a 0-dimensional tensor")
        for other, stored in self.stored():
            if other != key and stored.shape[0] != column.shape[0]:
                raise ValueError(
                    f"batch[{key!r}] has {column.shape[0]} rows, but batch[{other!r}] has {stored.shape[0]}: "
                    "all columns of a batch must have the same first dimension"
                )
            if other != key:  # the others agree with this one
                break
        dict.__setitem__(self, key, cast(torch.Tensor, column))

    def __getitem__(self, key: str) -> torch.Tensor:
        column: Column = dict.__getitem__(self, key)
        if isinstance(column, PackedColumn):
            column = column.unpack()
            dict.__setitem__(self, key, column)
        return column

    __setitem__ = put

    # Overriding __iter__ also makes dict(columns) and **columns go through __getitem__.
    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def get(self, key: str, default: object = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> ValuesView[torch.Tensor]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[str, torch.Tensor]:  # type: ignore[override]
        return ItemsView(self)

    def pop(self, key: str, *default: object) -> Any:
        if key in self:
            self[key]  # a packed column becomes its tensor
        return dict.pop(self, key, *default)

    def popitem(self) -> tuple[str, torch.Tensor]:
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> torch.Tensor:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def copy(self) -> TensorColumns:
        """A new dict of the same columns; nothing is unpacked."""
        return TensorColumns(self)

    def __or__(self, other: Mapping[str, torch.Tensor]) -> TensorColumns:  # type: ignore[override]
        merged = self.copy()
        merged.update(other)
        return merged

    def __ior__(self, other: Mapping[str, torch.Tensor]) -> TensorColumns:  # type: ignore[override]
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return TensorColumns, (dict(self),)


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
