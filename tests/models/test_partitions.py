from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.models.partitions import balance_packs, balance_partitions, pack_sequences, workload

lengths_lists = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(lengths=lengths_lists, k=st.integers(1, 8), equal=st.booleans())
def test_partitions_hold_every_item_once(lengths: list[int], k: int, equal: bool) -> None:
    if len(lengths) < k or (equal and len(lengths) % k):
        with pytest.raises(ValueError, match=str(len(lengths))):
            balance_partitions(lengths, k, equal)
        return
    partitions = balance_partitions(lengths, k, equal)
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert len(partitions) == k
    assert all(partition == sorted(partition) and partition for partition in partitions)
    if equal:
        assert {len(partition) for partition in partitions} == {len(lengths) // k}
    else:
        # Graham's bound of list scheduling: the last item came to the partition with the least.
        largest = max(sum(lengths[i] for i in partition) for partition in partitions)
        assert largest <= sum(lengths) / k + (1 - 1 / k) * max(lengths) + 1e-9


def first_fit_by_loop(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for pack in packs:
            if sum(lengths[i] for i in pack) + lengths[item] <= capacity:
                pack.append(item)
                break
        else:
            packs.append([item])
    return [sorted(pack) for pack in packs]


@given(lengths=lengths_lists, capacity=st.integers(100, 300), wanted=st.integers(1, 10))
def test_packing_is_first_fit_decreasing_into_packs_enough(lengths: list[int], capacity: int, wanted: int) -> None:
    assert pack_sequences(lengths, capacity) == first_fit_by_loop(lengths, capacity)
    packs = pack_sequences(lengths, capacity, min(wanted, len(lengths)))
    assert len(packs) >= min(wanted, len(lengths))
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)


@given(lengths=lengths_lists, more=st.integers(0, 5))
def test_balanced_packs_fit(lengths: list[int], more: int) -> None:
    fewest = len(pack_sequences(lengths, 120))
    count = min(fewest + more, len(lengths))
    packs = balance_packs(lengths, 120, count)
    assert len(packs) == count
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 120 for pack in packs)


def test_realistic_lengths_are_balanced_and_packed_closely() -> None:
    lengths = np.random.default_rng(0).integers(1, 4096, 2048)
    for equal in (True, False):
        loads = [int(lengths[partition].sum()) for partition in balance_partitions(lengths, 16, equal)]
        assert max(loads) - min(loads) <= 32
    assert len(pack_sequences(lengths, 8192)) <= math.ceil(lengths.sum() / 8192) + 1
    work = [float(workload(lengths[pack]).sum()) for pack in balance_packs(lengths[:512], 40_000, 32)]
    assert max(work) / min(work) < 1.01
    assert workload([0, 100]).tolist() == [0.0, 24576.0 * 100 + 100.0**2], "linear plus square"
    assert [len(p) for p in balance_partitions([0] * 12, 4)] == [3, 3, 3, 3], "without cost, by count"


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="2 packs of 10 tokens are needed, not 1"):
        balance_packs([8, 8], 10, 1)
    with pytest.raises(ValueError, match="packs"):
        pack_sequences([1, 2], 200, 3)
    with pytest.raises(ValueError, match=r"sequence 1 has 30 tokens.*at least 30"):
        pack_sequences([10, 30], 20)
    with pytest.raises(ValueError, match="8 or 12"):
        balance_partitions([1] * 10, 4, equal_counts=True)
    assert pack_sequences([], 20) == []
