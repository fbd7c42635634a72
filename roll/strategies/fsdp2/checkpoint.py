"""Training state on disk: PyTorch distributed checkpoints, which any number of ranks can read.

A folder holds ``model_and_optimizer/`` (each rank wrote its shards), ``rng_rank<r>.pt`` for each rank, and
``trainer_state.json``.  Whoever calls makes the folder appear at once or not at all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

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

from roll.strategies.trainer_state import load_trainer_state, restore_rng_states, save_trainer_state

logger = logging.getLogger(__name__)

_TENSORS = "model_and_optimizer"


def save(path: Path, model: nn.Module, optimizer: Optimizer | None, step: int) -> None:
    """Collective. Write parameters, optimizer (unless None), step and RNG states; parameters must be sharded."""
    path.mkdir(parents=True, exist_ok=True)
    save_distributed(_state_dict(model, optimizer), checkpoint_id=path / _TENSORS)
    save_trainer_state(path, {"step": step, "has_optimizer": optimizer is not None})


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Collective. Put back what :func:`save` wrote, for any number of ranks; returns the step.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
    """
    state = load_trainer_state(path)
    restored = _state_dict(model, optimizer if state["has_optimizer"] else None)
    load_distributed(restored, checkpoint_id=path / _TENSORS)
    set_model_state_dict(model, restored["model"])
    if state["has_optimizer"]:
        set_optimizer_state_dict(model, optimizer, restored["optimizer"])
    else:
        logger.warning("%s holds no optimizer state (save_only_model): the moments start from zero", path)
    restore_rng_states(path, state)
    return int(state["step"])


def _state_dict(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state
