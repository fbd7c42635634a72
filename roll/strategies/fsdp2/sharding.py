"""Turning modules into FSDP2 units: in which types they compute and reduce, and what waits in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from roll.config.roles import ModelArguments
from roll.config.strategies.registry import Fsdp2StrategyConfig
from roll.models.build import DTYPES
from roll.models.log_probs import ResponseModel, output_matrices
from roll.platforms import current_platform
from roll.strategies.fsdp_units import compute_dtype, wrapped_units


def shard_model(
    model: ResponseModel, mesh: DeviceMesh, args: ModelArguments, config: Fsdp2StrategyConfig
) -> FSDPModule | None:
    """Turn ``model`` into an FSDP root over ``mesh``, in place; gradients become plain sums over all ranks.

    Returns:
        The root, or None for one rank in float32 without offload: nothing is sharded, cast or moved there, so the
        module stays as it is and pays for no hooks.

    Raises:
        ValueError: a wrap policy that names no module of this model.
    """
    if mesh.size() == 1 and compute_dtype(args, config) is torch.float32 and not config.offload_policy:
        return None
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype(args, config), reduce_dtype=DTYPES[config.reduce_dtype]
        ),
    }
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=current_platform().pin_memory)
    for unit in wrapped_units(model, config.wrap_policy):
        fully_shard(unit, **options)
    if config.wrap_policy.wrap_lm_output:
        for head in output_matrices(model.language_model):
            register_fsdp_forward_method(head, "log_probs")
    root = fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            # The loss is already divided by global denominators. gloo has no reduction with a factor: a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
