"""Parameters that ZeRO-3 has cut into partitions, one for each rank: put together many at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.strategies.pieces import Pieces, gather_to_rank0


def is_partitioned(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")


def full_size(tensor: Any) -> int:
    """Elements of the whole tensor, partitioned or not."""
    return int(tensor.ds_numel) if is_partitioned(tensor) else tensor.numel()


def set_master_weights(parameter: Any, whole: Tensor) -> None:
    """Put float32 ``whole`` into the optimizer's own weights of ``parameter``, of which each rank has a part.

    Under ZeRO-3 by parts: DeepSpeed's function for whole tensors fails where ranks' parts are not of equal size (the
    single bias of a value head on two ranks).
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if is_partitioned(parameter):
        safe_set_local_fp32_param(parameter, _own_part(parameter, whole))
    else:
        safe_set_full_fp32_param(parameter, whole)


def set_optimizer_part(parameter: Any, whole: Tensor, moment: str | None) -> None:
    """Put float32 ``whole`` into a moment of ``parameter``, or (None) into its master weights and the parameter."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if moment is None:
        set_master_weights(parameter, whole)
        if is_partitioned(parameter):
            parameter.ds_tensor.copy_(_own_part(parameter, whole).view_as(parameter.ds_tensor))
        else:
            parameter.data.copy_(whole)
    elif is_partitioned(parameter):
        safe_set_local_optimizer_state(parameter, _own_part(parameter, whole), moment)
    else:
        safe_set_full_optimizer_state(parameter, whole, moment)


def _own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's elements of the flattened whole, the last rank's padded."""
    size, rank = parameter.ds_tensor.numel(), dist.get_rank()
    own = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(own, (0, size - own.numel()))


def gather_partitions(parameters: list[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Collective. The whole parameters on rank 0; empty tensors elsewhere.

    Args:
        parameters: partitioned parameters. Rank r holds the r-th part of a flattened parameter in ``ds_tensor``,
            the last part padded.
        dtype: of the result.
    """
    parts = [parameter.ds_tensor for parameter in parameters]
    num_ranks = dist.get_world_size()
    pieces = [Pieces.even(p.ds_shape, p.ds_tensor.numel(), num_ranks) for p in parameters]
    group = dist.group.WORLD
    assert group is not None
    return gather_to_rank0(parts, pieces, group, dtype, device)
