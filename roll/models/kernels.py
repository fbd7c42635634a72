"""Faster kernels for the layers of a language model: Liger's, and those that ``torch.compile`` makes.

Liger Kernel (arXiv 2410.10989) fuses RMSNorm, rotary embedding and the gated MLP into one Triton kernel each.  Its loss
is left out: log-probs have a head of their own (:mod:`roll.models.log_probs`).

``torch.compile`` takes a decoder layer at a time, as one compilation then serves all of them, and sizes as unknowns, as
micro-batches differ in tokens.  Attention over a layout stays outside: it reads lengths of rows in Python.
"""

from __future__ import annotations

import sys
from inspect import isfunction
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from roll.config.model_files import EXPERTS, needed
from roll.models.attention import layout_attention
from roll.models.attention_setup import ATTENTION_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of `torch.compile`.
BACKEND = "inductor"


def use_liger(model: PreTrainedModel) -> None:
    """Compute norms, rotary embeddings and MLP layers of ``model`` by Liger's kernels, in place; experts as before.

    Raises:
        ValueError: a family that Liger does not have.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"model_args.use_liger_kernel: true, but Liger has no kernels for a {family} model; it has some for "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}. Set use_liger_kernel: false"
        )
    dense = EXPERTS not in needed(model.config.to_dict())
    names = {type(module).__module__ for module in model.modules()}
    spaces = [vars(sys.modules[name]) for name in names if name.startswith("transformers.models.")]
    before = [dict(space) for space in spaces]
    try:
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False, swiglu=dense)
        # Besides the instance, Liger changes classes and functions of transformers, for every model of the process:
        # functions go to this one alone.
        for space, own in zip(spaces, before, strict=True):
            changed = {name: value for name, value in space.items() if value is not own.get(name)}
            _use_functions(model, space, {name: value for name, value in changed.items() if isfunction(value)})
    finally:
        for space, own in zip(spaces, before, strict=True):
            space.update(own)


def _use_functions(model: PreTrainedModel, space: dict[str, Any], functions: dict[str, Any]) -> None:
    """Let the modules of ``model`` that are defined in ``space`` call these functions by their names there."""
    for module in model.modules():
        forward: Any = type(module).forward
        if isfunction(forward) and forward.__globals__ is space and functions.keys() & set(forward.__code__.co_names):
            own = FunctionType(forward.__code__, space | functions, forward.__name__, None, forward.__closure__)
            own.__defaults__, own.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
            vars(module).setdefault("forward", MethodType(own, module))


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every decoder layer of ``model`` when it is first called, in place.

    Raises:
        ValueError: a model whose layers are not known.
    """
    from transformers import AttentionInterface

    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"model_args.compile: true, but {type(model).__name__} does not name its layers (_no_split_modules). Set "
            "compile: false"
        )
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(layout_attention))
    for layer in layers:
        # Not the call, of which hooks are a part: backends gather parameters in theirs.
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)
