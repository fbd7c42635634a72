"""This host's processor in place of a GPU: what its kernels take, and what a process keeps of freed memory.

There is no table of processors.  A rehearsal meets a few hundred different kernels (operator, shapes, types); each is
run for real, and counted as often as it was met.  The engine, which does not run on fake tensors, is run for real for a
few tokens, with few of its layers.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from roll.config.plan.plan import RolePlan
from roll.distributed.nodes import worker_threads
from roll.rehearsal.catalog import MIB, Gpu, Hardware
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import _load_model, create_decoder

CALL_SECONDS = 15e-6  # of Python and autograd around a kernel
_LAYERS, _TOKENS, _LONG = (1, 3), 4, 0.02
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def this_host(devices: int) -> Hardware:
    """The host with so many logical devices, each of which has its share of the cores."""
    torch.set_num_threads(worker_threads(devices))
    source = torch.ones(16 * MIB)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / min(_times(lambda: target.copy_(source), 4))[0]
    sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    cache = max((int(size.strip()[:-1]) * 1024 for size in sizes), default=16 * MIB)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpu = Gpu("cpu", memory, 1.0, 1.0, bandwidth, cache, 0)  # nothing divides by its speed: kernels are timed
    return Hardware(gpu, "memory", bandwidth / 4, bandwidth / 4, devices, Clock())


@dataclass(frozen=True)
class Described:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Kernel:
    """A call of an operator."""

    operator: Any
    structure: TreeSpec
    leaves: tuple[Any, ...]


def kernel_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kernel | None:
    """None: it has arguments that are not of this process alone, such as groups of ranks."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    described = (
        Described(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )
    return Kernel(operator, structure, tuple(described))


@dataclass
class Clock:
    """Seconds and CPU-seconds of kernels on this host, each measured when it is first asked for."""

    _known: dict[Kernel, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, kernel: Kernel) -> tuple[float, float]:
        if kernel not in self._known:
            self._known[kernel] = 0.0, 0.0  # of one that cannot be called by itself
            with suppress(RuntimeError, ValueError, IndexError, NotImplementedError):
                self._known[kernel] = self._measure(kernel)
        return self._known[kernel]

    @torch.no_grad()
    def _measure(self, kernel: Kernel) -> tuple[float, float]:
        leaves = kernel.leaves
        first = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, Described)), 0)
        # Operators that take places take those of a dimension, named right after the tensor, or of the first.
        shape, follower = leaves[first].shape or (1,), next(iter(leaves[first + 1 :]), None)
        dim = follower if type(follower) is int and -len(shape) <= follower < len(shape) else 0
        filled: list[Any] = list(leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Described):
                filled[place] = real = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
                if leaf.dtype.is_floating_point or leaf.dtype == torch.bool:
                    real.fill_(0.01)
                else:
                    real.copy_((torch.arange(real.numel()) % max(1, shape[dim])).view(leaf.shape))
        args, kwargs = kernel.structure.unflatten(filled)
        wall, cpu = zip(*_times(lambda: kernel.operator(*args, **kwargs), 3), strict=True)
        return min(wall), min(cpu)


def _times(work: Callable[[], object], most: int) -> list[tuple[float, float]]:
    """Seconds and CPU-seconds of calls; of a long one fewer."""
    found: list[tuple[float, float]] = []
    while len(found) < most and not (len(found) > 1 and found[-1][0] > _LONG):
        begin = time.perf_counter(), time.process_time()
        work()
        found.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return found


def generation_seconds(
    role: RolePlan, config: Mapping[str, Any], samples: int, group: int, prompt: int, response: int, running: int
) -> tuple[float, float]:
    """Seconds and CPU-seconds in which an engine makes ``samples``, at most ``running`` at a time."""
    size = min(samples, running)
    costs = np.array([_engine_costs(role, dict(config), layers, size, group, prompt, response) for layers in _LAYERS])
    layer = (costs[1] - costs[0]) / (_LAYERS[1] - _LAYERS[0])
    prefill, token = costs[0] + layer * (int(config["num_hidden_layers"]) - _LAYERS[0])
    wall, cpu = samples / size * (prefill + (response - 1) * token)
    return float(wall), float(cpu)


def _engine_costs(
    role: RolePlan, config: dict[str, Any], layers: int, size: int, group: int, prompt: int, response: int
) -> Sequence[tuple[float, float]]:
    """Seconds and CPU-seconds of the first token of ``size`` samples, and of a later one."""
    config |= {"num_hidden_layers": layers, "layer_types": None}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        section = replace(role.section, model_args=replace(role.section.model_args, model_name_or_path=folder))
        model = _load_model(section, "dummy")
    length = prompt + response
    engine = GenerationEngine(create_decoder(model, length), lambda ids: "", (), size, length)
    half = prompt + response // 2  # the cache of an average step
    sampling = SamplingParams(max_new_tokens=response - response // 2)
    for first in range(0, size, group):
        ids = [(first + place) % 89 + 3 for place in range(half)]
        engine.add_requests([GenerationRequest(str(first), ids, sampling, min(group, size - first))])
    (wall, cpu), *others = (_times(engine.step, 1)[0] for _ in range(1 + min(_TOKENS, sampling.max_new_tokens - 1)))
    return (wall * prompt / half, cpu * prompt / half), min(others)


class _Statistics(ctypes.Structure):  # mallinfo2(3)
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class Heap:
    """Memory that glibc keeps for a process: what is freed between two blocks that are not stays resident.

    Every tensor's block is asked of this process's own malloc, among all the small blocks that PyTorch and Python ask
    for meanwhile, and never written to; so it takes no memory, and leaves the gaps that the run's blocks leave.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._statistics: Any = getattr(library, "mallinfo2", lambda: _Statistics())  # glibc's own
        self._statistics.restype = _Statistics
        self._allocate, self._free = library.posix_memalign, library.free
        self._free.argtypes = [ctypes.c_void_p]
        self._blocks: dict[int, ctypes.c_void_p] = {}
        self._before = self.peak = 0
        self._before = self.resident

    @property
    def resident(self) -> int:
        """Bytes since it was made."""
        found = self._statistics()
        return int(found.arena + found.hblkhd) - self._before

    def resize(self, key: int, size: int) -> None:
        """A block of another size; 0: freed."""
        if (block := self._blocks.pop(key, None)) is not None:
            self._free(block)
        if size:
            self._blocks[key] = block = ctypes.c_void_p()
            self._allocate(ctypes.byref(block), 64, ctypes.c_size_t(size))
            if size >= MIB:  # asking costs more than a small block
                self.peak = max(self.peak, self.resident)
