"""Exact comparison of batches, for tests and for ``union``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.protocol.views import flat_view

if TYPE_CHECKING:
    from roll.protocol.data_proto import DataProto


def first_difference(left: DataProto, right: DataProto) -> str | None:
    """What differs first between two batches, in words; None where nothing does.

    The order of columns makes no difference.
    """
    kinds: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("batch", left.batch, right.batch),
        ("non_tensor_batch", left.non_tensor_batch, right.non_tensor_batch),
        ("meta_info", left.meta_info, right.meta_info),
    ]
    for kind, ours, theirs in kinds:
        if ours.keys() != theirs.keys():
            return f"{kind} has {sorted(ours)} and {sorted(theirs)}"
        for key in ours:
            if not same_value(ours[key], theirs[key]):
                return f"{kind}[{key!r}] differs: {_describe(ours[key])} and {_describe(theirs[key])}"
    return None


def same_value(left: Any, right: Any) -> bool:
    """Equality that reaches into containers: tensors and arrays by dtype, shape and values, exactly.

    A NaN equals a NaN, and -0.0 equals 0.0.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and _same_tensor(left, right)
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


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or left.device != right.device:
        return False
    if torch.equal(flat_view(left).view(torch.uint8), flat_view(right).view(torch.uint8)):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    wide = torch.complex128 if left.is_complex() else torch.float64
    return torch.allclose(left.to(wide), right.to(wide), rtol=0, atol=0, equal_nan=True)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:8].tolist()}"
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
