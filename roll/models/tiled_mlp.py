"""MLP layers computed a tile of tokens at a time, so that what is as wide as ``intermediate_size`` is never whole.

An MLP works on each token alone: ``mlp(x) = concat(mlp(tile) for tile in x)``.  A tile's activations are computed again
in the backward pass (gradient checkpointing, for each tile), so at most one tile's exist at any time: 1/n of the memory
for one more forward pass of the layer.  The tiles' gradients of the weights are summed by autograd before anyone sees
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TILED_FAMILIES = {"qwen2": "Qwen2MLP", "qwen3": "Qwen3MLP", "llama": "LlamaMLP"}
"""``model_type`` (Qwen2.5 is ``qwen2``) and the class of its MLP layers."""


def tile_mlp_layers(model: PreTrainedModel, num_tiles: int) -> None:
    """Compute every MLP layer of ``model`` in ``num_tiles`` tiles, in place.

    Raises:
        ValueError: a family whose MLP layers are not known to work on each token alone.
    """
    family = model.config.model_type
    if family not in TILED_FAMILIES:
        raise ValueError(
            f"strategy_config.apply_tiled_mlp: true, but the MLP layers of a {family} model cannot be tiled; it works "
            f"for {', '.join(TILED_FAMILIES)}. Set apply_tiled_mlp: false"
        )
    layers = [module for module in model.modules() if type(module).__name__ == TILED_FAMILIES[family]]
    assert layers, type(model)
    for layer in layers:
        layer.forward = partial(_tiled, layer.forward, num_tiles)


def _tiled(mlp: Callable[[Tensor], Tensor], num_tiles: int, hidden: Tensor) -> Tensor:
    """``mlp(hidden)`` for (..., H) ``hidden``, cut along the longest of its leading dimensions."""
    dim = max(range(hidden.ndim - 1), key=hidden.shape.__getitem__)
    if torch.is_grad_enabled():
        # There is nothing random in an MLP.
        mlp = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([mlp(tile) for tile in hidden.chunk(num_tiles, dim)], dim)
