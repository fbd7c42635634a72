"""A host without accelerators: devices are logical slots, collectives run on gloo."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from typing import ClassVar

from roll.platforms.base import Platform

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
        """Linux starts a new high-water mark on writing 5 to ``clear_refs`` (proc(5)); elsewhere the peak stays."""
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")


def _kibibytes(field: str) -> int:
    return int(field.split()[0]) * 1024
