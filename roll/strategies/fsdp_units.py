"""Which modules FSDP1 and FSDP2 shard apart, and in which type they compute."""

from __future__ import annotations

import torch
from torch import nn

from roll.config.roles import ModelArguments
from roll.config.strategies.registry import ShardedStrategyConfig, WrapPolicy
from roll.models.build import DTYPES, has_tied_embeddings
from roll.models.log_probs import ResponseModel, output_matrices


def compute_dtype(args: ModelArguments, config: ShardedStrategyConfig) -> torch.dtype:
    return DTYPES[config.param_dtype or args.dtype]


def wrapped_units(model: ResponseModel, policy: WrapPolicy) -> list[nn.Module]:
    """The modules to shard apart from the root, innermost first.

    Raises:
        ValueError: a wrap policy that names no module of this model.
    """
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
        if policy.wrap_lm_output:
            units += output_matrices(language_model)
    return units


def _check_found(names: set[str], units: list[nn.Module], model: nn.Module) -> None:
    missing = names - {type(unit).__name__ for unit in units}
    if missing and not units:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"strategy_config.wrap_policy: the model has no module of class {', '.join(sorted(missing))}; "
            f"its classes are {', '.join(known)}"
        )
