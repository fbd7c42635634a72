"""Kinds of devices, what each is called and can do: CPU, CUDA, ROCm, Ascend NPU.

Nothing here imports torch until a device is really asked for something, so ``current_platform()`` is cheap on a
machine without accelerators.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import logging
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")


VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""The variables that select a process's devices, before torch is imported: of CUDA, ROCm and NPUs."""


@dataclass(frozen=True)
class Platform:
    """One kind of device, as seen from the calling process.

    A worker sees only its own devices (:data:`VISIBLE_DEVICES`), so index 0 is always the worker's first device.
    """

    name: str  # ``cpu``, ``cuda``, ``rocm`` or ``npu``
    device_type: str  # its name for ``torch.device``; ROCm devices are ``cuda`` to torch
    collective_backend: str  # the ``torch.distributed`` backend for tensors on these devices
    process_group_backend: str
    """The backend for ``init_process_group``: collectives of CPU tensors and objects work on every platform."""
    ray_resource: str | None = None  # the resource under which Ray counts these devices; None where Ray knows none
    pin_memory: bool = True  # True if page-locked host memory exists and speeds copies to the device

    def _accelerator(self) -> Any:
        """Torch's module of the device type (``torch.cuda``, ``torch.npu``); None for the CPU, which has no state that
        could be asked for or set."""
        if self.device_type == "cpu":
            return None
        import torch

        return getattr(torch, self.device_type)

    def device_count(self) -> int:
        """Devices that this process can use; 1 on CPU."""
        module = self._accelerator()
        return 1 if module is None else int(module.device_count())

    def device(self, index: int = 0) -> torch.device:
        """The ``index``-th visible device."""
        import torch

        return torch.device(self.device_type) if self.device_type == "cpu" else torch.device(self.device_type, index)

    def device_name(self, index: int = 0) -> str:
        """The maker's name of the ``index``-th visible device."""
        module = self._accelerator()
        if module is None:
            return platform.processor() or platform.machine()
        return str(module.get_device_name(index))

    def free_memory(self, index: int = 0) -> tuple[int, int]:
        """Bytes that are free on the ``index``-th visible device, whoever holds the others, and all of them.

        On CPU those of the host, with caches that it would give up; systems other than Linux do not say what is free.
        """
        if (module := self._accelerator()) is not None:
            free, total = module.mem_get_info(index)
            return int(free), int(total)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return (_kibibytes(_MEMINFO, "MemAvailable")[0], total) if _MEMINFO.exists() else (total, total)

    def set_device(self, index: int = 0) -> None:
        """Make the ``index``-th visible device the current one of this thread; every slot of a CPU is the same."""
        if (module := self._accelerator()) is not None:
            module.set_device(index)

    def synchronize(self) -> None:
        """Wait until the current device has done what it was given; a CPU has when the call returns."""
        if (module := self._accelerator()) is not None:
            module.synchronize()

    def empty_cache(self) -> None:
        """Give memory that the allocator keeps in reserve back to the device; on CPU free pages of the C heap back to
        the system, where the C library can (glibc)."""
        if (module := self._accelerator()) is not None:
            module.empty_cache()
        elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)

    def memory_stats(self) -> dict[str, int]:
        """Bytes: ``used`` now and ``peak`` since :meth:`reset_peak_memory` (or the start of the process).

        On CPU the resident set of this process; on accelerators what torch allocated on the current device, with
        ``reserved`` and ``peak_reserved`` (the allocator's share) and ``total`` (the device) in addition.
        """
        if (module := self._accelerator()) is not None:
            return {
                "used": module.memory_allocated(),
                "peak": module.max_memory_allocated(),
                "reserved": module.memory_reserved(),
                "peak_reserved": module.max_memory_reserved(),
                "total": module.mem_get_info()[1],
            }
        if _STATUS.exists():
            used, peak = _kibibytes(_STATUS, "VmRSS", "VmHWM")
        else:
            # getrusage counts bytes on macOS, kibibytes elsewhere.
            unit = 1 if sys.platform == "darwin" else 1024
            used = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"used": used, "peak": peak}

    def reset_peak_memory(self) -> None:
        """Begin a new peak at what is used now.

        Linux starts a new high-water mark on writing 5 to ``clear_refs`` (proc(5)); where a container's sandbox has no
        such file the peak stays.
        """
        if (module := self._accelerator()) is not None:
            module.reset_peak_memory_stats()
        elif _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")


def _kibibytes(file: Path, *names: str) -> list[int]:
    fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 for name in names]


PLATFORM_ENV = "ROLL_PLATFORM"
"""Set to a platform's name to skip detection (``cpu`` on a machine whose accelerators are to be left alone)."""

CPU = Platform("cpu", "cpu", "gloo", "gloo", pin_memory=False)
PLATFORMS: dict[str, Platform] = {
    one.name: one
    for one in (
        CPU,
        Platform("cuda", "cuda", "nccl", "cpu:gloo,cuda:nccl", "GPU"),
        # torch's ROCm build answers to the CUDA names, RCCL to NCCL's.
        Platform("rocm", "cuda", "nccl", "cpu:gloo,cuda:nccl", "GPU"),
        # Through the package torch_npu.
        Platform("npu", "npu", "hccl", "cpu:gloo,npu:hccl", "NPU"),
    )
}

_CUDA_OR_ROCM_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
_NPU_FILES = ("/dev/davinci[0-9]*",)
# Files with a quota and its period (cgroup v2, v1); "max" or -1: no quota.
_CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


@functools.cache
def current_platform() -> Platform:
    """The platform of this process, found once.

    Device files are looked for first, so that a machine without accelerators answers without importing torch; where
    there are some, torch has the last word (a CPU build of torch, or an empty visible-devices variable, means CPU).
    Raises ``ValueError``: ``ROLL_PLATFORM`` names no platform.
    """
    name = os.environ.get(PLATFORM_ENV)
    if name is not None and name not in PLATFORMS:
        raise ValueError(f"{PLATFORM_ENV}={name!r}: must be one of {', '.join(PLATFORMS)}; unset it to detect")
    if name is not None:
        return PLATFORMS[name]
    if any(map(glob.glob, _CUDA_OR_ROCM_FILES)):
        import torch

        if torch.cuda.is_available():
            return PLATFORMS["rocm" if torch.version.hip else "cuda"]
    has_npu = any(map(glob.glob, _NPU_FILES)) and importlib.util.find_spec("torch_npu") is not None
    return PLATFORMS["npu"] if has_npu and importlib.import_module("torch_npu").npu.is_available() else CPU


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, and in a container no more than its share (cgroup
    v2 ``cpu.max`` or v1 ``cpu.cfs_quota_us``)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _CPU_QUOTAS:
        try:
            quota, period = " ".join(Path(file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def use_cpu_below(devices: int) -> None:
    """Choose the CPU for this process, and those that it starts, where the machine has accelerators but fewer than
    ``devices`` (an example for two logical devices on a machine with one GPU). ``ROLL_PLATFORM`` has precedence."""
    found = current_platform()
    if PLATFORM_ENV in os.environ or found is CPU or found.device_count() >= devices:
        return
    logger.warning(
        "the CPU is used: this example has %d devices, and this machine's platform %s has %d. To use it, set %s=%s and "
        "lower num_gpus_per_node and every device_mapping",
        *(devices, found.name, found.device_count(), PLATFORM_ENV, found.name),
    )
    os.environ[PLATFORM_ENV] = CPU.name
    current_platform.cache_clear()
