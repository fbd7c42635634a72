"""The global gradient norm and clipping, on local shards: one collective, no DTensor dispatch per parameter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (the same memory)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: list[Tensor], shard_group: ProcessGroup | None, device: torch.device) -> Tensor:
    """float32 scalar: the 2-norm of the whole gradient, of which ``gradients`` are this rank's shards.

    Args:
        shard_group: the ranks that hold the other shards; None when there are none.
        device: where the collective runs (gradients may be in host memory).
    """
    if gradients:
        norms = torch._foreach_norm(gradients)
        squared = torch.stack([norm.float() for norm in norms]).square().sum().to(device)
    else:
        squared = torch.zeros((), device=device)
    if shard_group is not None:
        all_reduce(squared, group=shard_group)
    return squared.sqrt()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """By what to multiply a gradient of global norm ``norm``, so that the norm is at most ``max_norm``."""
    return max_norm / (norm + 1e-6) if max_norm is not None and norm > max_norm else 1.0


def scale_(gradients: list[Tensor], factor: float) -> None:
    """Multiply the gradients in place."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
