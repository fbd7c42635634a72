"""How a run's weights are synchronised, and the sending end that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll.config.plan.plan import Plan
from roll.config.roles import GenerationWorkerConfig
from roll.config.run import RunConfig
from roll.config.weight_sync import TransportName, UpdateMode, WeightSyncConfig, transport_name, update_mode
from roll.platforms import current_platform
from roll.weight_sync.transports.base import Sender

MIB = 2**20
_PIPELINED_BYTES = 64 * MIB
"""Buckets from this size on are taken over in 20 ms or more, beside which a message to an engine costs little."""


@dataclass(frozen=True)
class SyncOptions:
    """What every update of a run has in common."""

    buffer_bytes: int
    """Most bytes of a buffer for weights on their way; an update uses up to two at a time."""
    deadline: float
    """Seconds for one whole exchange."""
    patience: float
    """Seconds that an engine may take over one message before it counts as lost."""
    transport: TransportName = "object_store"
    directory: str | None = None
    """Of ``safetensors``."""
    mode: UpdateMode = "full"
    adapters_apart: bool = False

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of one bucket. A transport that holds two beside the one that is being gathered gets smaller ones:
        also because nothing overlaps while the first is gathered and the last is taken over."""
        if self.transport in ("broadcast", "cuda_ipc"):
            return self.buffer_bytes
        return max(1, min(self.buffer_bytes // 2, _PIPELINED_BYTES))


def sync_options(run: RunConfig, keys: WeightSyncConfig, engines: GenerationWorkerConfig, plan: Plan) -> SyncOptions:
    """Those of a run on hosts like this one."""
    train, infer = (plan.roles[role].device_mapping for role in ("actor_train", "actor_infer"))
    return SyncOptions(
        buffer_bytes=run.model_update_buffer_size_mb * MIB,
        deadline=run.rpc_timeout,
        patience=min(engines.engine_timeout, run.rpc_timeout),
        transport=transport_name(keys, train, infer, current_platform().device_type),
        directory=keys.directory or str(plan.output_dir / "weight_sync"),
        mode=update_mode(keys, engines.strategy_args.strategy_name),
        adapters_apart=keys.lora == "adapter",
    )


def build_transport(name: TransportName, directory: str | None, backend: str, host: str) -> Sender:
    """The sending rank's end of a transport.

    Args:
        directory: of ``safetensors``.
        backend: the collective backend of its device.
        host: its address.
    """
    match name:
        case "shared_memory":
            from roll.weight_sync.transports.shared_memory import SharedMemorySender

            return SharedMemorySender()
        case "object_store":
            from roll.weight_sync.transports.object_store import ObjectStoreSender

            return ObjectStoreSender()
        case "broadcast":
            from roll.weight_sync.transports.broadcast import BroadcastSender

            return BroadcastSender(backend, host)
        case "safetensors":
            from roll.weight_sync.transports.files import FileSender

            assert directory is not None, "safetensors needs a directory"
            return FileSender(Path(directory))
        case "cuda_ipc":
            from roll.weight_sync.transports.cuda_ipc import CudaIpcSender

            return CudaIpcSender()
