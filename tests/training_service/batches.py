"""Data of each loss, the same in every call, and the equations of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


def sequences(number: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return [torch.randint(3, 400, (6 + 5 * index,), generator=random) for index in range(number)]


def data(loss: str, number: int = 3) -> list[Any]:
    """Random data of a loss; sampled log-probs near the model's, so that some ratios are clipped and some are not."""
    from tinker import types

    random, found = torch.Generator().manual_seed(1), []
    for tokens in sequences(number):
        length = len(tokens) - 1
        inputs = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs["weights"] = torch.rand(length, generator=random)
        else:
            inputs["logprobs"] = -6 + torch.randn(length, generator=random)
            inputs["advantages"] = torch.randn(length, generator=random)
        found.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return found


def documented(name: str, log_probs: Tensor, inputs: dict[str, Tensor], options: dict[str, float]) -> Tensor:
    """The equations that the SDK documents, token by token."""
    if name == "cross_entropy":
        return -inputs["weights"] * log_probs
    advantages, distance = inputs["advantages"], log_probs - inputs["logprobs"]
    if name == "dro":
        return -(log_probs * advantages - options.get("beta", 0.05) / 2 * distance.square())
    ratio = distance.exp()
    low = inputs.get(LOW, torch.full_like(ratio, options.get(LOW, 0.8)))
    high = inputs.get(HIGH, torch.full_like(ratio, options.get(HIGH, 1.2)))
    clipped = ratio.maximum(low).minimum(high)
    return {
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped.detach() * log_probs * advantages,
    }[name]
