"""The JSON that DeepSpeed is started with, from a role's configuration."""

from __future__ import annotations

import sys
from typing import Any

from roll.config.strategies.deepspeed import ZeroPlan, numbers
from roll.config.strategies.registry import DeepSpeedStrategyConfig
from roll.strategies.loss_scale import INITIAL_SCALE

PASSED_THROUGH = ("activation_checkpointing", "aio", "comms_logger", "flops_profiler", "communication_data_type")


def engine_options(
    config: DeepSpeedStrategyConfig,
    plan: ZeroPlan,
    *,
    dtype: str,
    pin_memory: bool,
    micro_batch_rows: int,
    fp32_accumulation: bool = False,
    max_grad_norm: float | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Batch sizes are nominal: the strategy says itself which micro-batch is the last of an optimizer step, because their
    number may change from step to step.  It is above 1 because DeepSpeed leaves accumulation out for 1.

    Args:
        dtype: ``bf16``, ``fp16`` or ``fp32``, the compute type.
        pin_memory: whether host memory can be page-locked.
    """
    options: dict[str, Any] = numbers(config.deepspeed_config)
    for name in PASSED_THROUGH:
        value = numbers(getattr(config, name))
        if value:
            options[name] = value
    options |= {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": float(max_grad_norm or 0.0),
        "steps_per_print": config.steps_per_print or sys.maxsize,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        "zero_optimization": _zero_section(config, plan, pin_memory),
        # AdamW's fused CPU kernel comes with torch: nothing to compile for offload.
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        options["bf16"] = {"check_grad_overflow": True, **numbers(config.bf16), "enabled": True}
    if dtype == "fp16":
        # A scale that DeepSpeed does not move: the strategy does, as under every other backend.
        options["fp16"] = {"enabled": True, "loss_scale": INITIAL_SCALE}
    accumulation = {"grad_accum_dtype": "fp32"} if fp32_accumulation and plan.stage > 0 and dtype == "bf16" else {}
    data_types = accumulation | numbers(config.data_types)
    if data_types:
        options["data_types"] = data_types
    return options


def _zero_section(config: DeepSpeedStrategyConfig, plan: ZeroPlan, pin_memory: bool) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for name, device in (("offload_optimizer", plan.offload_optimizer), ("offload_param", plan.offload_param)):
        if device != "none":
            section[name] = {"device": device, "pin_memory": pin_memory}
            if device == "nvme":
                section[name]["nvme_path"] = config.nvme_path
    section |= numbers(config.zero_optimization)
    for name in ("offload_optimizer", "offload_param"):
        if not pin_memory and isinstance(section.get(name), dict):
            section[name] = {**section[name], "pin_memory": False}
    return section | {"stage": plan.stage}
