"""Named accelerators and networks: what their makers state. Torch-free.

Every figure is a peak that no program reaches, so that times that follow from them are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.reading.errors import ConfigError, Problem

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One device."""

    name: str
    memory: int
    """Bytes that a driver reports, which are fewer than its name says."""
    half: float
    """FLOP/s of dense matrix products in bf16 and fp16."""
    single: float
    """The same in float32, without TF32 (which PyTorch does not use unless asked to)."""
    bandwidth: float
    """Bytes a second between memory and processors."""
    nvlink: float
    """Bytes a second that a device sends to the others of its node by NVLink (on AMD by Infinity Fabric); 0: none."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 19.5e12, 1555 * GB, 300 * GB),
        Gpu("a100-80g", int(79.3 * GIB), 312e12, 19.5e12, 2039 * GB, 300 * GB),
        Gpu("h100-80g", int(79.2 * GIB), 989e12, 67e12, 3350 * GB, 450 * GB),
        Gpu("h200-141g", int(139.8 * GIB), 989e12, 67e12, 4800 * GB, 450 * GB),
        Gpu("b200-180g", int(178.0 * GIB), 2250e12, 75e12, 8000 * GB, 900 * GB),
        Gpu("mi300x-192g", int(191.5 * GIB), 1307e12, 163e12, 5300 * GB, 448 * GB),
        Gpu("l40s-48g", int(44.4 * GIB), 362e12, 91.6e12, 864 * GB, 0),
        Gpu("rtx4090-24g", int(23.5 * GIB), 165e12, 82.6e12, 1008 * GB, 0),
    )
}
DEFAULT_GPU = "h100-80g"

WITHIN = {"nvlink": None, "pcie4": 32.0 * GB, "pcie5": 64.0 * GB}
"""Bytes a second from a device to the others of its node; null: what the GPU has."""
BETWEEN = {"ib400": 50.0 * GB, "ib200": 25.0 * GB, "ib100": 12.5 * GB, "eth100": 12.5 * GB, "eth25": 3.125 * GB}
"""Bytes a second from a device to other nodes: InfiniBand with an adapter a device, Ethernet with one a node."""
PER_NODE = ("eth100", "eth25")
DEFAULT_NETWORK = "nvlink+ib400"


@dataclass(frozen=True)
class Hardware:
    """A GPU and how it is connected."""

    gpu: Gpu
    network: str
    within: float
    """Bytes a second of a device to devices of its node."""
    between: float
    """Bytes a second of a device to other nodes, when all devices of its node send."""
    per_node: int

    @property
    def name(self) -> str:
        return f"{self.gpu.name}, {self.network}, {self.per_node} a node"


def find_gpu(name: str) -> Gpu:
    """
    Raises:
        ConfigError: a name that is not in the table.
    """
    if name not in GPUS:
        raise ConfigError([Problem("--gpu", name, f"is not known: {', '.join(GPUS)} are", DEFAULT_GPU)])
    return GPUS[name]


def hardware(gpu: str, network: str, per_node: int) -> Hardware:
    """
    Args:
        network: ``within+between``, such as ``nvlink+ib400``.
        per_node: devices of a node.

    Raises:
        ConfigError: a name that is in no table.
    """
    found = find_gpu(gpu)
    within, _, between = network.partition("+")
    between = between or "ib400"
    if within not in WITHIN or between not in BETWEEN:
        rule = f"must be one of {', '.join(WITHIN)}, a plus sign, and one of {', '.join(BETWEEN)}"
        raise ConfigError([Problem("--network", network, rule, DEFAULT_NETWORK)])
    inside = found.nvlink if within == "nvlink" else WITHIN[within]
    if not inside:
        raise ConfigError([Problem("--network", network, f"{gpu} has no NVLink", f"pcie4+{between}")])
    outside = BETWEEN[between] / (per_node if between in PER_NODE else 1)
    return Hardware(found, f"{within}+{between}", inside, outside, per_node)
