"""The interface of a platform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of device, as seen from the calling process.

    A worker sees only its own devices (the visible-devices variable is set before torch is imported), so index 0 is
    always the worker's first device.
    """

    name: ClassVar[str]
    """``cpu``, ``cuda``, ``rocm`` or ``npu``."""
    device_type: ClassVar[str]
    """What ``torch.device`` calls it; ROCm devices are ``cuda`` to torch."""
    collective_backend: ClassVar[str]
    """The ``torch.distributed`` backend for tensors on these devices."""
    process_group_backend: ClassVar[str]
    """What ``init_process_group`` is given: collectives of CPU tensors and objects work on every platform."""
    visible_devices_env: ClassVar[str | None]
    """The variable that selects a process's devices; None where devices are logical slots."""
    ray_resource: ClassVar[str | None]
    """The resource under which Ray counts these devices; None where Ray knows none."""
    pin_memory: ClassVar[bool]
    """Whether page-locked host memory exists and speeds copies to the device."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process can use; 1 on CPU."""

    def device(self, index: int = 0) -> torch.device:
        """The ``index``-th visible device."""
        import torch

        return torch.device(self.device_type) if self.device_type == "cpu" else torch.device(self.device_type, index)

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
        ``reserved`` and ``peak_reserved`` (the allocator's share) and ``total`` (the device) beside it.
        """

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Begin a new peak at what is used now."""
