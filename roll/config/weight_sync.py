"""``weight_sync``: how the trainer's weights get to the engines. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from roll.config.reading.fields import setting
from roll.config.strategies.base import UpdateMode as UpdateMode
from roll.config.strategies.registry import backend_of

TransportName = Literal["shared_memory", "object_store", "broadcast", "safetensors", "cuda_ipc"]


@dataclass(frozen=True)
class WeightSyncConfig:
    """``weight_sync``: how the trainer's weights get to the engines."""

    transport: Literal["auto", "shared_memory", "object_store", "broadcast", "safetensors", "cuda_ipc"] = "auto"
    """``shared_memory``: memory that the processes of a host share; to engines on other hosts than the sender
    ``object_store`` takes its place. ``object_store``: Ray's, which carries weights to other hosts. ``broadcast``: a
    process group of the sending rank and the engines (NCCL on GPUs that they do not share, gloo on CPU).
    ``safetensors``: files in ``directory``. ``cuda_ipc``: the trainer's GPU memory, read by an engine on that GPU.
    ``auto``: ``broadcast`` between GPUs that the roles do not share, ``shared_memory`` everywhere else."""
    mode: Literal["auto", "full", "trained", "delta"] = "auto"
    """What is sent once the engines hold everything: ``full``: everything again; ``trained``: without the parameters
    that training never changes; ``delta``: of those that it changes, the elements that are not what they were.
    ``auto``: ``trained`` to ``hf_infer``, and ``full`` to ``vllm`` and ``sglang``, ``lora: adapter`` aside. ``vllm``
    takes whole layers only, ``sglang`` whole tensors."""
    lora: Literal["merged", "adapter"] = "merged"
    """A LoRA model's updates: ``merged``: the whole weights that the adapters are merged into; ``adapter``: A and B:
    ``hf_infer`` and ``sglang`` merge them themselves, into a copy of the base that they keep; ``vllm`` computes with
    both."""
    directory: str | None = setting(None, example="/shared/weights")
    """Folder that trainer and engines see, for ``safetensors``; null: ``weight_sync`` under ``output_dir``. What an
    update writes there is deleted when the engines have it."""


def update_mode(options: WeightSyncConfig, engine: str) -> UpdateMode:
    """The mode of updates to an engine of this strategy."""
    if options.mode != "auto":
        return options.mode
    return "trained" if options.lora == "adapter" else backend_of(engine).updates[0]


def transport_name(
    options: WeightSyncConfig, train_devices: Collection[int], infer_devices: Collection[int], device_type: str
) -> TransportName:
    """The transport that a run uses.

    Args:
        device_type: ``cpu``, ``cuda`` ...: what a device id stands for on these hosts.
    """
    if options.transport != "auto":
        return options.transport
    apart = set(train_devices).isdisjoint(infer_devices)
    return "broadcast" if apart and device_type != "cpu" else "shared_memory"
