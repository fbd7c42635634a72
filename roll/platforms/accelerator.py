"""Accelerators: one class for torch's device modules, and the names in which they differ."""

from __future__ import annotations

from typing import Any, ClassVar

from roll.platforms.base import Platform


class AcceleratorPlatform(Platform):
    """A device type that torch drives through a module of its own (``torch.cuda``, ``torch.npu``)."""

    pin_memory: ClassVar[bool] = True

    @property
    def _module(self) -> Any:
        import torch

        return getattr(torch, self.device_type)

    def device_count(self) -> int:
        return int(self._module.device_count())

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
