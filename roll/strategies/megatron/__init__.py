"""Megatron Core: a model parallel over tensor-, pipeline-, context- and data-parallel ranks.

Raises:
    ImportError: on import, where megatron-core is not installed.
"""

import os
import warnings
from importlib import import_module

from roll.config.installation import install_command

# Megatron overlaps matrix products with the tensor-parallel collectives that it queued before them; they must start in
# that order. CUDA reads this when the process first uses a device.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Megatron Core warns of missing fused kernels that are not used here, and calls collectives by their
# names before PyTorch 2.13; on every rank, at every start.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

try:
    with warnings.catch_warnings(action="ignore"):
        for name in ("models.gpt", "optimizer", "pipeline_parallel"):
            import_module(f"megatron.core.{name}")
except ImportError as error:
    raise ImportError(
        "strategy_args.strategy_name: megatron_train and megatron_infer need megatron-core; install it with "
        f"{install_command('megatron')}"
    ) from error

from roll.strategies.megatron import cpu_compat  # noqa: E402 (Megatron comes first)

cpu_compat.install()

from roll.strategies.megatron.strategy import MegatronStrategy  # noqa: E402 (needs what was installed)

__all__ = ["MegatronStrategy"]
