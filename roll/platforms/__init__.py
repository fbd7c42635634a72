"""What a kind of device is called and can do: CPU, CUDA, ROCm, Ascend NPU.

Nothing here imports torch until a device is really asked for something, so ``current_platform()`` is cheap on a
machine without accelerators.
"""

from roll.platforms.base import Platform
from roll.platforms.detect import PLATFORM_ENV, current_platform

__all__ = ["PLATFORM_ENV", "Platform", "current_platform"]
