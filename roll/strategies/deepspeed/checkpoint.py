"""Training state on disk: DeepSpeed's native checkpoint, with the step and RNG states beside it.

A folder holds ``deepspeed/`` (each rank wrote its part) and what :mod:`roll.strategies.trainer_state` writes.  Whoever
calls makes the folder appear at once or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll.strategies.deepspeed.resharding import load_resharded
from roll.strategies.trainer_state import load_trainer_state, restore_rng_states, save_trainer_state

_TAG = "deepspeed"


def save(path: Path, engine: Any, step: int) -> None:
    """Collective. Write trained parameters, master weights, moments, step and RNG states."""
    path.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(path), tag=_TAG, save_latest=False, exclude_frozen_parameters=True)
    save_trainer_state(path, {"step": step, "zero_stage": engine.zero_optimization_stage()})


def load(path: Path, engine: Any) -> int:
    """Collective. Put back what :func:`save` wrote, for any number of ranks; returns the step.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        ValueError: another ZeRO stage wrote it.
    """
    state = load_trainer_state(path)
    stage, world_size = engine.zero_optimization_stage(), dist.get_world_size()
    if "zero_stage" not in state:
        raise ValueError(f"{path}: was not written by a deepspeed strategy; continue with the strategy that wrote it")
    if state["zero_stage"] != stage:
        raise ValueError(
            f"{path}: was written under ZeRO-{state['zero_stage']}, this role has ZeRO-{stage}; a DeepSpeed checkpoint "
            "continues under the stage that wrote it. To go on otherwise, start from its Hugging Face export (pretrain)"
        )
    if stage > 0 and state["world_size"] != world_size:
        load_resharded(path / _TAG, engine)
        return int(state["step"])
    # Frozen parameters, such as the base under LoRA, are what they were loaded as, and not in the file.
    has_frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    engine.load_checkpoint(str(path), tag=_TAG, load_module_strict=not has_frozen, load_lr_scheduler_states=False)
    restore_rng_states(path, state)
    return int(state["step"])
