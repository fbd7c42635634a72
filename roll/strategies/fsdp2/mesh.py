"""The mesh of an FSDP2 role.

| ``fsdp_size``      | mesh                                | dimensions       |
|--------------------|-------------------------------------|------------------|
| <= 1, or >= world  | (world,)                            | ``fsdp``         |
| a divisor of world | (world / fsdp_size, fsdp_size)      | ``ddp``, ``fsdp``|
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_shape(world_size: int, fsdp_size: int) -> tuple[int, ...]:
    """
    Raises:
        ValueError: ``fsdp_size`` does not divide the world.
    """
    if fsdp_size <= 1 or fsdp_size >= world_size:
        return (world_size,)
    if world_size % fsdp_size:
        divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"strategy_config.fsdp_size: {fsdp_size} does not divide the role's {world_size} ranks; "
            f"use one of {', '.join(map(str, divisors))}, or 1 to shard over all of them"
        )
    return (world_size // fsdp_size, fsdp_size)


def build_mesh(device_type: str, world_size: int, fsdp_size: int) -> DeviceMesh:
    shape = mesh_shape(world_size, fsdp_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
