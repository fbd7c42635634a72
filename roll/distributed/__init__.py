"""Ray: starting and joining it, devices, clusters of workers, calls with deadlines.

Names are imported on first use: a worker that handles no tensors (a reward) must not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.distributed.calls import DriverLoop, PendingCall, wait_any
    from roll.distributed.cluster import Cluster
    from roll.distributed.failures import DeadlineExceeded, RemoteError, WorkerDied, WorkerFailed
    from roll.distributed.resources import ResourceManager
    from roll.distributed.runtime import RayRuntime, ray_runtime
    from roll.distributed.signals import Interrupted
    from roll.distributed.worker import Dispatch, Worker, WorkerContext, register

_NAMES_OF = {
    "calls": ("DriverLoop", "PendingCall", "wait_any"),
    "cluster": ("Cluster",),
    "failures": ("DeadlineExceeded", "RemoteError", "WorkerDied", "WorkerFailed"),
    "resources": ("ResourceManager",),
    "runtime": ("RayRuntime", "ray_runtime"),
    "signals": ("Interrupted",),
    "worker": ("Dispatch", "Worker", "WorkerContext", "register"),
}

__all__ = [
    "Cluster",
    "DeadlineExceeded",
    "Dispatch",
    "DriverLoop",
    "Interrupted",
    "PendingCall",
    "RayRuntime",
    "RemoteError",
    "ResourceManager",
    "Worker",
    "WorkerContext",
    "WorkerDied",
    "WorkerFailed",
    "ray_runtime",
    "register",
    "wait_any",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_OF.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
