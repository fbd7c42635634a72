"""Training state on disk: PyTorch distributed checkpoints, which any number of ranks can read.

A folder holds ``model_and_optimizer/`` (each rank wrote its shards), ``rng_rank<r>.pt`` for each rank, and
``trainer_state.json``.  Whoever calls makes the folder appear at once or not at all.
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
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_TENSORS = "model_and_optimizer"
_STATE = "trainer_state.json"


def save(path: Path, model: nn.Module, optimizer: Optimizer | None, step: int) -> None:
    """Collective. Write parameters, optimizer (unless None), step and RNG states; parameters must be sharded."""
    rank = dist.get_rank()
    path.mkdir(parents=True, exist_ok=True)
    save_distributed(_state_dict(model, optimizer), checkpoint_id=path / _TENSORS)
    torch.save(_rng_state(), path / f"rng_rank{rank}.pt")
    if rank == 0:
        state = {"step": step, "world_size": dist.get_world_size(), "has_optimizer": optimizer is not None}
        (path / _STATE).write_text(json.dumps(state))
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Collective. Put back what :func:`save` wrote, for any number of ranks; returns the step.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
    """
    if not (path / _STATE).is_file():
        raise FileNotFoundError(f"{path}: not a training checkpoint ({_STATE} is missing)")
    state = json.loads((path / _STATE).read_text())
    restored = _state_dict(model, optimizer if state["has_optimizer"] else None)
    load_distributed(restored, checkpoint_id=path / _TENSORS)
    set_model_state_dict(model, restored["model"])
    if state["has_optimizer"]:
        set_optimizer_state_dict(model, optimizer, restored["optimizer"])
    else:
        logger.warning("%s holds no optimizer state (save_only_model): the moments start from zero", path)
    if state["world_size"] == dist.get_world_size():
        _set_rng_state(torch.load(path / f"rng_rank{dist.get_rank()}.pt", weights_only=True))
    else:
        logger.warning("%s was written by %d ranks: RNG states are not restored", path, state["world_size"])
    return int(state["step"])


def _state_dict(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


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
