"""Contents of a role's checkpoint, and their check against another configuration.

Each role's folder has a ``trainer_state.json``.  Besides counters it lists the trained parameters with their shapes, so
that a configuration under which some of them would be left over, or start from somewhere else, is refused by name.
Reading it needs neither torch nor the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.strategies.registry import checkpoint_readers

STATE_NAME = "trainer_state.json"
FORMAT = 3

_SHOWN = 3


class CheckpointMismatchError(ValueError):
    """A checkpoint that this configuration would not use all of."""


@dataclass(frozen=True)
class ModelContents:
    """The model whose training a checkpoint holds. Names are those of the Hugging Face model, or of peft in it."""

    strategy: str
    """``strategy_name`` of the role that wrote it."""
    trained: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of the trained parameters, whole."""
    frozen: list[str] = field(default_factory=list)
    """Parameters that are unchanged from the model folder."""
    scalings: dict[str, float] = field(default_factory=dict)
    """The factor of ``B A`` for every weight that has an adapter."""
    base: str | None = None
    """Fingerprint of the model folder, where parameters are frozen and it has safetensors files."""
    path: str | None = None
    """``model_name_or_path`` of the role that wrote it."""
    optimizer: str = "adamw"
    """``training_args.optimizer.moments`` of that role."""


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The counters and description that a role's folder holds. Raises ``FileNotFoundError``: ``folder`` is no role's
    checkpoint; ``CheckpointMismatchError``: it cannot be read, or another version of this package wrote it."""
    path = folder / STATE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: not a training checkpoint ({STATE_NAME} is missing)")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointMismatchError(f"{path}: not readable ({error})") from error
    found = state.get("format", 1) if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointMismatchError(
            f"{path}: format {found} is not the one known here ({FORMAT}); go on with the version of roll that "
            "wrote it, or start a new run from the model that it exported (pretrain)"
        )
    assert isinstance(state, dict)
    return state


def read_contents(state: Mapping[str, Any], folder: Path) -> ModelContents:
    """The description in what :func:`read_trainer_state` returned. Raises ``CheckpointMismatchError``: there is none,
    or it has other fields."""
    try:
        return ModelContents(**state["model"])
    except (KeyError, TypeError) as error:
        raise CheckpointMismatchError(f"{folder / STATE_NAME}: no description of the model ({error!r})") from error


def strategy_problem(written: ModelContents, strategy: str) -> str | None:
    """The reason why ``strategy`` cannot read what a checkpoint's strategy wrote; None: it can."""
    readers = checkpoint_readers(written.strategy)
    if strategy not in readers:
        return f"was written by {written.strategy}, which {' and '.join(readers)} can go on from"
    return None


def check_contents(written: ModelContents, present: ModelContents, folder: Path) -> None:
    """
    Raises:
        CheckpointMismatchError: ``present``'s strategy does not read what wrote the checkpoint, or something of it
            would be left over or have another meaning; names what, and the key.
    """
    problem = strategy_problem(written, present.strategy)
    if problem is not None:
        raise CheckpointMismatchError(
            f"{folder} {problem}. Or start a new run (another output_dir) from the model that the old one exported "
            "(save_hf_model): pretrain"
        )
    problems = list(_differences(written, present))
    if problems:
        raise CheckpointMismatchError(
            f"{folder} does not go with this configuration: {'; '.join(problems)}. Write these keys as in the run that "
            "wrote it (its config.yaml), or start a new run from the model that it exported: another output_dir, "
            "resume_from_checkpoint: false, pretrain: that model"
        )


def frozen_mismatches(written: ModelContents, trained: Collection[str]) -> list[str]:
    """Consequences of another choice of trained parameters for a checkpoint, in words."""
    lost = [name for name in written.trained if name not in trained]
    new = [name for name in trained if name not in written.trained]
    problems = []
    if lost:
        problems.append(
            f"it holds trained weights of {_listed(lost)}, which model_args.freeze_module_prefix freezes here; they "
            "would be those of pretrain again"
        )
    if new:
        problems.append(
            f"{_listed(new)} were frozen (model_args.freeze_module_prefix) and are trained here; it has no optimizer "
            "state of them"
        )
    return problems


def _differences(written: ModelContents, present: ModelContents) -> Iterable[str]:
    known = {*present.trained, *present.frozen}
    was_known = {*written.trained, *written.frozen}
    if known == was_known:
        yield from frozen_mismatches(written, present.trained)
    else:
        lost = [name for name in written.trained if name not in present.trained]
        if lost:
            yield f"it holds trained weights of {_listed(lost)}, which this run does not train ({_keys_of(lost)})"
        new = [name for name in present.trained if name not in written.trained]
        if new:
            yield f"it holds nothing of {_listed(new)}, which this run trains ({_keys_of(new)})"
        if not lost and not new:
            yield f"the model has other layers: {_listed(sorted(known ^ was_known))} (pretrain)"
    for name, shape in written.trained.items():
        own = present.trained.get(name)
        if own is not None and list(own) != list(shape):
            key = "model_args.lora_rank" if ".lora_" in name else "pretrain, the model"
            yield f"{name} has the shape {shape} there and {list(own)} here ({key})"
            break
    for name, scaling in written.scalings.items():
        own_scaling = present.scalings.get(name, scaling)
        if own_scaling != scaling:
            yield (
                f"the adapter of {name} is scaled by {scaling:g} there and by {own_scaling:g} here "
                "(model_args.lora_alpha)"
            )
            break
    if written.optimizer != present.optimizer:
        yield f"its moments are those of {written.optimizer} (training_args.optimizer: {present.optimizer} here)"
    if written.base != present.base and None not in (written.base, present.base):
        yield "its frozen parameters were those of another model folder (pretrain, model_args.model_name_or_path)"


def _keys_of(names: Sequence[str]) -> str:
    if any(".lora_" in name for name in names):
        return "model_args.lora_target, lora_rank"
    if any(".modules_to_save." in name for name in names):
        return "model_args.additional_target"
    return "another model, head or way of training: pretrain, model_args"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
