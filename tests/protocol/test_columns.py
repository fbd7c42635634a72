"""TensorColumns as a dict, and columns that are unpacked on first access."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from roll.protocol import DataProto
from roll.protocol.columns import Packed, TensorColumns


class CountingColumn(Packed):
    """A received column of four numbers; counts how often such columns are unpacked."""

    unpacked = 0

    def unpack(self) -> torch.Tensor:
        CountingColumn.unpacked += 1
        return super().unpack()


def columns() -> tuple[TensorColumns, type[CountingColumn]]:
    CountingColumn.unpacked = 0
    packed = CountingColumn(torch.int64, torch.Size([4]), np.arange(4))
    return TensorColumns({"plain": torch.zeros(4), "packed": packed}), CountingColumn


READS: list[Callable[[TensorColumns], object]] = [
    *(lambda held: held["packed"], lambda held: held.get("packed"), lambda held: held.peek("packed")),
    *(lambda held: dict(held)["packed"], lambda held: {**held}["packed"], lambda held: dict(held.items())["packed"]),
    *(lambda held: list(held.values())[1], lambda held: (held | {})["packed"], lambda held: held.setdefault("packed")),
    *(lambda held: held.pop("packed"), lambda held: pickle.loads(pickle.dumps(held))["packed"]),
]


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_unpacks(read: Callable[[TensorColumns], object]) -> None:
    value = read(columns()[0])
    assert isinstance(value, torch.Tensor)
    assert value.tolist() == [0, 1, 2, 3]


def test_unpacked_once_and_only_if_read() -> None:
    held, packed = columns()
    assert (len(held), list(held), "packed" in held, held.batch_size) == (2, ["plain", "packed"], True, 4)
    copied = held.copy()
    assert packed.unpacked == 0
    assert held["packed"] is held["packed"]
    assert packed.unpacked == 1
    assert copied["packed"] is not held["packed"]


def test_verbs_keep_columns_packed() -> None:
    held, packed = columns()
    data = DataProto()
    data.batch = held
    parts = [*data.chunk(2), data[1:3], *data.select("packed").split(3)]
    data.rename("packed", "renamed")
    assert packed.unpacked == 0
    assert [part.batch["packed"].tolist() for part in parts] == [[0, 1], [2, 3], [1, 2], [0, 1, 2], [3]]


def test_writes() -> None:
    held, packed = columns()
    held["packed"] = torch.ones(4)
    held.update(other=torch.ones(4))
    held |= {"third": torch.ones(4)}
    assert packed.unpacked == 0
    assert list(held) == ["plain", "packed", "other", "third"]
    with pytest.raises(ValueError, match=r"batch\['bad'\] has 3 rows, but batch\['plain'\] has 4"):
        held.update(bad=torch.ones(3))
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        held[3] = torch.ones(4)  # type: ignore[index]
    assert (held.get("nope", 3), held.pop("nope", 4)) == (3, 4)
    for read in (held.__getitem__, held.pop, held.peek):
        with pytest.raises(KeyError):
            read("nope")
    held.clear()
    assert held.batch_size is None
    held["new"] = torch.ones(9)
    held["new"] = torch.ones(8)  # the only column may change its length
