"""Rows and columns of several batches: exact comparison, ``concat``, ``union``, groups and mini-batches."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roll.protocol.columns import Column, ObjectColumns, TensorColumns, flat_view
from roll.protocol.metrics import merge_metrics

Parts = tuple[TensorColumns, ObjectColumns, dict[str, Any]]
"""Tensor columns, object columns and ``meta_info`` of a :class:`~roll.protocol.DataProto`."""
_KINDS = ("batch", "non_tensor_batch", "meta_info")


def same_value(left: Any, right: Any) -> bool:
    """Equality that reaches into containers: tensors and arrays by dtype, shape and values, exactly.

    A NaN equals a NaN, and -0.0 equals 0.0.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.device != right.device:
            return False
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        # Equal bits first: the slower comparison below is for 0.0 and -0.0, and for NaNs of different bits.
        if torch.equal(flat_view(left).view(torch.uint8), flat_view(right).view(torch.uint8)):
            return True
        if not (left.is_floating_point() or left.is_complex()):
            return False
        wide = torch.complex128 if left.is_complex() else torch.float64
        return torch.allclose(left.to(wide), right.to(wide), rtol=0, atol=0, equal_nan=True)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype == object:
            return all(map(same_value, left.flat, right.flat))
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float) and left != left:
        return bool(right != right)
    return bool(left == right)


METRICS = "metrics"  # the ``meta_info`` key whose values (``roll.protocol.metrics.Metrics``) are merged, not compared


def concat(
    batches: Sequence[Parts], fill: Mapping[str, float]
) -> tuple[dict[str, Column], ObjectColumns, dict[str, Any]]:
    """Columns and ``meta_info`` of ``DataProto.concat``, of at least one batch."""
    first = batches[0]
    for number, parts in enumerate(batches):
        pairs: Any = zip(_KINDS[:2], first, parts, strict=False)
        for kind, ours, theirs in pairs:
            if ours.keys() != theirs.keys():
                raise ValueError(
                    f"batches of one concat must have the same columns, but {kind} of number 0 has {sorted(ours)} and "
                    f"that of number {number} has {sorted(theirs)}"
                )
    columns, objects, metas = zip(*batches, strict=True)
    tensors: dict[str, Column] = {
        key: _concat_column(key, [one.peek(key) for one in columns], fill.get(key, 0)) for key in first[0]
    }
    joined = {key: np.concatenate([one[key] for one in objects]) for key in first[1]}
    meta_info: dict[str, Any] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key != METRICS and not same_value(meta_info.setdefault(key, value), value):
                raise ValueError(
                    f"meta_info[{key!r}] is {meta_info[key]!r} in one batch of a concat and {value!r} in number "
                    f"{number}: make them equal, or drop it by select(meta_info_keys=[...])"
                )
    if metrics := [meta[METRICS] for meta in metas if METRICS in meta]:
        meta_info[METRICS] = merge_metrics(metrics)
    return tensors, joined, meta_info


def _concat_column(key: str, tensors: list[torch.Tensor], fill: float) -> torch.Tensor:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"batch[{key!r}] of number 0 is {first.dtype} on {first.device}, that of number {number} "
                f"{tensor.dtype} on {tensor.device}: convert one of them first"
            )
        if tensor.dim() != first.dim() or tensor.shape[2:] != first.shape[2:]:
            raise ValueError(
                f"batch[{key!r}] of number 0 has rows of shape {tuple(first.shape[1:])}, that of number {number} "
                f"{tuple(tensor.shape[1:])}: only the first of these dimensions may differ (it is padded)"
            )
    if first.dim() == 1 or all(tensor.shape[1] == first.shape[1] for tensor in tensors):
        return torch.cat(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    joined = first.new_full((sum(len(tensor) for tensor in tensors), width, *first.shape[2:]), fill)
    row = 0
    for tensor in tensors:
        joined[row : row + len(tensor), : tensor.shape[1]] = tensor
        row += len(tensor)
    return joined


def check_union(left: Parts, right: Parts) -> None:
    """Raise ``ValueError`` where columns or ``meta_info`` of equal names differ."""
    pairs: Any = zip(_KINDS, left, right, strict=True)
    for kind, ours, theirs in pairs:
        look = "peek" if kind == "batch" else "__getitem__"  # without unpacking a column
        for key in ours.keys() & theirs.keys():
            if not same_value(getattr(ours, look)(key), getattr(theirs, look)(key)):
                rule = "has different values in the two batches of a union: rename or pop one of them first"
                raise ValueError(f"{kind}[{key!r}] {rule}")


Names = str | Collection[str]


def new_names(columns: Sequence[str], old_keys: Names, new_keys: Names) -> dict[str, str]:
    """Old name to new name of each column that ``DataProto.rename`` renames, checked."""
    old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
    if len(old) != len(new) or len(set(old)) != len(old):
        raise ValueError(f"rename needs as many new names as old ones, each once: got {old} and {new}")
    mapping = dict(zip(old, new, strict=True))
    if missing := [key for key in old if key not in columns]:
        raise KeyError(f"no column {missing[0]!r}; there are {columns}")
    if len({mapping.get(key, key) for key in columns}) != len(columns):
        raise ValueError(f"renaming {old} to {new} would give two columns one name; there are {columns}")
    return mapping


RowIndex = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def row_numbers(index: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor, size: int) -> np.ndarray:
    """The rows (int64, each in 0..size-1) that a list of indices or a mask of ``size`` bools names. Raises
    ``IndexError``: a row outside the batch, a mask of another length, or neither integers nor bools."""
    rows = index.numpy(force=True) if isinstance(index, torch.Tensor) else np.asarray(index)
    if rows.ndim != 1:
        raise IndexError(f"rows are picked by a 1-dimensional index, got shape {rows.shape}")
    if rows.dtype == bool:
        if len(rows) != size:
            raise IndexError(f"a mask of {len(rows)} values for a batch of {size} rows")
        return np.flatnonzero(rows)
    if len(rows) and not np.issubdtype(rows.dtype, np.integer):
        raise IndexError(f"rows are picked by integers or a bool mask, got {rows.dtype}")
    rows = rows.astype(np.int64)
    if len(rows) and not (-size <= rows.min() and rows.max() < size):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a batch of {size} rows")
    return np.where(rows < 0, rows + size, rows)


def row_groups(values: Iterable[Hashable]) -> dict[Hashable, np.ndarray]:
    """Value -> its rows (int64, ascending), in the order in which the values first appear."""
    numbers: dict[Hashable, int] = {}
    # Codes in the order of first appearance: a stable sort by them gives groups in that order, rows in theirs.
    codes = np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64)
    bounds = np.cumsum(np.bincount(codes, minlength=len(numbers)))[:-1]
    return dict(zip(numbers, np.split(np.argsort(codes, kind="stable"), bounds), strict=False))


def mini_batch_rows(num_rows: int, size: int, epochs: int, seed: int | None) -> Iterator[np.ndarray | slice]:
    """The rows of each mini-batch; a slice where they are consecutive. See ``DataProto.make_iterator``."""
    generator = None if seed is None else np.random.default_rng(seed)
    for _ in range(epochs):
        permutation = None if generator is None else generator.permutation(num_rows)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            yield rows if permutation is None else permutation[rows]
