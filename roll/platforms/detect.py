"""Which platform this process runs on."""

from __future__ import annotations

import functools
import glob
import importlib.util
import os

from roll.platforms.accelerator import CudaPlatform, NpuPlatform, RocmPlatform
from roll.platforms.base import Platform
from roll.platforms.cpu import CpuPlatform

PLATFORM_ENV = "ROLL_PLATFORM"
"""Set to a platform's name to skip detection (``cpu`` on a machine whose accelerators are to be left alone)."""

PLATFORMS: dict[str, type[Platform]] = {
    platform.name: platform for platform in (CpuPlatform, CudaPlatform, RocmPlatform, NpuPlatform)
}

_CUDA_OR_ROCM_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
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
