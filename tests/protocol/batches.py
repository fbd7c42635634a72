"""Batches for the tests of DataProto: hypothesis strategies, a batch as a plain list of rows, and as it is sent."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from roll.protocol import DataProto
from roll.protocol.joining import same_value

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip

EXAMPLES = settings(deadline=None, max_examples=30)
"""No deadline: the first example of a process pays for what torch and numpy load."""

Rows = list[dict[str, Any]]

SMALL = st.integers(0, 3)
OBJECTS = st.one_of(
    *(st.text(max_size=3), st.integers(-5, 5), st.none(), st.floats(allow_nan=True)),
    *(st.lists(SMALL, max_size=2), st.dictionaries(st.text(max_size=2), SMALL, max_size=2)),
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, so NaNs and infinities too (bools are drawn as such)."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(shape) < 0.5)
    data = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    if dtype == torch.int64 and seed % 2:
        return torch.from_numpy(rng.integers(-300, 70_000, shape))
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    """A column of ``rows`` rows, often padded left or right with some value, now and then not contiguous."""
    shape = (rows, *draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = random_tensor(shape, dtype, draw(st.integers(0, 1000)))
    if len(shape) >= 2 and tensor.numel() and draw(st.booleans()):
        padding = tensor.flatten()[draw(st.integers(0, tensor.numel() - 1))].clone()
        if draw(st.booleans()):
            padding.zero_()
        for row in range(rows):
            start, stop = sorted(draw(st.tuples(st.integers(0, shape[1]), st.integers(0, shape[1]))))
            tensor[row, :start] = padding
            tensor[row, stop:] = padding
    if tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor.masked_fill_(tensor == 0, 0)  # the sign of a zero in the padding does not travel
    if draw(st.booleans()) and tensor.dim() >= 2:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7) -> DataProto:
    rows = draw(st.integers(min_rows, max_rows))
    columns = draw(st.dictionaries(st.sampled_from("abcde"), tensors(rows), min_size=1, max_size=4))
    objects = draw(
        st.dictionaries(st.sampled_from("wxyz"), st.lists(OBJECTS, min_size=rows, max_size=rows), max_size=2)
    )
    meta = draw(st.dictionaries(st.sampled_from(["step", "seed"]), OBJECTS, max_size=2))
    return DataProto.from_dict(columns, objects, meta)


def rows_of(data: DataProto) -> Rows:
    """One dict a row: tensor rows and objects by column name."""
    columns = {key: list(tensor.unbind()) for key, tensor in data.batch.items()}
    columns |= {key: list(values) for key, values in data.non_tensor_batch.items()}
    return [{key: column[row] for key, column in columns.items()} for row in range(len(data))]


def assert_rows(data: DataProto, expected: Rows) -> None:
    actual = rows_of(data)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert same_value(ours, theirs), (ours, theirs)


def dumps(value: Any) -> tuple[bytes, list[memoryview]]:
    """The way of Ray: the stream, and read-only copies of the out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return stream, [memoryview(bytes(buffer.raw())) for buffer in buffers]


def send(value: Any) -> Any:
    stream, buffers = dumps(value)
    return pickle.loads(stream, buffers=buffers)


def num_bytes(value: Any) -> int:
    stream, buffers = dumps(value)
    return len(stream) + sum(buffer.nbytes for buffer in buffers)
