"""Tensors seen over memory that is not theirs: other owners, other shapes."""

from __future__ import annotations

from typing import Any

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
