"""Tensors over other owners' memory and in other shapes."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch

from roll.protocol.columns import flat_view, tensor_over


@pytest.mark.parametrize("shape", [(7,), (3, 4), (0, 3), (1, 1)])
def test_tensor_over_read_only_memory(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_over(array)
    assert tensor.shape == shape
    assert tensor.tolist() == array.tolist()
    assert not array.size or tensor.data_ptr() == array.ctypes.data


def test_tensor_over_keeps_the_memory_alive() -> None:
    array = np.arange(10)
    array.flags.writeable = False
    alive = weakref.ref(array)
    tensor = tensor_over(array)[3:]
    del array
    gc.collect()
    assert alive() is not None
    assert tensor.tolist() == list(range(3, 10))
    del tensor
    gc.collect()
    assert alive() is None


BASE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE, BASE.t(), BASE[:, 1], BASE[1:], BASE[:1, ::4], BASE[::3, 0], BASE[::3, ::4], BASE[0, 0],
        BASE[:0].t(), BASE[:, :0], torch.zeros(1).expand(5, 6), torch.empty_strided((1, 1), (0, 0)).zero_(),
    ],
    ids=range(12),
)  # fmt: skip
def test_flat_view(tensor: torch.Tensor) -> None:
    flat = flat_view(tensor)
    assert flat.tolist() == tensor.flatten().tolist()
    assert flat.view(torch.uint8).numel() == 4 * tensor.numel()
    if tensor.is_contiguous():
        assert flat.data_ptr() == tensor.data_ptr()
