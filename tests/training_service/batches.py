"""Data of each loss, the same in every call."""

from __future__ import annotations

from typing import Any

import torch


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
