"""What a training checkpoint holds beside model and optimizer: the step, and the RNG states of every rank.

``trainer_state.json`` and ``rng_rank<r>.pt`` for each rank r, the same under every strategy.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"


def save_trainer_state(path: Path, state: dict[str, Any]) -> None:
    """Collective. Write ``state`` (JSON values) with the number of ranks, and this rank's RNG states."""
    torch.save(_rng_state(), path / f"rng_rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (path / _STATE).write_text(json.dumps({**state, "world_size": dist.get_world_size()}))
    dist.barrier()


def load_trainer_state(path: Path) -> dict[str, Any]:
    """What :func:`save_trainer_state` was given, and ``world_size``.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
    """
    if not (path / _STATE).is_file():
        raise FileNotFoundError(f"{path}: not a training checkpoint ({_STATE} is missing)")
    state: dict[str, Any] = json.loads((path / _STATE).read_text())
    return state


def restore_rng_states(path: Path, state: dict[str, Any]) -> None:
    """Put this rank's RNG states back, where as many ranks run as wrote them."""
    if state["world_size"] == dist.get_world_size():
        _set_rng_state(torch.load(path / f"rng_rank{dist.get_rank()}.pt", weights_only=True))
    else:
        logger.warning("%s was written by %d ranks: RNG states are not restored", path, state["world_size"])


def _rng_state() -> dict[str, Any]:
    """Tensors and plain values only, so that reading it back cannot run code."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
