"""Faster kernels for the layers of a language model: oneDNN's matrix products, Liger's, and ``torch.compile``'s.

``F.linear`` in float32 on a CPU calls the BLAS that torch was built with.  MKL's runs its older AVX2 kernels on
processors that are not Intel's; oneDNN, which torch calls for bf16 already, generates AVX-512 kernels for any (AMD
EPYC, one thread: 240 against 105 GFLOP/s forward, 230 for the gradient of the input, 190 for that of the weight).  The
choice depends on shapes and types alone, so equal runs give equal bits.

Liger Kernel (arXiv 2410.10989) fuses RMSNorm, rotary embedding and the gated MLP into one Triton kernel each.  Its loss
is left out: log-probs have a head of their own (:mod:`roll.models.log_probs`).

``torch.compile`` takes a decoder layer at a time, as one compilation then serves all of them, and sizes as unknowns, as
micro-batches differ in tokens.  Attention over a layout stays outside: it reads lengths of rows in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isfunction
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from roll.config.model_files import EXPERTS, needed
from roll.models.attention import layout_attention
from roll.models.layout_setup import ATTENTION_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# An operator that torch's own compiler uses; without it the plain product gives the same numbers more slowly.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Below this many multiplications oneDNN's call overhead (about 6 microseconds) costs more than its kernels win.
MIN_WORK = 1 << 20


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x @ weight.T + bias`` for x of shape (..., in) and weight (out, in)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x of shape (..., in) and weight (out, in), of any type and device.

    Gradients of first order flow through it.
    """
    if not _by_onednn(x) or x.numel() * weight.shape[0] < MIN_WORK:
        return F.linear(x, weight, bias)
    return differentiable(onednn_product, x, weight, bias)


def _by_onednn(x: Tensor) -> bool:
    return HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` by oneDNN, in float32 or bf16 on a CPU, without gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two matrices, without gradient."""
    return onednn_product(left, right.t()) if _by_onednn(left) else left @ right


def differentiable(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``product(x, weight, bias)``, a product without gradient, with the gradient of :func:`linear`."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(product, x, weight, bias)
    return product(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.detach(), weight.detach(), None if bias is None else bias.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        _, need_x, need_weight, need_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            None,
            matmul(flat, weight).view_as(x) if need_x else None,
            matmul(flat.t(), x.reshape(-1, x.shape[-1])) if need_weight else None,
            flat.sum(0) if need_bias else None,
        )


def use_products(model: nn.Module) -> None:
    """Compute every linear layer of ``model`` by :func:`linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)


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
