"""Tensors over other owners' memory and in other shapes."""

from __future__ import annotations

import warnings
import weakref

import numpy as np
import pytest

from roll.protocol.columns import tensor_over


@pytest.mark.parametrize("shape", [(7,), (3, 4), (0, 3), (1, 1)])
def test_tensor_over_read_only_memory(shape: tuple[int, ...]) -> None:
    """Which the tensor, or a part of it, keeps alive."""
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_over(array)
    assert tensor.shape == shape
    assert tensor.tolist() == array.tolist()
    assert not array.size or tensor.data_ptr() == array.ctypes.data
    alive, wanted, size = weakref.ref(array), array[1:].tolist(), array.size
    del array
    tensor = tensor[1:]
    assert (alive() is not None or not size) and tensor.tolist() == wanted
    del tensor
    assert alive() is None
