"""Lower bounds of a phase's time: arithmetic, memory traffic, and traffic between devices.

Kernels run one after another, and each takes at least its arithmetic at the device's peak, or its operands at the
bandwidth of the memory.  Collectives may overlap with all of that; each takes at least what a device must send or
receive over its slowest link.  So a phase takes at least the larger of the two sums.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roll.config.plan.plan import RolePlan
from roll.rehearsal.catalog import Gpu, Hardware
from roll.rehearsal.formulas import BYTES, EngineUse, ModelShape
from roll.rehearsal.host import CALL_SECONDS
from roll.rehearsal.tracker import Collective, Operation


@dataclass(frozen=True)
class PhaseTime:
    """Seconds, each a lower bound."""

    compute: float  # time of the kernels that arithmetic bounds
    memory: float  # time of the kernels that memory traffic bounds
    network: float

    @property
    def seconds(self) -> float:
        return max(self.compute + self.memory, self.network)

    @property
    def bound(self) -> str:
        """``compute``, ``memory`` or ``network``."""
        if self.network > self.compute + self.memory:
            return "network"
        return "compute" if self.compute >= self.memory else "memory"


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends or receives in collectives of one kind."""

    name: str
    ranks: int
    within: float  # to devices of its node
    between: float  # to other nodes


def kernel_times(operations: Counter[Operation], hardware: Hardware) -> tuple[float, float, float]:
    """Seconds of the kernels that arithmetic bounds, and of those that memory bounds; on a CPU, CPU-seconds of all."""
    gpu, compute, memory, cpu = hardware.gpu, 0.0, 0.0, 0.0
    for operation, count in operations.items():
        if hardware.clock is not None:
            took, spent = hardware.clock(operation.kernel) if operation.kernel else (0.0, 0.0)
            # In the caches, where it was measured; here at least what goes past them.
            whole = max(took, operation.num_bytes / gpu.bandwidth) + CALL_SECONDS
            cpu += count * (spent * whole / took if took else whole)
            compute += count * whole if operation.flops else 0.0
            memory += 0.0 if operation.flops else count * whole
            continue
        speed = gpu.single if operation.dtype in (torch.float32, torch.float64) else gpu.half
        arithmetic, moving = operation.flops / speed, operation.num_bytes / gpu.bandwidth
        if arithmetic >= moving:
            compute += count * arithmetic
        else:
            memory += count * moving
    return compute, memory, cpu


def generation_time(
    role: RolePlan, shape: ModelShape, use: EngineUse, gpu: Gpu, samples: int, group: int, prompt: int, response: int
) -> tuple[float, float]:
    """Lower bounds of the time in which an engine makes its samples, every one of full length: seconds of arithmetic,
    and of reading.

    Prompts are computed once a group; each decoding step reads the weights once (of experts those that its tokens
    choose, all equally often) and the keys and values of every running sample.
    """
    itemsize, ranks = BYTES[role.section.model_args.dtype], max(1, role.num_gpus_per_worker)
    speed = gpu.half if itemsize == 2 else gpu.single
    own = samples / max(1, role.dp_size)
    tokens = own * response + own / max(1, group) * prompt
    attention = 2.0 * shape.layers * shape.heads * shape.head_dim * (response + 2 * prompt) * own * response
    flops = 2.0 * shape.active * tokens + attention
    running = min(use.running, max(1.0, own))
    steps, read = response * own / running, float(shape.total)
    if shape.experts:
        # Weights that the running samples use together: an expert is used by none with probability (1 - k/E)^samples.
        per_expert = (shape.layer - shape.active_layer) / (shape.experts - shape.top_k)
        used = shape.experts * (1.0 - (1.0 - shape.top_k / shape.experts) ** running)
        dense = shape.layer - shape.experts * per_expert
        read = float(shape.layers * (dense + used * per_expert) + shape.embeddings)
    cached = running * (prompt + response / 2) * shape.kv_bytes(itemsize)
    return flops / ranks / speed, steps * (read * itemsize + cached) / ranks / gpu.bandwidth


def traffic(collectives: Counter[Collective], devices: Sequence[int], per_node: int) -> list[Traffic]:
    """Traffic of rank 0, by kind of collective and size of group; ``devices`` are the role's ids, by rank."""
    flows = []
    for collective, count in collectives.items():
        ranks = len(collective.ranks)
        if ranks < 2:
            continue
        nodes = {devices[rank] // per_node for rank in collective.ranks if rank < len(devices)}
        within, between = _shares(collective.name, float(collective.num_bytes), ranks, max(1, len(nodes)))
        flows.append(Traffic(collective.name, ranks, count * within, count * between))
    return merged([flows])


def _shares(name: str, total: float, ranks: int, nodes: int) -> tuple[float, float]:
    """Bytes of one device within its node and to others. Of an all-gather, each device of a node fetches its part of
    what the other nodes have, and passes it on within."""
    moved = total * (ranks - 1) / ranks
    if nodes == 1:
        return (2 * moved if name == "all_reduce" else moved), 0.0
    own = max(1.0, ranks / nodes)
    foreign = total * (nodes - 1) / nodes
    match name:
        case "all_to_all":
            between = total * (ranks - own) / ranks
            return moved - between, between
        case "gather" | "broadcast" | "receive":
            return moved - foreign, foreign
        case "all_reduce":
            return 2 * (moved - foreign / own), 2 * foreign / own
        case _:
            return moved - foreign / own, foreign / own


def network_time(flows: Sequence[Traffic], hardware: Hardware) -> float:
    """Seconds; traffic within and between nodes uses different links at the same time."""
    within, between = sum(flow.within for flow in flows), sum(flow.between for flow in flows)
    return max(within / hardware.within, between / hardware.between)


def merged(flows: Sequence[Sequence[Traffic]]) -> list[Traffic]:
    """Traffic of several phases by kind."""
    totals: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for flow in (one for some in flows for one in some):
        totals[flow.name, flow.ranks][0] += flow.within
        totals[flow.name, flow.ranks][1] += flow.between
    return [Traffic(name, ranks, *sums) for (name, ranks), sums in totals.items()]
