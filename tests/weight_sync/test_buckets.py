"""Weight buckets: what goes in comes out, as views, aligned, within the budget; bundles pass through pickle."""

import pickle
import warnings
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.weight_sync.encoding import ALIGNMENT, WeightBucket, iter_buckets
from roll.weight_sync.storage_transports import TensorBundle

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 7), max_size=3)
SPECS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12)


def make(specs: list[tuple[torch.dtype, list[int]]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(specs))
    return [
        (f"layer.{i}", (torch.randn(shape, generator=generator) * 3).to(dtype))
        for i, (dtype, shape) in enumerate(specs)
    ]


def assert_same(held: WeightBucket | TensorBundle, named: list[tuple[str, torch.Tensor]]) -> None:
    tensors = held.tensors() if isinstance(held, WeightBucket) else held.tensors
    assert list(tensors) == [name for name, _ in named]
    for name, tensor in named:
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


@settings(max_examples=40)
@given(SPECS)
def test_round_trip(specs: list[tuple[torch.dtype, list[int]]]) -> None:
    named = make(specs)
    assert_same(WeightBucket.pack(named), named)
    assert_same(pickle.loads(pickle.dumps(TensorBundle(dict(named)))), named)


def test_views_and_alignment() -> None:
    named = make([(torch.bool, [3]), (torch.bfloat16, [5, 7]), (torch.float64, [2])])
    bucket = WeightBucket.pack(named)
    begin, end = bucket.buffer.data_ptr(), bucket.buffer.data_ptr() + bucket.buffer.numel()
    for entry, tensor in zip(bucket.entries, bucket.tensors().values(), strict=True):
        assert entry.offset % ALIGNMENT == 0
        assert begin <= tensor.data_ptr() == begin + entry.offset < end
    bucket.tensors()["layer.1"].fill_(2)
    assert (bucket.tensors()["layer.1"] == 2).all()
    assert torch.equal(bucket.tensors()["layer.2"], named[2][1])
    assert torch.equal(WeightBucket.pack(named).buffer, WeightBucket.pack(named).buffer), "gaps are zeros"
    weight = torch.nn.Parameter(torch.randn(4, 6))
    held = WeightBucket.pack([("w", weight), ("wt", weight.t())]).tensors()
    assert torch.equal(held["w"], weight) and torch.equal(held["wt"], weight.t()) and not held["w"].requires_grad


def test_bundles_pickle_and_are_read_without_a_copy() -> None:
    named = make([(torch.bfloat16, [50, 70]), (torch.float32, [33])])
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(TensorBundle(dict(named)), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    sources = [np.frombuffer(buffer.raw(), np.uint8).ctypes.data for buffer in buffers]
    assert sources == [tensor.data_ptr() for _, tensor in named], "the sender's own memory"
    shared = [memoryview(bytes(buffer.raw())) for buffer in buffers]  # read-only, as Ray's store is
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(stream, buffers=shared)
        assert_same(received, named)
    for tensor, memory in zip(received.tensors.values(), shared, strict=True):
        assert tensor.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


@settings(max_examples=40)
@given(SPECS, st.integers(1, 2000))
def test_iter_buckets(specs: list[tuple[torch.dtype, list[int]]], bucket_bytes: int) -> None:
    named = make(specs)
    runs = list(iter_buckets(named, bucket_bytes))
    assert [pair for run in runs for pair in run] == named
    for run in runs:
        assert run
        assert len(run) == 1 or WeightBucket.pack(run).buffer.numel() <= bucket_bytes
    for run, following in pairwise(runs):  # greedy: the next tensor would not have fitted
        assert WeightBucket.pack([*run, following[0]]).buffer.numel() > bucket_bytes
    source = iter(named)
    next(iter_buckets(source, 0), None)
    assert len(list(source)) == max(len(named) - 2, 0), "no more is taken than the tensor that does not fit"
