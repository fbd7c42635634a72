"""Variables that the workers of a run are given. Light to import: what starts before Ray needs them too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from roll.distributed.guard import MARK_ENV
from roll.platforms import current_platform, usable_cores

LOG_DIR_ENV = "ROLL_LOG_DIR"
"""The folder of worker logs; without it they are in Ray's session folder and are removed with it."""

WORKER_DEFAULTS = {
    # Several workers share the host's cores: threads that spin while they wait take them from one another.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}
_MOST_THREADS = 16
"""Most threads of a worker on a CPU host: matrices of models that a CPU can train are too small for more."""

RAY_SETTINGS = {
    # Actors request no devices from Ray (roles may share them), and Ray would hide all devices from such an actor.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def worker_threads(num_devices: int) -> int:
    """Threads of each worker: on a CPU host the cores of its device (roles on one device compute in turns); else 1."""
    if current_platform().device_type != "cpu":
        return 1
    return max(1, min(usable_cores() // num_devices, _MOST_THREADS))


def absent_here(num_devices: int, mark: str) -> dict[str, str]:
    """Variables of the workers that this process's environment does not set."""
    threads = {"OMP_NUM_THREADS": str(worker_threads(num_devices))}
    wanted = {**WORKER_DEFAULTS, **threads, **RAY_SETTINGS, MARK_ENV: mark}
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the length of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
