"""What a training checkpoint holds apart from tensors: the step, a description of the model, RNG states of every rank.

``trainer_state.json`` (:mod:`roll.checkpoint.contents`) and ``rng_rank<r>/`` (JSON and safetensors) for each rank
r: the same under every strategy.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll.checkpoint.contents import (
    FORMAT,
    STATE_NAME,
    ModelContents,
    check_contents,
    read_contents,
    read_trainer_state,
)
from roll.checkpoint.state import capture_rng_state, load_state, restore_rng_state, save_state

logger = logging.getLogger(__name__)


def save_trainer_state(path: Path, contents: ModelContents, state: dict[str, Any]) -> None:
    """Collective. Write ``state`` (JSON values) with the number of ranks, ``contents``, and this rank's RNG states."""
    save_state(_rng_folder(path), capture_rng_state())
    if dist.get_rank() == 0:
        whole = {**state, "format": FORMAT, "world_size": dist.get_world_size(), "model": contents.as_json()}
        (path / STATE_NAME).write_text(json.dumps(whole), encoding="utf-8")
    dist.barrier()


def load_trainer_state(path: Path, contents: ModelContents) -> dict[str, Any]:
    """What :func:`save_trainer_state` was given, and ``world_size``.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
    """
    state = read_trainer_state(path)
    written = read_contents(state, path)
    check_contents(written, contents, path)
    return state


def restore_rng_states(path: Path, state: dict[str, Any]) -> None:
    """Put this rank's RNG states back, where as many ranks run as wrote them."""
    if state["world_size"] == dist.get_world_size():
        restore_rng_state(load_state(_rng_folder(path)))
    else:
        logger.warning("%s was written by %d ranks: RNG states are not restored", path, state["world_size"])


def _rng_folder(path: Path) -> Path:
    return path / f"rng_rank{dist.get_rank()}"
