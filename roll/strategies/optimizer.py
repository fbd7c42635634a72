"""AdamW with the parameter groups that everyone uses: no weight decay for biases and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roll.config.roles import TrainingArguments


def decay_groups(
    model: torch.nn.Module, weight_decay: float, num_dims: Callable[[torch.Tensor], int] = torch.Tensor.dim
) -> list[dict[str, Any]]:
    """The trainable parameters as optimizer groups: matrices decay, vectors (biases, norm weights) never do.

    Args:
        num_dims: the number of dimensions of a whole parameter, of which the model may hold a flat part.

    Raises:
        ValueError: nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("model_args.freeze_module_prefix: every parameter of the model is frozen; freeze fewer")
    matrices = [parameter for parameter in trainable if num_dims(parameter) >= 2]
    vectors = [parameter for parameter in trainable if num_dims(parameter) < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(groups: list[dict[str, Any]], args: TrainingArguments) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101), float32 moments.

    The fused kernel does a step in one pass over memory, on CPU as on CUDA.
    """
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


def build_adamw(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.AdamW:
    """:func:`adamw` over the trainable parameters of ``model``.

    Raises:
        ValueError: nothing is trainable.
    """
    return adamw(decay_groups(model, args.weight_decay), args)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments and step counts that the optimizer holds."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
