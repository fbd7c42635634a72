"""AdamW with the parameter groups that everyone uses: no weight decay for biases and norms."""

from __future__ import annotations

from typing import Any

import torch

from roll.config.roles import TrainingArguments


def build_adamw(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101) over the trainable parameters, float32 moments.

    Matrices decay with ``weight_decay``; vectors (biases, norm weights) never do.  The fused kernel does a step in one
    pass over memory, on CPU as on CUDA.

    Raises:
        ValueError: nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("model_args.freeze_module_prefix: every parameter of the model is frozen; freeze fewer")
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments and step counts that the optimizer holds."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
