"""Rollout in low precision, seen from the weights: an update brings each matrix rounded to a format.

Engines compute with the rounded values in their own dtype, so every engine shows what the format's weights cost in
log-probs and in learning, on any device; activations are not rounded, and nothing is faster. What vLLM and SGLang
quantise are the same matrices: those of linear layers and of experts. Embeddings, the output matrix, norms, biases and
the gates of experts keep their values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.config.roles import ModelArguments
from roll.config.run import QuantizationFormat
from roll.models.build import empty_model, load_config
from roll.models.experts import sparse_layers
from roll.models.stored import StoredLayout

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


def quantized_names(args: ModelArguments) -> frozenset[str]:
    """Names, as sent, of the matrices that are rounded.

    Raises:
        ValueError: the model has none.
    """
    model = empty_model(load_config(args), "causal_lm")
    layout = StoredLayout(model).on_the_way()
    # Gates of a sparse block, the router and that of a shared expert, are its own layers; experts are deeper.
    gates = [one for layer in sparse_layers(model) for one in (*layer.block.children(), *layer.router.modules())]
    kept = {model.get_output_embeddings(), *gates}
    live = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer not in kept
    }
    # Experts are parameters of their own, stacked: (E, out, in).
    live |= {name for name, tensor in model.named_parameters() if tensor.dim() == 3 and ".experts." in name}
    found = frozenset(part.name for name in live for part in layout.parts(name) if len(part.shape) == 2)
    if not found:
        raise ValueError(f"weight_sync.quantization: {type(model).__name__} has no linear layers; set it to null")
    return found


def rounded(weight: Tensor, form: QuantizationFormat) -> Tensor:
    """The values that a matrix has in a format, in its own dtype.

    ``fp8``: E4M3 with a scale for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). ``int8``: a
    scale for each row of outputs. ``nvfp4``: E2M1 in blocks of 16 inputs with scales in E4M3 and one of the whole
    matrix (arXiv 2509.25149, section 2). All scales are those that bring the largest magnitude to the format's; values
    are rounded to the nearest, ties to even.

    Args:
        weight: (out, in), floating point.
    """
    rows, columns = weight.shape
    values = weight.float()
    match form:
        case "int8":
            scale = _scale(values.abs().amax(1, keepdim=True), 127.0)
            return ((values / scale).round() * scale).to(weight.dtype)
        case "fp8":
            blocks = pad(values, (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scale = _scale(blocks.abs().amax((1, 3), keepdim=True), _E4M3_MAX)
            whole = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(2).flatten(0, 1)
        case "nvfp4":
            blocks = pad(values, (0, -columns % 16)).unflatten(1, (-1, 16))
            whole_scale = _scale(values.abs().amax(), _E4M3_MAX * _E2M1_MAX)
            largest = blocks.abs().amax(2, keepdim=True) / (_E2M1_MAX * whole_scale)
            scale = largest.to(torch.float8_e4m3fn).float() * whole_scale
            # A block so small that its scale is 0 is all 0.
            size = (blocks / scale.where(scale > 0, 1.0)).abs()
            # The nearest of 0, .5, 1, 1.5, 2, 3, 4 and 6.
            step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
            nearest = ((size / step).round() * step).clamp(max=_E2M1_MAX).copysign(blocks)
            whole = (nearest * scale).flatten(1)
    return whole[:rows, :columns].to(weight.dtype)


def _scale(largest: Tensor, limit: float) -> Tensor:
    return (largest / limit).where(largest > 0, 1.0)
