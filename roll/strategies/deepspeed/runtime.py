"""Importing DeepSpeed and joining it to the process group that is there already."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

from roll.platforms import Platform

logger = logging.getLogger(__name__)


def import_deepspeed(platform: Platform) -> Any:
    """The ``deepspeed`` module, quiet, for the devices of ``platform``.

    Raises:
        ImportError: DeepSpeed is not installed; the message names the extra.
    """
    if platform.device_type == "cpu":
        # Read while the package is imported; without it DeepSpeed guesses from whatever tools lie on the host.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its collectives call torch's by names that torch 2.13 has renamed, one warning a call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            "the deepspeed strategies need DeepSpeed, an optional package: pip install 'roll-rl[deepspeed]'"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def join_process_group(deepspeed: Any, platform: Platform) -> None:
    """Collective. Let DeepSpeed use torch's default process group, which must exist."""
    # DeepSpeed reads the index of this rank's device here; a worker sees only its own.
    os.environ.setdefault("LOCAL_RANK", "0")
    if platform.device_type == "cpu":
        # A shared-memory reduction for inference kernels, compiled for most of a minute on first use (and not at all on
        # a host without a C++ compiler). Nothing here calls it.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=platform.collective_backend, auto_mpi_discovery=False, verbose=False)
