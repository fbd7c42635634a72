"""Putting a model under ``FullyShardedDataParallel``, and freeing what that keeps gathered."""

from __future__ import annotations

import warnings
from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

# Of the runtime: torch has no public way to free what a forward pass without a backward pass leaves gathered.
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy

from roll.config.roles import ModelArguments
from roll.config.strategies.registry import Fsdp1StrategyConfig
from roll.models.build import DTYPES
from roll.models.log_probs import ResponseModel, output_matrices, run_head_when_called
from roll.platforms import current_platform
from roll.strategies.fsdp_units import compute_dtype, wrapped_units

WRAPPER = "_fsdp_wrapped_module."
"""What the wrapper of a module puts into the names of its parameters."""


def wrap_model(
    model: ResponseModel, mesh: DeviceMesh, args: ModelArguments, config: Fsdp1StrategyConfig
) -> FullyShardedDataParallel | None:
    """Wrap ``model`` and its units over ``mesh``; gradients become means over all ranks.

    | mesh             | ``reshard_after_forward: true`` | ``false``            |
    |------------------|---------------------------------|----------------------|
    | ``(1,)``         | ``NO_SHARD``                    | ``NO_SHARD``         |
    | ``(fsdp,)``      | ``FULL_SHARD``                  | ``SHARD_GRAD_OP``    |
    | ``(ddp, fsdp)``  | ``HYBRID_SHARD``                | ``_HYBRID_SHARD_ZERO2`` |

    Returns:
        The root, or None for one rank in float32 without offload: nothing is sharded, cast or moved there.

    Raises:
        ValueError: a wrap policy that names no module of this model.
    """
    device = current_platform().device()
    # On a CPU host everything is in host memory as it is.
    offload = config.offload_policy and device.type != "cpu"
    dtype = compute_dtype(args, config)
    if mesh.size() == 1 and dtype is torch.float32 and not offload:
        model.to(device)
        return None
    units = {id(unit) for unit in wrapped_units(model, config.wrap_policy)}
    head = model.language_model.get_output_embeddings()
    if config.wrap_policy.wrap_lm_output:
        if len(output_matrices(model.language_model)) > 1:
            raise ValueError(
                "strategy_config.wrap_policy.wrap_lm_output: does not go with additional_target (the output matrix "
                "trained in full beside adapters) under FSDP1; set it to false"
            )
        run_head_when_called(model.language_model)
    with warnings.catch_warnings():
        # On one rank there is no other strategy.
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy", category=FutureWarning)
        root = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=_sharding_strategy(mesh, config.reshard_after_forward),
            cpu_offload=CPUOffload(offload_params=True) if offload else None,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
            backward_prefetch=_backward_prefetch(config.backward_prefetch),
            # Token ids and positions are all that goes in, so there is nothing to cast.
            mixed_precision=MixedPrecision(
                param_dtype=dtype, reduce_dtype=DTYPES[config.reduce_dtype], cast_root_forward_inputs=False
            ),
            device_id=device,
            use_orig_params=True,
        )
    if config.wrap_policy.wrap_lm_output:
        _gather_head_when_used(model, head)
    return root


def _sharding_strategy(mesh: DeviceMesh, reshard_after_forward: bool) -> ShardingStrategy:
    if mesh.size() == 1:
        return ShardingStrategy.NO_SHARD
    if mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD if reshard_after_forward else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


def _backward_prefetch(name: str) -> BackwardPrefetch | None:
    return None if name == "none" else BackwardPrefetch[name]


def _gather_head_when_used(model: ResponseModel, head: nn.Module) -> None:
    """The output matrix has a wrapper of its own now: its log-probs are computed by calling that."""
    wrapper = model.language_model.get_output_embeddings()
    assert isinstance(wrapper, FullyShardedDataParallel) and wrapper.module is head
    wrapper.__dict__["log_probs"] = MethodType(FullyShardedDataParallel.__call__, wrapper)


def free_gathered(root: FullyShardedDataParallel) -> None:
    """Give back parameters that are gathered still; a no-op before the first forward pass."""
    if not root._is_root:
        return
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle = unit._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(unit, handle, True)


def clean_name(name: str) -> str:
    """The Hugging Face name of a parameter of a wrapped model."""
    return name.replace(WRAPPER, "")
