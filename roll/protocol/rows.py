"""Which rows: from what users write as an index, by group, and in the order of mini-batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

RowIndex = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def row_numbers(index: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor, size: int) -> np.ndarray:
    """The rows (int64, each in 0..size-1) that a list of indices or a mask of ``size`` bools names.

    Raises:
        IndexError: a row outside the batch, a mask of another length, or neither integers nor bools.
    """
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
    codes = np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64)
    bounds = np.cumsum(np.bincount(codes, minlength=len(numbers)))[:-1]
    return dict(zip(numbers, np.split(np.argsort(codes, kind="stable"), bounds), strict=False))


def check_group_sizes(key: str, groups: Mapping[Hashable, np.ndarray], size: int) -> None:
    """Raise ``ValueError`` if a group has more than ``size`` rows."""
    for value, rows in groups.items():
        if len(rows) > size:
            raise ValueError(
                f"the group {key} = {value!r} has {len(rows)} rows and cannot stay together in a mini-batch of {size}: "
                f"mini_batch_size must be at least {len(rows)}"
            )


def mini_batch_rows(
    num_rows: int, size: int, epochs: int, seed: int | None, groups: Mapping[Hashable, np.ndarray] | None
) -> Iterator[np.ndarray | slice]:
    """The rows of each mini-batch; a slice where they are consecutive. See ``DataProto.make_iterator``."""
    generator = None if seed is None else np.random.default_rng(seed)
    for _ in range(epochs):
        if groups is not None:
            rows = list(groups.values())
            order = range(len(rows)) if generator is None else generator.permutation(len(rows))
            yield from (np.concatenate(run) for run in _runs([rows[i] for i in order], size))
        elif generator is None:
            yield from (slice(start, start + size) for start in range(0, num_rows, size))
        else:
            permutation = generator.permutation(num_rows)
            yield from (permutation[start : start + size] for start in range(0, num_rows, size))


def _runs(groups: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    """Runs of consecutive groups with at most ``size`` rows each, as many as fit."""
    run: list[np.ndarray] = []
    rows = 0
    for group in groups:
        if run and rows + len(group) > size:
            yield run
            run, rows = [], 0
        run.append(group)
        rows += len(group)
    if run:
        yield run
