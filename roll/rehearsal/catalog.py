"""Tables of known hardware and models: GPUs and networks as their makers state them, and the ``config.json`` of
well-known sizes. Torch-free.

Every figure of the hardware is a peak that no program reaches, so that times that follow from them are lower bounds.
Models have a table because not every host reaches a hub, and the sizes of the usual models do not change: it
holds what decides about memory and arithmetic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from roll.config.model_files import CONFIG, read_model_config
from roll.config.reading.errors import ConfigError, Problem

GIB, MIB = 2**30, 2**20
GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One device."""

    name: str
    memory: int  # bytes that a driver reports, which are fewer than its name says
    half: float  # FLOP/s of dense matrix products in bf16 and fp16
    single: float  # the same in float32, without TF32 (which PyTorch does not use by default)
    bandwidth: float  # bytes a second between memory and processors
    cache: int  # bytes of the last level of cache between the two
    nvlink: float
    """Bytes a second that a device sends to the others of its node by NVLink (on AMD by Infinity Fabric); 0: none."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 19.5e12, 1555 * GB, 40 * MIB, 300 * GB),
        Gpu("a100-80g", int(79.3 * GIB), 312e12, 19.5e12, 2039 * GB, 40 * MIB, 300 * GB),
        Gpu("h100-80g", int(79.2 * GIB), 989e12, 67e12, 3350 * GB, 50 * MIB, 450 * GB),
        Gpu("h200-141g", int(139.8 * GIB), 989e12, 67e12, 4800 * GB, 50 * MIB, 450 * GB),
        Gpu("b200-180g", int(178.0 * GIB), 2250e12, 75e12, 8000 * GB, 126 * MIB, 900 * GB),
        Gpu("mi300x-192g", int(191.5 * GIB), 1307e12, 163e12, 5300 * GB, 256 * MIB, 448 * GB),
        Gpu("l40s-48g", int(44.4 * GIB), 362e12, 91.6e12, 864 * GB, 96 * MIB, 0),
        Gpu("rtx4090-24g", int(23.5 * GIB), 165e12, 82.6e12, 1008 * GB, 72 * MIB, 0),
    )
}
DEFAULT_GPU, HOST = "h100-80g", "cpu"
RUN_BYTES, WORKER_BYTES = 890 * 10**6, 165 * 10**6
"""Proportional set sizes (``Pss`` of ``/proc/PID/smaps_rollup``) of a driver with Ray's processes, and of a worker that
has imported PyTorch and has no model."""

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
    within: float  # bytes a second of a device to devices of its node
    between: float  # bytes a second of a device to other nodes, when all devices of its node send
    per_node: int
    clock: Any = None  # the `Clock` of :mod:`roll.rehearsal.host`, where the device is this host's processor


def find_gpu(name: str) -> Gpu:
    """The device of this name; ConfigError for one that is not in the table."""
    if name not in GPUS:
        raise ConfigError([Problem("--gpu", name, f"is not known: {', '.join(GPUS)} are", DEFAULT_GPU)])
    return GPUS[name]


def gpu_of(device_name: str) -> Gpu | None:
    """The device by the name that its driver gives it, such as ``NVIDIA H100 80GB HBM3``; None: not in the table.
    Those of one chip differ in memory alone; a part of one (MIG) has less than the table says."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    said = {*words, *map("".join, pairwise(words))}  # GeForce RTX 4090: rtx4090
    named = (gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in said)
    return None if "mig" in words else next(named, None)


def hardware(gpu: str, network: str, per_node: int) -> Hardware:
    """A device with its connections, ``within+between`` such as ``nvlink+ib400``, on nodes of ``per_node`` devices.
    ConfigError for a name that is in no table."""
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


# Models

_SHARED: dict[str, Any] = {"max_position_embeddings": 40960, "use_cache": True}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "head_dim": 128,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0},
}

# Name: family, hidden, intermediate, layers, heads, key-value heads, tied embeddings, further keys.
_SIZES: dict[str, tuple[str, int, int, int, int, int, bool, dict[str, Any]]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, True, {"vocab_size": 151936}),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, True, {"vocab_size": 151936}),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, True, {"vocab_size": 151936}),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, False, {"vocab_size": 152064}),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, False, {"vocab_size": 152064}),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, False, {"vocab_size": 152064}),
    "Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, False, {"vocab_size": 152064}),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, True, {}),
    "Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, True, {}),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, True, {}),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, False, {}),
    "Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, False, {}),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, False, {}),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, 4, False, {"moe_intermediate_size": 768}),
    "Qwen3-235B-A22B": ("qwen3_moe", 4096, 12288, 94, 64, 4, False, {"moe_intermediate_size": 1536}),
    "Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, True, {"head_dim": 64}),
    "Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, True, {"head_dim": 128}),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, False, {"head_dim": 128}),
    "Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, False, {"head_dim": 128}),
}
_ALIASES = {
    **dict.fromkeys(("Meta-Llama-3-8B", "Meta-Llama-3.1-8B"), "Llama-3.1-8B"),
    **dict.fromkeys(("Meta-Llama-3-70B", "Meta-Llama-3.1-70B", "Llama-3.3-70B"), "Llama-3.1-70B"),
}
KNOWN = tuple(_SIZES)  # models whose sizes are known without their files
_VARIANT = re.compile(r"-(instruct|base|thinking|chat|it)\b.*|-\d{4}$", re.IGNORECASE)
"""Endings of names that say nothing about the size."""


def known_config(name: str) -> Mapping[str, Any] | None:
    """The ``config.json`` of a well-known model by its hub name or by the last part of a path; None: not known."""
    base = _VARIANT.sub("", name.rstrip("/").rpartition("/")[2])
    base = _ALIASES.get(base, base)
    if base not in _SIZES:
        return None
    family, hidden, intermediate, layers, heads, groups, tied, more = _SIZES[base]
    return {
        "model_type": family,
        **_SHARED,
        **_FAMILIES[family],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
        **more,
    }


def find_config(path: str | None, given: Path | None = None) -> Mapping[str, Any] | None:
    """A model's ``config.json``: the file that is given, that on this machine, or the well-known one. ConfigError for a
    file that cannot be read."""
    if given is None:
        try:
            own = read_model_config(path)
        except ValueError as error:
            raise ConfigError([Problem("model_args.model_name_or_path", path, str(error))]) from error
        return own or known_config(path or "")
    file = given / CONFIG if given.is_dir() else given
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("--model-config", str(given), f"cannot be read: {error}")]) from error
    if not isinstance(config, dict) or "model_type" not in config:
        rule = "must be the config.json of a transformers model, or the folder that holds it"
        raise ConfigError([Problem("--model-config", str(given), rule)])
    return config
