"""Randomness of a model in training (dropout, jitter of routers), switched off where its probabilities are.

A policy must give the same probabilities in every pass, or the on-policy ratio is not 1.  Randomness without such a
probability (an expert drawn where its score ties) shows in a small copy in training mode, and the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEEDS = 4
# Difference of logits that is too large for rounding.
NOISE = 1e-4

Place = tuple[str, str]
"""The class of a module, and its attribute: a number, or a module of dropout."""


@dataclass(frozen=True)
class Noise:
    """Places of randomness to be switched off."""

    places: frozenset[Place] | None = frozenset()
    """By class, so that it is found in a model whose copy was looked at; None: everything."""

    @classmethod
    def of(cls, model: nn.Module) -> Noise:
        return cls(frozenset(place for place, _, _ in _probabilities(model)))

    def silence(self, model: nn.Module) -> None:
        """Switch it off in ``model``, in place; the dropout of adapters stays."""
        for place, module, attribute in _probabilities(model):
            if self.places is None or place in self.places:
                setattr(module, attribute, 0.0)


def _probabilities(model: nn.Module) -> Iterator[tuple[Place, nn.Module, str]]:
    """Every number above 0 by which ``model`` is random, with the module and the attribute that hold it."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        for attribute, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in attribute or "jitter" in attribute):
                yield (kind, attribute), module, attribute
        for child, inner in module.named_children():
            if isinstance(inner, nn.Dropout) and inner.p > 0 and "lora_" not in name:
                yield (kind, child), inner, "p"


@torch.no_grad()
def changes_in_training(model: nn.Module, input_ids: Tensor, wanted: Tensor) -> bool:
    """True where the logits in training mode are not always ``wanted``; ``model`` is left in evaluation mode.

    Args:
        input_ids: int64 (S, T).
        wanted: float (S, T, V).
    """
    model.train()
    found = False
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        logits = model(input_ids=input_ids, use_cache=False).logits
        found = found or not torch.allclose(logits, wanted, rtol=0, atol=NOISE)
    model.eval()
    return found
