"""The wire format: every bit arrives, padding does not travel, nothing is unpacked before it is read."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol import DataProto
from roll.protocol.columns import Packed
from roll.protocol.joining import same_value
from roll.protocol.packing import pack
from tests.protocol.batches import EXAMPLES, assert_rows, batches, dumps, num_bytes, rows_of, send, tensors


def is_packed(data: DataProto) -> bool:
    return all(isinstance(column, Packed) for _, column in data.batch.stored())


def rlvr_batch(rows: int, width: int, mean: int, pad: int = 0) -> tuple[DataProto, int]:
    """A batch with the columns of a training step, and its number of real tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 2 * mean - 1, rows).clip(max=width)
    positions = np.arange(width)
    attended = torch.from_numpy(positions < lengths[:, None])
    response = torch.from_numpy((positions >= lengths[:, None] // 4) & (positions < lengths[:, None]))

    def per_response_token() -> torch.Tensor:
        return torch.where(response, torch.from_numpy(rng.standard_normal((rows, width), np.float32)), 0.0)

    ids = torch.from_numpy(rng.integers(0, 150_000, (rows, width)))
    tensors = {
        "input_ids": torch.where(attended, ids, pad),
        "attention_mask": attended,
        "response_mask": response,
        "loss_mask": response.clone(),
        "rollout_log_probs": per_response_token(),
        "old_log_probs": per_response_token(),
        "advantages": per_response_token(),
        "scores": torch.from_numpy(rng.random(rows, np.float32)),
    }
    objects = {"prompt_id": [f"prompt-{row // 8}" for row in range(rows)], "domain": ["math"] * rows}
    return DataProto.from_dict(tensors, objects, {"step": 3}), int(lengths.sum())


@EXAMPLES
@given(batches())
def test_round_trip(data: DataProto) -> None:
    received = send(data)
    assert is_packed(received)
    assert received.equals(data)
    assert list(received.batch) == list(data.batch)
    assert pickle.loads(pickle.dumps(data, protocol=4)).equals(data)


@EXAMPLES
@given(batches(), st.integers(1, 4))
def test_verbs_on_a_received_batch(data: DataProto, chunks: int) -> None:
    received = send(data)
    parts = received.chunk(chunks)
    assert all(map(is_packed, parts))
    for part, expected in zip(parts, data.chunk(chunks), strict=True):
        assert send(part).equals(expected)  # passed on as it came
        assert part.equals(expected)
    assert is_packed(received)
    assert DataProto.concat(send(data).chunk(chunks)).equals(data)
    assert_rows(send(data).repeat(2), rows_of(data.repeat(2)))
    assert_rows(send(data)[::-1], rows_of(data)[::-1])


@EXAMPLES
@given(st.integers(1, 6).flatmap(lambda rows: st.lists(tensors(rows), min_size=1, max_size=4)))
def test_packing_restores_every_column(columns: list[torch.Tensor]) -> None:
    for packed, tensor in zip(pack(columns), columns, strict=True):
        assert same_value(packed.unpack(), tensor)
        view = packed.peek()
        assert view is None or same_value(view, tensor)
        for start, stop in ((0, len(tensor)), (1, len(tensor)), (len(tensor) // 2, len(tensor) // 2)):
            assert same_value(packed.rows(start, stop).unpack(), tensor[start:stop])


@EXAMPLES
@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_spans_against_a_search_row_by_row(choice: st.DataObject, rows: int, width: int) -> None:
    row = st.lists(st.sampled_from([0, 0, 0, 5, 6]), min_size=width, max_size=width)
    values = choice.draw(st.lists(row, min_size=rows, max_size=rows))
    packed = pack([torch.tensor(values, dtype=torch.int32)])[0]
    if packed.spans is None:
        return
    for number, row_values in enumerate(values):
        inside = [place for place, value in enumerate(row_values) if value != packed.padding]
        start, stop = (inside[0], inside[-1] + 1) if inside else (0, 0)
        assert (packed.spans.starts[number], packed.spans.stops[number]) == (start, stop)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[0.0, -0.0, -1.0, -0.0, 0.0, 1.0]] * 3),
        torch.tensor([[1.0, float("nan"), float("nan")]] * 3),
        torch.zeros(4, 9, dtype=torch.bfloat16),
        torch.full((4, 9), 7),
        torch.tensor([[5, 1, 2, 2, 2, 2, 2]] * 4),  # all rows begin alike, the padding is behind
        torch.tensor([[2, 2, 2, 2, 2, 1, 5]] * 4),
        torch.tensor([[-(2**62), 2**40, 0, 0, 0, 0, 0, 0]] * 40),
        torch.zeros(3, 0),
        torch.zeros(0, 5),
        torch.zeros(2, 4, 0, 3),
        torch.randn(3, 5).t(),
        torch.randn(4, 6, requires_grad=True),
        torch.zeros(1).expand(6, 8),
    ],
    ids=range(13),
)
def test_particular_columns(tensor: torch.Tensor) -> None:
    received = send(DataProto({"x": tensor})).batch["x"]
    assert same_value(received, tensor.detach())
    assert not received.requires_grad
    received += 1  # private and writable


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_masking_by_multiplication_is_padding_too(dtype: torch.dtype) -> None:
    values = torch.randn(64, 256).to(dtype)
    mask = torch.arange(256) < 20
    masked = values * mask
    assert masked.signbit()[:, 20:].any()  # -0.0
    masked[:, :3] = -0.0
    masked[:, 20] = float("nan")
    masked[:, 3] = -0.0
    received = send(DataProto({"x": masked}))
    assert num_bytes(received) < 64 * 18 * dtype.itemsize + 64 * 8 + 700
    assert torch.equal(received.batch["x"].nan_to_num(), masked.nan_to_num())
    assert same_value(received.batch["x"][:, 4:21].clone(), masked[:, 4:21].clone())
    assert not received.batch["x"].signbit()[:, 21:].any()


def test_padding_costs_no_more_than_its_share() -> None:
    data, real_tokens = rlvr_batch(1024, 4096, 400)
    per_token = sum(tensor.dtype.itemsize for tensor in data.batch.values() if tensor.dim() == 2)
    assert data.batch["input_ids"].shape == (1024, 4096)
    assert num_bytes(data) <= 1.2 * real_tokens * per_token
    # More than asked for: ids in 4 bytes, masks almost free, log-probs on the response only (3/4 of the tokens).
    assert num_bytes(data) <= 1.05 * real_tokens * (4 + 3 * 4 * 0.75)


def test_columns_share_spans() -> None:
    data, _ = rlvr_batch(64, 128, 40, pad=0)
    received = send(data)
    spans = {id(column.spans) for _, column in received.batch.stored() if isinstance(column, Packed) and column.spans}
    assert len(spans) == 2  # whole sequences, and responses
    chunk = received.chunk(4)[1]
    chunk_spans = [column.spans for _, column in chunk.batch.stored() if isinstance(column, Packed) and column.spans]
    assert len(chunk_spans) == 7
    assert len({id(spans) for spans in chunk_spans}) == 2


def test_end_of_text_as_padding_keeps_the_last_token() -> None:
    """Where the padding id also ends the sequences, ids adopt the mask's spans instead of spans of their own."""
    data, _ = rlvr_batch(64, 128, 40, pad=9)
    lengths = data.batch["attention_mask"].sum(dim=1)
    data.batch["input_ids"][torch.arange(64), lengths - 1] = 9
    packed = {key: column for key, column in send(data).batch.stored() if isinstance(column, Packed)}
    assert packed["input_ids"].spans is packed["attention_mask"].spans
    assert same_value(send(data).batch["input_ids"], data.batch["input_ids"])


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [(0, 200, 1), (-5, 100, 1), (0, 60_000, 2), (-1, 30_000, 2), (0, 2**31, 4), (-(2**31), 5, 4), (-1, 2**40, 8)],
)
def test_integers_are_narrowed_to_what_holds_them(low: int, high: int, width: int) -> None:
    values = torch.cat([torch.tensor([low, high]), torch.randint(low, high, (98 * 100 + 98,))]).view(99, 100)
    values = torch.nn.functional.pad(values, (0, 50))
    packed = pack([values])[0]
    assert isinstance(packed.payload, np.ndarray)
    assert packed.payload.dtype.itemsize == width
    assert torch.equal(packed.unpack(), values)


def test_selected_columns_are_all_that_travels() -> None:
    data, _ = rlvr_batch(64, 512, 100)
    assert num_bytes(data.select(["scores"], [], [])) < 64 * 4 + 500
    received = send(data)
    assert num_bytes(received.select(["scores"], [], [])) < 64 * 4 + 500
    assert abs(num_bytes(received) - num_bytes(data)) < 50
    quarters = sum(num_bytes(part) for part in received.chunk(4))
    assert quarters < num_bytes(data) + 4 * 3000


class TestMemory:
    def test_dense_columns_are_seen_in_place(self) -> None:
        data = DataProto({"x": torch.randn(64, 64), "y": torch.randn(64)})
        stream, buffers = dumps(data)
        received = pickle.loads(stream, buffers=buffers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            view = received.batch.peek("x")
        addresses = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
        assert view.data_ptr() in addresses
        assert received.batch.peek("y").data_ptr() in addresses
        assert received[3:5].batch.peek("x").data_ptr() == view.data_ptr() + 3 * 64 * 4

    def test_no_verb_hands_out_the_shared_memory(self) -> None:
        values = torch.arange(64 * 64.0).view(64, 64)
        stream, buffers = dumps(DataProto({"x": values}))
        shared = np.frombuffer(buffers[0], np.float32)
        before = shared.copy()
        for verb in (
            *(copy.copy, copy.deepcopy, lambda data: data.to("cpu"), lambda data: data.select(["x"])),
            *(lambda data: data[2:60], lambda data: data[[3, 4]], lambda data: data.chunk(2)[0]),
            *(lambda data: DataProto.concat([data]), lambda data: DataProto.concat([data, data])),
            *(lambda data: data.reorder(range(63, -1, -1)), lambda data: data.rename("x", "x")),
            *(lambda data: DataProto().union(data), lambda data: data.pad_to_divisor(8)[0]),
        ):
            verb(pickle.loads(stream, buffers=buffers)).batch["x"].fill_(-1)
            assert (shared == before).all()
        pickle.loads(stream, buffers=buffers)[5].batch["x"].fill_(-1)
        assert (shared == before).all()


class TestObjects:
    def test_tensors_inside_objects(self) -> None:
        pixels = [torch.randn(2, row, dtype=torch.bfloat16) for row in (1, 2, 3)]
        data = DataProto.from_dict(
            {},
            {"image": pixels, "nested": [{"a": [tensor]} for tensor in pixels], "plain": [["x"], ("y",), {"z": 1}]},
            {"mean": torch.ones(3), "pair": (torch.zeros(1), "b")},
        )
        stream, _ = dumps(data)
        received = send(data)
        assert received.equals(data)
        received.non_tensor_batch["image"][0].zero_()
        own = DataProto.from_dict({}, {"set": [{1}, {2}], "none": [None, None]}, {"dtype": torch.bfloat16})
        assert send(own).equals(own), "objects of the user"
        with pytest.raises(TypeError, match="complex128 tensor cannot be sent"):
            pickle.dumps(DataProto({"x": torch.zeros(3, dtype=torch.complex128)}))
        assert b"torch.storage" not in stream  # what torch.save's format would leave
