"""Dividing sequences of different lengths: onto ranks (balance) and into packs (capacity)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Partitions = list[list[int]]


MATRICES = 24576.0
"""Matrix products of a token, where its attention to each token before it costs 2."""


def workload(lengths: ArrayLike) -> NDArray[np.float64]:
    """Return the relative cost of a sequence in a transformer, ``24576 L + L^2``: matrix products and attention."""
    length = np.asarray(lengths, dtype=np.float64)
    return MATRICES * length + length**2


def balance_partitions(costs: ArrayLike, num_partitions: int, equal_counts: bool = False) -> Partitions:
    """Split items into partitions of nearly equal total cost.

    With ``equal_counts`` every partition gets the same number of items, by the largest differencing method of Karmarkar
    and Karp (1982) on k-tuples; without it by longest processing time first (Graham 1969), each item to the partition
    with the least so far.

    Args:
        costs: (N,) non-negative costs, e.g. lengths or :func:`workload` of them.
        num_partitions: k >= 1.
        equal_counts: needs N divisible by k.

    Returns:
        k ascending lists of item indices.

    Raises:
        ValueError: for k < 1, fewer items than partitions, or an N that k does not divide under ``equal_counts``.
    """
    cost = np.asarray(costs, dtype=np.float64)
    if num_partitions < 1 or len(cost) < num_partitions:
        raise ValueError(f"cannot split {len(cost)} sequences into {num_partitions} non-empty partitions")
    if not equal_counts:
        partitions: Partitions = [[] for _ in range(num_partitions)]
        # The number of items breaks ties, so that items of cost 0 do not pile up in one partition.
        heap = [(0.0, 0, index) for index in range(num_partitions)]
        order = np.argsort(-cost, kind="stable")
        for item, item_cost in zip(order.tolist(), cost[order].tolist(), strict=True):
            total, count, index = heap[0]
            partitions[index].append(item)
            heapq.heapreplace(heap, (total + item_cost, count + 1, index))
        return [sorted(partition) for partition in partitions]
    if len(cost) % num_partitions:
        nearest = len(cost) // num_partitions * num_partitions
        raise ValueError(
            f"{len(cost)} sequences cannot be split into {num_partitions} partitions of equal count; "
            f"{nearest} or {nearest + num_partitions} could"
        )
    return _largest_differencing(cost, num_partitions)


def _largest_differencing(cost: NDArray[np.float64], num_partitions: int) -> Partitions:
    """Each state is a k-tuple of partial partitions; the two of largest spread join, heavy parts to light ones."""
    order = np.argsort(-cost, kind="stable")
    rounds = order.reshape(-1, num_partitions)
    sums = cost[rounds]  # descending along each state
    members: list[list[list[int]]] = [[[item] for item in row] for row in rounds.tolist()]
    heap = [(-(row[0] - row[-1]), index) for index, row in enumerate(sums)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        joined = sums[first] + sums[second][::-1]
        parts = [a + b for a, b in zip(members[first], reversed(members[second]), strict=True)]
        rank = np.argsort(-joined, kind="stable")
        sums[first] = joined[rank]
        members[first] = [parts[i] for i in rank.tolist()]
        heapq.heappush(heap, (-(sums[first][0] - sums[first][-1]), first))
    return [sorted(part) for part in members[heap[0][1]]]


def pack_sequences(lengths: Sequence[int] | NDArray[np.integer], capacity: int, min_packs: int = 1) -> Partitions:
    """Put sequences into packs of at most ``capacity`` tokens: first fit, longest first (Johnson 1973).

    At most 11/9 of the optimal number of packs plus one, and in practice the lower bound ceil(sum / capacity).

    Args:
        lengths: (N,) tokens.
        capacity: tokens of a pack.
        min_packs: at least that many packs, e.g. so that all ranks have one; further packs are split off the fullest.

    Returns:
        lists of sequence indices, ascending within a pack.

    Raises:
        ValueError: when a sequence is longer than ``capacity``, or there are fewer sequences than ``min_packs``.
    """
    length = np.asarray(lengths, dtype=np.int64)
    if len(length) == 0:
        return []
    if length.max() > capacity:
        worst = int(length.argmax())
        raise ValueError(
            f"sequence {worst} has {length[worst]} tokens, more than a pack of {capacity} holds; "
            f"a capacity of at least {length.max()} would do"
        )
    if len(length) < min_packs:
        raise ValueError(f"{len(length)} sequences cannot fill {min_packs} packs")
    packs: Partitions = []
    room = np.full(len(length), capacity)
    for item in np.argsort(-length, kind="stable").tolist():
        pack = int((room[: len(packs) + 1] >= length[item]).argmax())  # the first with room; the last is a new one
        if pack == len(packs):
            packs.append([])
        packs[pack].append(item)
        room[pack] -= length[item]
    while len(packs) < min_packs:
        packs.sort(key=lambda pack: (len(pack) > 1, int(length[pack].sum())))
        fullest = packs.pop()
        halves = balance_partitions(length[fullest], 2)
        packs.extend([fullest[i] for i in half] for half in halves)
    return [sorted(pack) for pack in packs]


def balance_packs(lengths: Sequence[int] | NDArray[np.integer], capacity: int, num_packs: int) -> Partitions:
    """``num_packs`` packs of nearly equal :func:`workload`, none of more than ``capacity`` tokens.

    Where equal work would not fit (equal work is not equal tokens), first fit with the fullest packs split.

    Raises:
        ValueError: as :func:`pack_sequences`; also where ``num_packs`` is fewer than first fit needs.
    """
    length = np.asarray(lengths, dtype=np.int64)
    packs = balance_partitions(workload(length), num_packs)
    if max(int(length[pack].sum()) for pack in packs) <= capacity:
        return packs
    packs = pack_sequences(length, capacity, num_packs)
    if len(packs) > num_packs:
        raise ValueError(f"{len(packs)} packs of {capacity} tokens are needed, not {num_packs}")
    return packs
