"""``weight_sync``: how the trainer's weights get to the engines. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.config.lora import adapter_rank, uses_lora
from roll.config.reading.fields import setting
from roll.config.strategies.vllm import VLLM_LORA_RANKS

if TYPE_CHECKING:
    from roll.config.checks.roles import Checks
    from roll.config.rlvr import RLVRConfig

UpdateMode = Literal["full", "trained", "delta"]
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


UPDATED_IN_PARTS = {"hf_infer": ("trained", "delta"), "sglang": ("trained",)}
"""Modes beside ``full``, by engine: it takes some of a model's tensors by themselves, or some of their elements."""


def update_mode(options: WeightSyncConfig, engine: str) -> UpdateMode:
    """The mode of updates to an engine of this strategy."""
    if options.mode != "auto":
        return options.mode
    return "trained" if engine == "hf_infer" or options.lora == "adapter" else "full"


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


def check_weight_sync(config: RLVRConfig, checks: Checks) -> None:
    """Mistakes that do not depend on the hosts."""
    options = config.weight_sync
    if options.directory is not None and options.transport != "safetensors":
        checks.note("weight_sync.directory", f"has no effect: weight_sync.transport is {options.transport}")
    if options.transport == "cuda_ipc":
        _check_cuda_ipc(config, checks)
    engine = config.actor_infer.strategy_args.strategy_name
    if options.lora == "adapter":
        _check_adapter(config, checks)
    elif options.mode not in ("auto", "full", *UPDATED_IN_PARTS.get(engine, ())):
        least = "tensors" if engine in UPDATED_IN_PARTS else "layers"
        others = ", ".join(name for name, modes in UPDATED_IN_PARTS.items() if options.mode in modes)
        rule = f"{engine} takes whole {least} only; engines that take parts: {others}"
        checks.add("weight_sync.mode", options.mode, rule, "full")
    sleep_level = config.actor_infer.strategy_args.strategy_config.get("sleep_level")
    if sleep_level == 2 and update_mode(options, engine) == "trained":
        rule = "drops weights that updates do not bring back with "
        rule += "weight_sync.lora: adapter" if options.lora == "adapter" else "weight_sync.mode: trained"
        checks.add("actor_infer.strategy_args.strategy_config.sleep_level", sleep_level, rule, 1)


def _check_adapter(config: RLVRConfig, checks: Checks) -> None:
    options = config.weight_sync
    if not uses_lora(config.actor_train.model_args):
        rule = "actor_train has no adapters (model_args.lora_target)"
        checks.add("weight_sync.lora", options.lora, rule, "merged")
    elif options.mode in ("full", "delta"):
        rule = "with lora: adapter, A and B are sent whole and nothing else changes"
        checks.add("weight_sync.mode", options.mode, rule, "trained")
    elif config.actor_infer.strategy_args.strategy_name == "vllm":
        _check_vllm_adapter(config, checks)


def _check_vllm_adapter(config: RLVRConfig, checks: Checks) -> None:
    """vLLM computes with the adapter itself, and must be told its rank when it starts."""
    args = config.actor_train.model_args
    if args.additional_target:
        rule = "goes with weight_sync.lora: merged: of a policy in vLLM only the adapter is exchanged"
        checks.add("actor_train.model_args.additional_target", args.additional_target, rule, "~")
    key, rank = "actor_train.model_args.lora_rank", adapter_rank(args)
    on_hub = args.adapter_name_or_path is not None and not Path(args.adapter_name_or_path).expanduser().is_dir()
    if on_hub and not checks.written(key):
        checks.missing(key, "is needed: the rank of adapter_name_or_path, for which vLLM makes room when it starts", 32)
    elif rank > VLLM_LORA_RANKS[-1]:
        rule = f"must be at most {VLLM_LORA_RANKS[-1]} for vLLM; with weight_sync.lora: merged it may be more"
        checks.add(key, rank, rule, VLLM_LORA_RANKS[-1])


def _check_cuda_ipc(config: RLVRConfig, checks: Checks) -> None:
    sender = (config.actor_train.device_mapping or [0])[0]
    elsewhere = sorted(set(config.actor_infer.device_mapping or []) - {sender})
    if elsewhere:
        rule = (
            f"needs every engine on the GPU of actor_train's first rank, device {sender}: "
            f"actor_infer.device_mapping has {elsewhere}, whose processes do not see that GPU"
        )
        checks.add("weight_sync.transport", "cuda_ipc", rule, "object_store")
