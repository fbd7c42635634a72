"""MLP layers in tiles compute what they compute whole, and hold one tile's activations at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll.config.roles import ModelArguments
from roll.models.build import enable_gradient_checkpointing, tile_mlp_layers
from tests.models.builders import tiny


def build(family: str, **options: Any) -> Any:
    return tiny(family, **{"vocab_size": 50, "intermediate_size": 100, "initializer_range": 0.1} | options)


def loss_and_gradients(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.default_rows("7-*-plain", "4-Qwen3-*")
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("num_tiles", [4, 7])
def test_same_loss_and_gradients(family: str, num_tiles: int, checkpointing: bool | None) -> None:
    options = {"mlp_bias": True} if family == "Llama" else {}
    tokens = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(1))
    loss, gradients = loss_and_gradients(build(family, **options), tokens)
    tiled = build(family, **options)
    tile_mlp_layers(tiled, num_tiles)
    if checkpointing is not None:
        enable_gradient_checkpointing(tiled, ModelArguments(gradient_checkpointing_use_reentrant=checkpointing))
        tiled.train()
    tiled_loss, tiled_gradients = loss_and_gradients(tiled, tokens)
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        # Sums over tokens, taken tile by tile: a few units in the last place of the largest.
        atol = 2e-6 * float(gradient.abs().max())
        torch.testing.assert_close(tiled_gradients[name], gradient, rtol=0, atol=atol, msg=name)


class _WidestTensor(TorchDispatchMode):
    """The most elements that an operation's result as wide as the intermediate size has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim >= 2 and result.shape[-1] == self.width:
            self.rows = max(self.rows, result.numel() // self.width)
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_no_activation_of_the_intermediate_size_is_whole(grad: bool) -> None:
    model = build("Qwen2", intermediate_size=101)
    tile_mlp_layers(model, 4)
    tokens = torch.zeros(2, 200, dtype=torch.int64)
    with _WidestTensor(101) as widest, torch.set_grad_enabled(grad):
        loss = model(input_ids=tokens, labels=tokens).loss
        if grad:
            loss.backward()
    assert widest.rows == 100, "400 tokens in 4 tiles"


def test_fewer_tokens_than_tiles() -> None:
    model = build("Qwen2")
    one = torch.tensor([[3]])
    wanted = model(input_ids=one).logits
    tile_mlp_layers(model, 4)
    torch.testing.assert_close(model(input_ids=one).logits, wanted)


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"apply_tiled_mlp: .* mistral model .* works for qwen2, qwen3"):
        tile_mlp_layers(build("Mistral"), 4)
