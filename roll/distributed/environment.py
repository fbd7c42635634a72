"""What the environment says about the nodes of a run (the variables that cluster schedulers set)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeEnvironment:
    """``RANK`` and ``WORLD_SIZE`` count nodes here; in workers they have torch's meaning."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 6379
    worker_id: str | None = None
    dashboard_port: int | None = None
    ray_address: str | None = None
    """A Ray cluster that is already running (``RAY_ADDRESS``); it is used and left running."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> NodeEnvironment:
        """Read the variables.

        Raises:
            ValueError: one that is not a number or out of range; the message names it.
        """
        world_size = _number(environ, "WORLD_SIZE", 1, 1, 1 << 16)
        rank = _number(environ, "RANK", 0, 0, world_size - 1)
        master_addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if world_size == 1 else "")
        if not master_addr:
            raise ValueError(
                f"WORLD_SIZE={world_size} nodes, but MASTER_ADDR is not set: give every node the address of node 0, "
                "for example MASTER_ADDR=10.0.0.4"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=_number(environ, "MASTER_PORT", 6379, 1, 65535),
            worker_id=environ.get("WORKER_ID"),
            dashboard_port=_number(environ, "DASHBOARD_PORT", 0, 0, 65535) or None,
            ray_address=environ.get("RAY_ADDRESS") or None,
        )


def _number(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(
            f"{name}={text!r} in the environment: must be a whole number from {low} to {high}, like {default}"
        )
    return value
