"""What an engine must know of the policy's LoRA adapter before it starts."""

from __future__ import annotations

from dataclasses import replace

from roll.config.lora import adapter_rank
from roll.config.rlvr import RLVRConfig
from roll.config.roles import WorkerConfig
from roll.config.vllm import adapter_engine_args


def with_adapter(role: WorkerConfig, config: RLVRConfig) -> WorkerConfig:
    """The engines' section, with room for the adapter that the trainer will send by itself, where vLLM needs that."""
    arguments = role.strategy_args
    if config.weight_sync.lora != "adapter" or arguments.strategy_name != "vllm":
        return role
    needed = adapter_engine_args(adapter_rank(config.actor_train.model_args))
    engine_args = needed | dict(arguments.strategy_config.get("engine_args") or {})
    options = {**arguments.strategy_config, "engine_args": engine_args}
    return replace(role, strategy_args=replace(arguments, strategy_config=options))
