"""Parts of the backend that need no process group: layouts of parameters, padding, storages, the CPU compatibility."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core", reason="needs megatron-core")

from roll.config.plan.plan import MicroBatching
from roll.strategies.megatron import cpu_compat
from roll.strategies.megatron.correspondence import FusedHeads, FusedRows, Layout, ShardedExperts, ShardedVocabulary
from roll.strategies.megatron.micro_batches import Chunking
from tests.strategies.samples import make_batch

LAYOUTS: list[tuple[Layout, list[tuple[int, ...]]]] = [
    (Layout(), [(6,)]),
    (Layout(0), [(8, 3)]),
    (Layout(1), [(3, 8)]),
    (ShardedVocabulary(vocab_size=7), [(7, 3)]),
    (ShardedVocabulary(vocab_size=5), [(5, 3)]),
    (FusedRows(), [(8, 3), (8, 3)]),
    (ShardedExperts(0), [(8, 3)]),
    (ShardedExperts(1), [(3, 8)]),
    (FusedHeads(groups=4, head_dim=2), [(16, 3), (8, 3), (8, 3)]),
    (FusedHeads(groups=4, head_dim=2), [(16,), (8,), (8,)]),
]


@pytest.mark.parametrize(("layout", "shapes"), LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_joined_parts_are_the_whole(layout, shapes, size):
    tensors = [torch.randn(shape) for shape in shapes]
    parts = [layout.split(tensors, rank, size) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    joined = layout.join(parts, shapes)
    assert all(torch.equal(one, other) for one, other in zip(joined, tensors, strict=True))


def test_a_group_has_its_queries_then_key_then_value():
    queries, keys, values = (torch.arange(n)[:, None] + base for n, base in ((8, 0), (4, 100), (4, 200)))
    part = FusedHeads(groups=2, head_dim=2).split([queries, keys, values], rank=1, size=2)
    assert part[:, 0].tolist() == [4, 5, 6, 7, 102, 103, 202, 203]


@pytest.mark.long
@given(
    context_size=st.sampled_from([1, 2, 4]),
    tensor_size=st.sampled_from([1, 2]),
    rows=st.integers(1, 13),
    same_shape=st.booleans(),
    removes_padding=st.booleans(),
    shares_prompts=st.booleans(),
    seed=st.integers(0, 20),
)
@settings(deadline=None, max_examples=40)
def test_every_response_token_is_predicted_once(
    context_size, tensor_size, rows, same_shape, removes_padding, shares_prompts, seed
):
    batch = make_batch(seed=seed)
    divisor = context_size * tensor_size
    # A hidden state that says which token it stands for, so that predictors can be checked without a model.
    found = torch.zeros_like(batch["input_ids"])
    for rank in range(context_size):
        chunking = Chunking(rank, context_size, divisor, same_shape, 2, torch.device("cpu"), shares_prompts)
        parts = chunking.micro_batches(batch, MicroBatching(rows, removes_padding, width_multiple=3))
        if same_shape:
            assert len(parts) % 2 == 0 and len({part.own.input_ids.shape for part in parts}) == 1
        for index, part in enumerate(parts):
            chunk = part.own.input_ids.shape[1]
            assert chunk * context_size % divisor == 0
            predicting = part.own.input_ids.t().flatten()[part.predictors]
            flat = part.columns["input_ids"].flatten()
            assert torch.equal(flat[part.own.destinations], part.own.targets)
            assert torch.equal(flat[part.own.destinations - 1], predicting)
            if part.arrangement is not None:
                position = part.arrangement.position_ids[part.predictors]
                assert torch.equal(position, (part.own.destinations - 1) % part.columns["input_ids"].shape[1])
            shape = part.columns["input_ids"].shape
            marks = torch.zeros(shape, dtype=torch.int64).flatten()
            marks[part.own.destinations] += 1
            if index * rows < len(found):
                found[index * rows : index * rows + shape[0], : shape[1]] += marks.view(shape)
    wanted = batch["response_mask"].clone()
    wanted[:, 0] = False
    assert torch.equal(found, wanted.long())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compatibility module does nothing with CUDA")
def test_cpu_compatibility_stays_within_megatron():
    import megatron.core.optimizer.optimizer as inside

    cpu_compat.install()
    stand_in: Any = inside.torch
    assert stand_in is not torch and stand_in.Tensor is torch.Tensor
    assert stand_in.zeros(2, device="cuda").device.type == "cpu"
    assert stand_in.tensor([1], device=0).device.type == "cpu"
    assert stand_in.cuda.current_device() == torch.device("cpu")
    assert not stand_in.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    before = torch.Tensor.cuda, torch.Tensor.type
    with cpu_compat.construction():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).cuda().device.type == "cpu"
    assert (torch.Tensor.cuda, torch.Tensor.type) == before
