"""Stand-ins: for devices and other ranks where a strategy runs on fake tensors, and for the clusters of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from roll.config.plan.plan import RolePlan
from roll.models import attention, kernels
from roll.models.expert_parallel import DispatchedExperts
from roll.models.log_probs import HeadMemory
from roll.models.patterns import VarlenCall
from roll.pipelines.model_calls import GENERATION
from roll.rehearsal.tracker import Tracker
from roll.strategies.base import StateKind
from roll.strategies.training import gather


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


_ACCELERATOR_HEAD = HeadMemory.for_device(torch.device("cuda"))


@contextmanager
def as_on_device(tracker: Tracker, on_cpu: bool) -> Iterator[None]:
    """On an accelerator the head takes larger chunks, packed or shared rows are one kernel; NumPy copies nothing."""
    from transformers import masking_utils

    find_packed = masking_utils.find_packed_sequence_indices

    def even_destinations(experts: DispatchedExperts, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        # Every rank's experts are chosen equally often.
        size, own = chosen.shape[0], experts.num_experts // experts.group.size()
        counts = [len(part) for part in np.array_split(range(size), experts.group.size())]
        return counts, counts, torch.arange(size, device=chosen.device) % own

    def kernel(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, how: attention.Scores) -> Tensor:
        return _Varlen.apply(query, key, value, pairs(call, how.window), tracker)

    def packed_indices(position_ids: Tensor) -> Tensor | None:
        # A model asks the values whether rows are packed. Those that it numbers itself are not, but they are fake.
        return None if isinstance(position_ids, FakeTensor) else find_packed(position_ids)

    patches: list[tuple[Any, str, Any]] = [
        (gather, "copy_into", lambda target, source: target.copy_(source)),
        (masking_utils, "find_packed_sequence_indices", packed_indices),
        (DispatchedExperts, "destinations", even_destinations),
    ]
    if not on_cpu:
        patches += [
            (kernels, "HAS_ONEDNN", False),
            (HeadMemory, "for_device", staticmethod(lambda device: _ACCELERATOR_HEAD)),
            (attention, "has_varlen", lambda device: True),
            (attention, "_kernel", kernel),
            (attention, "SHORT", 0),
        ]
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def pairs(call: VarlenCall, window: int | None) -> float:
    """Pairs of a query and a key that it sees."""
    queries, keys = np.array(call.lengths, dtype=np.float64).T
    hidden = [np.maximum(ends - window, 0) ** 2 for ends in (keys, keys - queries)] if window else (0.0, 0.0)
    return float((queries * (keys - queries / 2) - (hidden[0] - hidden[1]) / 2).sum())


class _Varlen(torch.autograd.Function):
    """A stand-in for the kernel for sequences of different lengths, of which there is none on a CPU: it keeps queries,
    keys, values, the output and a float32 number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: float, tracker: Tracker) -> Tensor:
        output = torch.empty_like(query)
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.tracker, ctx.pairs = tracker, pairs
        flops = int(4 * ctx.pairs * query.shape[1] * query.shape[2])
        tracker.add_kernel(flops, (query, key, value), (output, sums))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        flops = int(10 * ctx.pairs * query.shape[1] * query.shape[2])
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        ctx.tracker.add_kernel(flops, (query, key, value, output, sums, gradients[0]), found)
        return *found, None, None


class RecordingCluster:
    """Stand-in for a cluster: records which states of its role are on the devices."""

    def __init__(self, role: RolePlan, states: frozenset[StateKind]) -> None:
        self.name, self.role = role.name, role.section
        self.live_ranks = list(range(role.world_size))
        self.resident = set(states)

    def call_all(self, method: Callable[..., Any], argument: Any = None) -> RecordingCluster:
        match method.__name__:
            case "sleep":
                self.resident.clear()
            case "wake":
                self.resident |= {StateKind.MODEL_PARAMS} if argument else set(GENERATION)
            case "offload_states":
                self.resident -= set(argument)
            case "load_states":
                self.resident |= set(argument)
        return self

    def within(self, timeout: float | None) -> RecordingCluster:
        return self

    def result(self) -> list[None]:
        return []
