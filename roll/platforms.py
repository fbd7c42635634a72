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
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Platform(ABC):
    """One kind of device, as seen from the calling process.

    A worker sees only its own devices (the visible-devices variable is set before torch is imported), so index 0 is
    always the worker's first device.
    """

    name: ClassVar[str]
    """``cpu``, ``cuda``, ``rocm`` or ``npu``."""
    device_type: ClassVar[str]
    """Its name for ``torch.device``; ROCm devices are ``cuda`` to torch."""
    collective_backend: ClassVar[str]
    """The ``torch.distributed`` backend for tensors on these devices."""
    process_group_backend: ClassVar[str]
    """The backend for ``init_process_group``: collectives of CPU tensors and objects work on every platform."""
    visible_devices_env: ClassVar[str | None]
    """The variable that selects a process's devices; None where devices are logical slots."""
    ray_resource: ClassVar[str | None]
    """The resource under which Ray counts these devices; None where Ray knows none."""
    pin_memory: ClassVar[bool]
    """True if page-locked host memory exists and speeds copies to the device."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process can use; 1 on CPU."""

    def device(self, index: int = 0) -> torch.device:
        """The ``index``-th visible device."""
        import torch

        return torch.device(self.device_type) if self.device_type == "cpu" else torch.device(self.device_type, index)

    @abstractmethod
    def device_name(self, index: int = 0) -> str:
        """The maker's name of the ``index``-th visible device."""

    @abstractmethod
    def free_memory(self, index: int = 0) -> tuple[int, int]:
        """Bytes that are free on the ``index``-th visible device, whoever holds the others, and all of them."""

    @abstractmethod
    def set_device(self, index: int = 0) -> None:
        """Make the ``index``-th visible device the current one of this thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the current device has done what it was given."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that the allocator keeps in reserve back to the device."""

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """Bytes: ``used`` now and ``peak`` since :meth:`reset_peak_memory` (or the start of the process).

        On CPU the resident set of this process; on accelerators what torch allocated on the current device, with
        ``reserved`` and ``peak_reserved`` (the allocator's share) and ``total`` (the device) in addition.
        """

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Begin a new peak at what is used now."""


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"
    process_group_backend: ClassVar[str] = "gloo"
    visible_devices_env: ClassVar[str | None] = None
    ray_resource: ClassVar[str | None] = None
    pin_memory: ClassVar[bool] = False

    def device_count(self) -> int:
        return 1

    def device_name(self, index: int = 0) -> str:
        return platform.processor() or platform.machine()

    def free_memory(self, index: int = 0) -> tuple[int, int]:
        """Of the host, with caches that it would give up; systems other than Linux do not say what is free."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not _MEMINFO.exists():
            return total, total
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return _kibibytes(fields["MemAvailable"]), total

    def set_device(self, index: int = 0) -> None:
        """Nothing to choose: every logical slot is the same processor."""

    def synchronize(self) -> None:
        """Work on the CPU is done when the call returns."""

    def empty_cache(self) -> None:
        """Hand free pages of the C heap back to the system, where the C library can (glibc)."""
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    def memory_stats(self) -> dict[str, int]:
        if not _STATUS.exists():
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            return {"used": peak, "peak": peak}
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return {"used": _kibibytes(fields["VmRSS"]), "peak": _kibibytes(fields["VmHWM"])}

    def reset_peak_memory(self) -> None:
        """Linux starts a new high-water mark on writing 5 to ``clear_refs`` (proc(5)); where a container's sandbox has
        no such file the peak stays."""
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")


def _kibibytes(field: str) -> int:
    return int(field.split()[0]) * 1024


class AcceleratorPlatform(Platform):
    """A device type that torch drives through a module of its own (``torch.cuda``, ``torch.npu``)."""

    pin_memory: ClassVar[bool] = True

    @property
    def _module(self) -> Any:
        import torch

        return getattr(torch, self.device_type)

    def device_count(self) -> int:
        return int(self._module.device_count())

    def device_name(self, index: int = 0) -> str:
        return str(self._module.get_device_name(index))

    def free_memory(self, index: int = 0) -> tuple[int, int]:
        free, total = self._module.mem_get_info(index)
        return int(free), int(total)

    def set_device(self, index: int = 0) -> None:
        self._module.set_device(index)

    def synchronize(self) -> None:
        self._module.synchronize()

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def memory_stats(self) -> dict[str, int]:
        module = self._module
        return {
            "used": module.memory_allocated(),
            "peak": module.max_memory_allocated(),
            "reserved": module.memory_reserved(),
            "peak_reserved": module.max_memory_reserved(),
            "total": module.mem_get_info()[1],
        }

    def reset_peak_memory(self) -> None:
        self._module.reset_peak_memory_stats()


class CudaPlatform(AcceleratorPlatform):
    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    process_group_backend: ClassVar[str] = "cpu:gloo,cuda:nccl"
    visible_devices_env: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    ray_resource: ClassVar[str | None] = "GPU"


class RocmPlatform(CudaPlatform):
    """AMD devices: torch's ROCm build answers to the CUDA names, RCCL to NCCL's."""

    name: ClassVar[str] = "rocm"
    visible_devices_env: ClassVar[str | None] = "HIP_VISIBLE_DEVICES"


class NpuPlatform(AcceleratorPlatform):
    """Ascend devices, through the ``torch_npu`` package."""

    name: ClassVar[str] = "npu"
    device_type: ClassVar[str] = "npu"
    collective_backend: ClassVar[str] = "hccl"
    process_group_backend: ClassVar[str] = "cpu:gloo,npu:hccl"
    visible_devices_env: ClassVar[str | None] = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource: ClassVar[str | None] = "NPU"


PLATFORM_ENV = "ROLL_PLATFORM"
"""Set to a platform's name to skip detection (``cpu`` on a machine whose accelerators are to be left alone)."""

PLATFORMS: dict[str, type[Platform]] = {
    platform.name: platform for platform in (CpuPlatform, CudaPlatform, RocmPlatform, NpuPlatform)
}

_CUDA_OR_ROCM_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
_CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with a quota and its period; "max" or -1: no quota."""
_NPU_FILES = ("/dev/davinci[0-9]*",)


@functools.cache
def current_platform() -> Platform:
    """The platform of this process, found once.

    Device files are looked for first, so that a machine without accelerators answers without importing torch; where
    there are some, torch has the last word (a CPU build of torch, or an empty visible-devices variable, means CPU).

    Raises:
        ValueError: ``ROLL_PLATFORM`` names no platform.
    """
    name = os.environ.get(PLATFORM_ENV)
    if name is None:
        return _detect()
    if name not in PLATFORMS:
        raise ValueError(f"{PLATFORM_ENV}={name!r}: must be one of {', '.join(PLATFORMS)}; unset it to detect")
    return PLATFORMS[name]()


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
    if PLATFORM_ENV in os.environ or isinstance(found, CpuPlatform) or found.device_count() >= devices:
        return
    logger.warning(
        "the CPU is used: this example has %d devices, and this machine's platform %s has %d. To use it, set %s=%s and "
        "lower num_gpus_per_node and every device_mapping",
        *(devices, found.name, found.device_count(), PLATFORM_ENV, found.name),
    )
    os.environ[PLATFORM_ENV] = CpuPlatform.name
    current_platform.cache_clear()


def _detect() -> Platform:
    if _any_file(_CUDA_OR_ROCM_FILES):
        import torch

        if torch.cuda.is_available():
            return RocmPlatform() if torch.version.hip else CudaPlatform()
    if _any_file(_NPU_FILES) and importlib.util.find_spec("torch_npu") is not None:
        module = importlib.import_module("torch_npu")
        if module.npu.is_available():
            return NpuPlatform()
    return CpuPlatform()


def _any_file(patterns: tuple[str, ...]) -> bool:
    return any(glob.glob(pattern) for pattern in patterns)
