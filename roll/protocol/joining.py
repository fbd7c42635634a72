"""Bringing several batches together: by rows (concat) and by columns (union)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.protocol.columns import Column
from roll.protocol.equality import same_value
from roll.protocol.metrics import merge_metrics

if TYPE_CHECKING:
    from roll.protocol.data_proto import DataProto

METRICS = "metrics"
"""The ``meta_info`` key whose values (``roll.protocol.metrics.Metrics``) are merged, not compared."""


def concat(parts: Sequence[DataProto], fill: Mapping[str, float]) -> DataProto:
    if not parts:
        raise ValueError("concat needs at least one batch, got an empty list")
    first = parts[0]
    for number, part in enumerate(parts):
        part.check()
        for kind, ours, theirs in (
            ("batch", first.batch, part.batch),
            ("non_tensor_batch", first.non_tensor_batch, part.non_tensor_batch),
        ):
            if ours.keys() != theirs.keys():
                raise ValueError(
                    f"batches of one concat must have the same columns, but {kind} of number 0 has {sorted(ours)} and "
                    f"that of number {number} has {sorted(theirs)}"
                )
    if len(parts) == 1:
        return first.select()
    tensors: dict[str, Column] = {
        key: _concat_column(key, [part.batch.peek(key) for part in parts], fill.get(key, 0)) for key in first.batch
    }
    objects = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in first.non_tensor_batch}
    return first._build(tensors, objects, _concat_meta([part.meta_info for part in parts]))


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


def _concat_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key == METRICS:
                continue
            if key in joined and not same_value(joined[key], value):
                raise ValueError(
                    f"meta_info[{key!r}] is {joined[key]!r} in one batch of a concat and {value!r} in number {number}: "
                    f"make them equal, or drop it by select(meta_info_keys=[...])"
                )
            joined.setdefault(key, value)
    if metrics := [meta[METRICS] for meta in metas if METRICS in meta]:
        joined[METRICS] = merge_metrics(metrics)
    return joined


def check_union(left: DataProto, right: DataProto) -> None:
    """Raise ``ValueError`` unless the columns of ``right`` can join those of ``left``."""
    left.check()
    right.check()
    has_columns = [bool(data.batch or data.non_tensor_batch) for data in (left, right)]
    if all(has_columns) and len(left) != len(right):
        raise ValueError(f"union of a batch of {len(left)} rows with one of {len(right)}: they must be equal")
    for key in left.batch.keys() & right.batch.keys():
        _check_same(f"batch[{key!r}]", left.batch.peek(key), right.batch.peek(key))
    for key in left.non_tensor_batch.keys() & right.non_tensor_batch.keys():
        _check_same(f"non_tensor_batch[{key!r}]", left.non_tensor_batch[key], right.non_tensor_batch[key])
    for key in left.meta_info.keys() & right.meta_info.keys():
        _check_same(f"meta_info[{key!r}]", left.meta_info[key], right.meta_info[key])


def _check_same(name: str, left: Any, right: Any) -> None:
    if not same_value(left, right):
        raise ValueError(f"{name} has different values in the two batches of a union: rename or pop one of them first")
