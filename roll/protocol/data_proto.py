"""DataProto: the batch that phases and clusters hand to each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import torch

from roll.protocol import joining, packing
from roll.protocol.columns import Column, ObjectColumns, Packed, TensorColumns, object_array


@dataclass(frozen=True)
class DataProtoItem:
    """One row: tensors without their batch dimension (views), the row's objects, the batch's ``meta_info`` itself."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class DataProto:
    """Columns of one batch: tensors, objects, and facts about the batch as a whole.

    Attributes:
        batch: tensors of shape (B, ...), all with the same B; a dict (see
            :class:`~roll.protocol.columns.TensorColumns`).
        non_tensor_batch: numpy object arrays of shape (B,).
        meta_info: whatever belongs to the batch as a whole.

    Each verb says whether it changes the batch or returns another one.  No verb copies more than it must: ``select``,
    ``chunk``, ``split`` and slices share tensor memory with their source (a column that arrived over the wire and was
    not read yet is unpacked by each of them on its own), every other row selection copies.  So give a column a new
    value by assignment, not in place, unless the batch is yours alone.  ``meta_info`` is copied one level deep.

    Raises (constructor and assignments):
        TypeError: a column of the wrong kind.
        ValueError: columns of different lengths.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self._batch = TensorColumns(batch or {})
        objects = (non_tensor_batch or {}).items()
        self.non_tensor_batch: ObjectColumns = {key: object_array(key, values) for key, values in objects}
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.check()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """A batch over the given tensors (not copied) and per-row objects (lists become object arrays)."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build from one dict of both kinds: tensors go to ``batch``, the rest to ``non_tensor_batch``."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
        return cls(tensors, objects, meta_info)

    @property
    def batch(self) -> TensorColumns:
        return self._batch

    @batch.setter
    def batch(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._batch = TensorColumns(columns)

    def check(self) -> None:
        """Raise ``ValueError`` if columns differ in length or an object column is no 1-d object array."""
        size, source = self._batch.batch_size, "the tensor columns have"
        for key, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim != 1:
                raise ValueError(
                    f"non_tensor_batch[{key!r}] must be a 1-dimensional numpy array of dtype object, got "
                    f"{type(values).__name__}; build the batch by DataProto.from_dict, which converts lists"
                )
            if size is not None and len(values) != size:
                raise ValueError(
                    f"non_tensor_batch[{key!r}] has {len(values)} rows, but {source} {size}: "
                    "all columns of a batch must have the same length"
                )
            size, source = len(values), f"non_tensor_batch[{key!r}] has"

    def __len__(self) -> int:
        """Rows B; 0 where there are no columns."""
        size = self._batch.batch_size
        return next((len(values) for values in self.non_tensor_batch.values()), 0) if size is None else size

    def __bool__(self) -> bool:
        """A DataProto is always true, also without rows, so that ``if data`` asks whether there is one."""
        return True

    def __repr__(self) -> str:
        columns = [f"{key}: {column.dtype} {tuple(column.shape)}" for key, column in self._batch.stored()]
        columns += [f"{key}: object" for key in self.non_tensor_batch]
        return f"DataProto({len(self)} rows; {', '.join(columns)}; meta_info: {', '.join(self.meta_info) or '-'})"

    # Columns

    def select(
        self,
        batch_keys: joining.Names | None = None,
        non_tensor_batch_keys: joining.Names | None = None,
        meta_info_keys: joining.Names | None = None,
    ) -> DataProto:
        """A batch of the named columns, sharing their memory; None means all of a kind, an empty list none.

        Raises:
            KeyError: a name that is not there.
        """
        wanted: list[tuple[str, Mapping[str, Any], joining.Names | None]] = [
            ("batch", dict(self._batch.stored()), batch_keys),
            ("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys),
            ("meta_info", self.meta_info, meta_info_keys),
        ]
        chosen = []
        for kind, columns, keys in wanted:
            names = list(columns) if keys is None else [keys] if isinstance(keys, str) else list(keys)
            if missing := [key for key in names if key not in columns]:
                raise KeyError(f"{kind} has no {missing[0]!r}; there are {list(columns)}")
            chosen.append({key: columns[key] for key in names})
        return self._build(*chosen)

    def pop(
        self,
        batch_keys: joining.Names | None = None,
        non_tensor_batch_keys: joining.Names | None = None,
        meta_info_keys: joining.Names | None = None,
    ) -> DataProto:
        """Move the named columns out of this batch (changed in place) into a new one; None means none of a kind.

        Raises:
            KeyError: a name that is not there; the batch is then unchanged.
        """
        # Selected before anything is removed: an unknown name raises here, with the batch unchanged.
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for kind in ("_batch", "non_tensor_batch", "meta_info"):
            for key in getattr(popped, kind):
                del getattr(self, kind)[key]
        return popped

    def rename(self, old_keys: joining.Names, new_keys: joining.Names) -> Self:
        """Rename columns (tensors or objects) in place, keeping their order; returns self.

        Raises:
            KeyError: an old name that is not there.
            ValueError: lists of different lengths, or a new name that another column has.
        """
        mapping = joining.new_names([*self._batch, *self.non_tensor_batch], old_keys, new_keys)
        self._batch = TensorColumns({mapping.get(key, key): column for key, column in self._batch.stored()})
        self.non_tensor_batch = {mapping.get(key, key): values for key, values in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """Take over the other batch's columns and ``meta_info`` (in place, sharing memory); returns self.

        Raises:
            ValueError: a name that both have with different values, or different numbers of rows; this batch is then
                unchanged.
        """
        # All checks come before the first change, so that a failed union leaves the batch as it was.
        ours, theirs = self._parts(), other._parts()
        if any(ours[:2]) and any(theirs[:2]) and len(self) != len(other):
            raise ValueError(f"union of a batch of {len(self)} rows with one of {len(other)}: they must be equal")
        joining.check_union(ours, theirs)
        for key, column in other._batch.stored():
            if key not in self._batch:
                self._batch[key] = column
        self.non_tensor_batch |= {k: v for k, v in other.non_tensor_batch.items() if k not in self.non_tensor_batch}
        self.meta_info |= {k: v for k, v in other.meta_info.items() if k not in self.meta_info}
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move the tensors to a device, in place; returns self."""
        for key in self._batch:
            here = self._batch.peek(key)
            moved = here.to(device, non_blocking=non_blocking)
            if moved is not here:  # else it stays as it is: a view into the object store must not become a column
                self._batch[key] = moved
        return self

    # Rows

    def __getitem__(self, index: joining.RowIndex) -> Any:
        """``data[3]``: a :class:`DataProtoItem`; ``data[2:5]``: those rows, sharing memory; ``data[mask]`` (bool, one
        a row) and ``data[[1, 2]]``: those rows, copied.

        Raises:
            IndexError: an index outside the batch, or a mask of another length.
        """
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)} rows")
            tensors = {key: tensor[int(index)] for key, tensor in self._batch.items()}
            objects = {key: values[index] for key, values in self.non_tensor_batch.items()}
            return DataProtoItem(tensors, objects, self.meta_info)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._slice(start, max(start, stop))
            index = np.arange(start, stop, step)
        return self._take(joining.row_numbers(index, len(self)))

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Put row ``indices[i]`` at place i, in place (the tensors are new); returns self.

        Raises:
            IndexError: an index outside the batch.
            ValueError: ``indices`` is no permutation of the rows.
        """
        rows = joining.row_numbers(indices, len(self))
        if len(rows) != len(self) or np.bincount(rows, minlength=len(self)).max(initial=1) != 1:
            raise ValueError(f"reorder needs each of the {len(self)} rows once; to pick rows, index: data[indices]")
        reordered = self._take(rows)
        self._batch, self.non_tensor_batch = reordered._batch, reordered.non_tensor_batch
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row ``repeat_times`` times, copied: ``a a b b`` if interleaved, else ``a b a b``."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times must be at least 0, got {repeat_times}")
        return self._take((np.repeat if interleave else np.tile)(np.arange(len(self)), repeat_times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Exactly ``chunks`` runs of consecutive rows, sharing memory; where B does not divide, the first
        ``B % chunks`` have one row more (so with B < ``chunks`` the last ones are empty)."""
        if chunks < 1:
            raise ValueError(f"chunk needs at least 1 chunk, got {chunks}")
        size, longer = divmod(len(self), chunks)
        bounds = accumulate([size + 1] * longer + [size] * (chunks - longer), initial=0)
        return [self._slice(start, stop) for start, stop in pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Runs of ``split_size`` consecutive rows, sharing memory; the last may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self._slice(row, min(row + split_size, len(self))) for row in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto], fill: Mapping[str, float] | None = None) -> DataProto:
        """The rows of several batches in one, copied (a list of one shares memory with it).

        Per-token columns of different widths (dimension 1) are padded on the right to the widest, with ``fill[key]``,
        by default 0 or False.  ``meta_info`` is united; ``meta_info["metrics"]`` is merged by
        :func:`roll.protocol.metrics.merge_metrics`.

        Raises:
            ValueError: no batch at all, different columns, dtypes or devices, other dimensions than the second that
                differ, or a ``meta_info`` key with different values.
        """
        if not data:
            raise ValueError("concat needs at least one batch, got an empty list")
        columns, objects, meta_info = joining.concat([one._parts() for one in data], fill or {})
        return data[0].select() if len(data) == 1 else data[0]._build(columns, objects, meta_info)

    def group_by(self, key: str) -> dict[Any, DataProto]:
        """Rows by their value in column ``key`` (objects that hash, or a 1-dimensional tensor): value -> batch, in the
        order of first appearance, rows in their order, copied.

        Raises:
            KeyError: no such column.
        """
        if key in self.non_tensor_batch:
            values = self.non_tensor_batch[key].tolist()
        elif key in self._batch and self._batch.peek(key).dim() == 1:
            values = self._batch.peek(key).tolist()
        else:
            raise KeyError(f"no column {key!r} to group by; there are {[*self.non_tensor_batch, *self._batch]}")
        groups = joining.row_groups(values)
        # One copy of all rows, of which the groups are slices: one index_select a column, not one a column and group.
        ordered = self._take(np.concatenate([*groups.values(), np.empty(0, np.int64)]))
        bounds = accumulate(map(len, groups.values()), initial=0)
        return {value: ordered._slice(*bound) for value, bound in zip(groups, pairwise(bounds), strict=True)}

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches of ``mini_batch_size`` rows over ``epochs`` passes.

        Without a seed rows come in order, each mini-batch sharing memory; with one, every pass has its own permutation,
        the same for the same seed.  The last mini-batch of a pass may be smaller.

        Raises:
            ValueError: ``mini_batch_size`` below 1.
        """
        if mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        orders = joining.mini_batch_rows(len(self), mini_batch_size, epochs, seed)
        return (self[rows] if isinstance(rows, slice) else self._take(rows) for rows in orders)

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """The batch with rows repeated from its start until ``divisor`` divides its length, and how many were added;
        itself and 0 where nothing is to do. :meth:`unpad` takes them off again.

        Raises:
            ValueError: ``divisor`` below 1, or no row to repeat is there (B = 0 is divisible already).
        """
        if divisor < 1:
            raise ValueError(f"divisor must be at least 1, got {divisor}")
        pad_size = -len(self) % divisor
        if not pad_size:
            return self, 0
        # Modulo: a batch of 3 rows for 8 ranks is repeated more than once.
        return self._take(np.arange(len(self) + pad_size) % len(self)), pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """The batch without its last ``pad_size`` rows, sharing memory."""
        if not 0 <= pad_size <= len(self):
            raise ValueError(f"pad_size must be between 0 and the batch's {len(self)} rows, got {pad_size}")
        return self[: len(self) - pad_size] if pad_size else self

    def equals(self, other: DataProto) -> bool:
        """Same columns (order aside), dtypes, shapes, values (exactly; NaN equals NaN) and ``meta_info``."""
        return joining.same_value(*((one._batch, one.non_tensor_batch, one.meta_info) for one in (self, other)))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: see :mod:`roll.protocol.packing` for what objects may hold."""
        self.check()
        packing.save(self.batch, self.non_tensor_batch, self.meta_info, Path(path))

    @staticmethod
    def load(path: str | Path) -> DataProto:
        """Read what :meth:`save` wrote. Nothing in the file is executed, so files of others are safe to read."""
        return DataProto.from_dict(*packing.load(Path(path)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Before it is sent: the error is raised where the batch was put together, not at its reader.
        self.check()
        return _rebuild, packing.to_wire(dict(self.batch.stored()), self.non_tensor_batch, self.meta_info)

    __copy__ = select

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        # Packed columns are never written to, so copies of the batch may share them.
        columns = {key: c if isinstance(c, Packed) else c.detach().clone() for key, c in self._batch.stored()}
        objects = copy.deepcopy(self.non_tensor_batch, memo)
        return self._build(columns, objects, copy.deepcopy(self.meta_info, memo))

    # Helpers

    def _parts(self) -> joining.Parts:
        self.check()
        return self._batch, self.non_tensor_batch, self.meta_info

    @classmethod
    def _build(cls, tensors: Mapping[str, Column], objects: ObjectColumns, meta_info: Mapping[str, Any]) -> DataProto:
        """A batch of columns that are known to agree."""
        data = DataProto.__new__(DataProto)
        data._batch = TensorColumns(tensors)
        data.non_tensor_batch = objects
        data.meta_info = dict(meta_info)
        return data

    def _slice(self, start: int, stop: int) -> DataProto:
        # non_tensor_batch is a plain dict: nothing has compared the lengths of what was assigned to it.
        self.check()
        tensors: dict[str, Column] = {
            key: column.rows(start, stop) if isinstance(column, Packed) else column[start:stop]
            for key, column in self._batch.stored()
        }
        objects = {key: values[start:stop] for key, values in self.non_tensor_batch.items()}
        return self._build(tensors, objects, self.meta_info)

    def _take(self, rows: np.ndarray) -> DataProto:
        self.check()
        index = torch.from_numpy(rows)
        peeked = {key: self._batch.peek(key) for key in self._batch}
        tensors: dict[str, Column] = {k: c.index_select(0, index.to(c.device)) for k, c in peeked.items()}
        return self._build(tensors, {k: values[rows] for k, values in self.non_tensor_batch.items()}, self.meta_info)


def _rebuild(columns: dict[str, Column], objects: dict[str, list[Any]], meta_info: dict[str, Any]) -> DataProto:
    # Nothing is unpacked.
    arrays = {key: np.fromiter(values, dtype=object, count=len(values)) for key, values in objects.items()}
    return DataProto._build(columns, arrays, meta_info)
