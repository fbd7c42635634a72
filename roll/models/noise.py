"""Randomness of a model in training (dropout, jitter of routers), found by what it changes and switched off.

A policy must give the same probabilities in every pass, or the on-policy ratio is not 1.  Names do not say what is
random (``residual_dropout``, ``input_jitter_noise``, an expert drawn where its score ties), so a small copy is computed
with one class of its modules in training mode at a time: where the output is another, modules of this class stay in
evaluation mode for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

SEEDS = 4
# Difference of logits that is too large for rounding.
NOISE = 1e-4


@dataclass(frozen=True)
class Noise:
    """Classes by name, so that they are found in the model itself."""

    pinned: frozenset[str] = frozenset()
    """They stay in evaluation mode."""
    zeroed: frozenset[tuple[str, str]] = frozenset()
    """Class and attribute: probabilities of layers that need the training mode, to recompute their activations."""
    by_name: bool = False
    """No copy could be tried, so every module with a probability of dropout or jitter stays in evaluation mode."""

    def silence(self, model: nn.Module) -> None:
        """Switch it off in ``model``, in place; the dropout of adapters stays."""
        for name, module in model.named_modules():
            kind = type(module).__name__
            if "lora_" in name:
                continue
            if kind in self.pinned or (self.by_name and _may_be_random(module)):
                module.eval()
                # A strategy calls train() on the whole model before every step, which would undo it.
                module.train = MethodType(_keep_mode, module)
            # Such a layer must stay in training mode, since only there it recomputes its activations.
            for owner, attribute in self.zeroed:
                if owner == kind:
                    setattr(module, attribute, 0.0)


def _may_be_random(module: nn.Module) -> bool:
    """False for layers that need the training mode, to recompute their activations."""
    if isinstance(module, GradientCheckpointingLayer):
        return False
    named = [name for name, value in vars(module).items() if isinstance(value, float) and value > 0]
    dropouts = [one for one in (module, *module.children()) if isinstance(one, nn.Dropout)]
    return bool(dropouts) or any("drop" in name or "jitter" in name for name in named)


def _keep_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """``nn.Module.train`` that reaches the children only."""
    for child in module.children():
        child.train(mode)
    return module


@torch.no_grad()
def find_noise(model: nn.Module, input_ids: Tensor) -> Noise:
    """
    Args:
        model: a small copy, in evaluation mode, in which it is left; the attributes of ``zeroed`` are 0.
        input_ids: int64 (S, T).
    """
    wanted = model(input_ids=input_ids, use_cache=False).logits
    if not _is_noisy(model, list(model.modules()), input_ids, wanted):
        return Noise()
    pinned, zeroed = set(), set()
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        by_class.setdefault(type(module), []).append(module)
    for kind, modules in by_class.items():
        if not _is_noisy(model, modules, input_ids, wanted):
            continue
        if issubclass(kind, GradientCheckpointingLayer):
            found = _zeroed(model, modules, input_ids, wanted)
            zeroed |= {(kind.__name__, attribute) for attribute in found}
            if not _is_noisy(model, modules, input_ids, wanted):
                continue
        pinned.add(kind.__name__)
    return Noise(frozenset(pinned), frozenset(zeroed))


def _is_noisy(model: nn.Module, modules: list[nn.Module], input_ids: Tensor, wanted: Tensor) -> bool:
    for module in modules:
        module.training = True
    found = False
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        found = found or not torch.allclose(
            model(input_ids=input_ids, use_cache=False).logits, wanted, rtol=0, atol=NOISE
        )
    for module in modules:
        module.training = False
    return found


def _zeroed(model: nn.Module, modules: list[nn.Module], input_ids: Tensor, wanted: Tensor) -> list[str]:
    """Set to 0 what may be a probability and has no part in evaluation; the attributes' names."""
    names = [name for name, value in vars(modules[0]).items() if isinstance(value, float) and 0 < value <= 1]
    kept = []
    for name in names:
        before = [getattr(module, name) for module in modules]
        for module in modules:
            setattr(module, name, 0.0)
        if torch.equal(model(input_ids=input_ids, use_cache=False).logits, wanted):
            kept.append(name)
            continue
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, value)
    return kept
