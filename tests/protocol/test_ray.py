"""DataProto and tensor bundles through a real Ray object store and a real actor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from roll.protocol import DataProto
from roll.protocol.columns import Packed
from roll.weight_sync.encoding import tensor_checksum


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    if ray.is_initialized():  # by the tests of another folder, for the whole session
        yield
        return
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27, configure_logging=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Reader:
    """Reports what it is given, and returns batches."""

    def add_one(self, data: DataProto, column: str) -> tuple[DataProto, list[str]]:
        """The column plus one, and the columns that were still packed after reading it."""
        data.batch[column] += 1
        packed = [key for key, stored in data.batch.stored() if isinstance(stored, Packed)]
        return data.select([column]), packed

    def peek(self, data: DataProto, column: str) -> tuple[float, int]:
        """The column's sum without a copy, and its checksum."""
        view = data.batch.peek(column)
        return view.sum().item(), tensor_checksum(view)


@pytest.fixture(scope="module")
def reader() -> Any:
    return Reader.remote()


def padded(rows: int = 512, width: int = 2048, length: int = 200) -> DataProto:
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[:, :length] = True
    ids = torch.randint(1, 1000, (rows, width)) * mask
    log_probs = torch.randn(rows, width) * mask
    objects = {"prompt_id": [str(row) for row in range(rows)]}
    return DataProto.from_dict({"input_ids": ids, "mask": mask, "log_probs": log_probs}, objects, {"step": 1})


def stored_bytes(ref: Any) -> int:
    return int(ray.experimental.get_object_locations([ref])[ref]["object_size"])


def test_put_and_get() -> None:
    data = padded()
    ref = ray.put(data)
    tokens = 512 * 200
    # Log-probs in 4 bytes, ids below 1000 in 2, the mask's spans; strings and headers are the rest.
    assert tokens * 6 < stored_bytes(ref) < tokens * 6 * 1.05
    assert ray.get(ref).equals(data)


def test_actor_arguments_and_results(reader: Any) -> None:
    data = padded()
    ref = ray.put(data)
    result, packed = ray.get(reader.add_one.remote(ref, "log_probs"))
    assert packed == ["input_ids", "mask"]
    assert torch.equal(result.batch["log_probs"], data.batch["log_probs"] + 1)
    assert result.non_tensor_batch["prompt_id"].tolist() == data.non_tensor_batch["prompt_id"].tolist()
    # The actor's change stayed its own.
    assert ray.get(ref).equals(data)


def test_dense_columns_are_read_in_the_object_store(reader: Any) -> None:
    values = torch.randn(4096, 512)
    ref = ray.put(DataProto({"x": values}))
    first, second = ray.get(ref), ray.get(ref)
    assert first.batch.peek("x").data_ptr() == second.batch.peek("x").data_ptr() != values.data_ptr()
    assert ray.get(reader.peek.remote(ref, "x")) == (values.sum().item(), tensor_checksum(values))
