"""Matrix products of linear layers, on a CPU by its fastest kernel.

``F.linear`` in float32 calls the BLAS that torch was built with.  MKL's runs its older AVX2 kernels on processors that
are not Intel's; oneDNN, which torch calls for bf16 already, generates AVX-512 kernels for any (AMD EPYC, one thread:
240 against 105 GFLOP/s forward, 230 for the gradient of the input, 190 for that of the weight).  The choice depends on
shapes and types alone, so equal runs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

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
        out: Tensor = _Linear.apply(product, x, weight, bias)
        return out
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
