"""Which modules become FSDP2 units, in which types they compute and reduce, and what waits in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from roll.config.roles import ModelArguments
from roll.config.strategy import Fsdp2StrategyConfig, WrapPolicy
from roll.models.build import DTYPES, has_tied_embeddings
from roll.models.response_model import ResponseModel
from roll.platforms import current_platform


def compute_dtype(args: ModelArguments, config: Fsdp2StrategyConfig) -> torch.dtype:
    return DTYPES[config.param_dtype or args.dtype]


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
    for unit in _units(model, config.wrap_policy):
        fully_shard(unit, **options)
    if config.wrap_policy.wrap_lm_output:
        register_fsdp_forward_method(model.language_model.get_output_embeddings(), "log_probs")
    root = fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            # The loss is already divided by global denominators. gloo has no reduction with a factor: a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _units(model: ResponseModel, policy: WrapPolicy) -> list[nn.Module]:
    """The modules to shard apart from the root, innermost first."""
    language_model = model.language_model
    chosen = policy.transformer_layer_cls_to_wrap
    # An empty list is a choice too: one unit for everything, the cheapest way for a very small model.
    names = set(getattr(language_model, "_no_split_modules", None) or () if chosen is None else chosen)
    experts = set(policy.moe_experts or ())
    units = [module for module in model.modules() if type(module).__name__ in experts]
    units += [module for module in model.modules() if type(module).__name__ in names]
    _check_found(names | experts, units, model)
    if policy.wrap_embeddings or policy.wrap_lm_output:
        if has_tied_embeddings(language_model):
            raise ValueError(
                "strategy_config.wrap_policy: wrap_embeddings and wrap_lm_output need two matrices, but this model "
                "ties its output matrix to its embeddings; set both to false"
            )
        if policy.wrap_embeddings:
            units.append(language_model.get_input_embeddings())
        if policy.wrap_lm_output and language_model.get_output_embeddings() is not None:
            units.append(language_model.get_output_embeddings())
    return units


def _check_found(names: set[str], units: list[nn.Module], model: nn.Module) -> None:
    missing = names - {type(unit).__name__ for unit in units}
    if missing and not units:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"strategy_config.wrap_policy: the model has no module of class {', '.join(sorted(missing))}; "
            f"its classes are {', '.join(known)}"
        )
