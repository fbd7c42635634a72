"""Training state on disk, in one format for all strategies, so that each can resume from another's checkpoint.

``trainer_state.json`` (:mod:`roll.checkpoint.contents`), ``rng_rank<r>/`` (JSON and safetensors) for each rank r, and
the trained weights and moments in pieces (:mod:`roll.checkpoint.tensors`), under their Hugging Face names.  The
caller makes the folder appear at once or not at all.  Hyperparameters of the optimizer are not written: they come from
the configuration of the resumed run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from roll.checkpoint.contents import (
    FORMAT,
    STATE_NAME,
    ModelContents,
    check_contents,
    read_contents,
    read_trainer_state,
)
from roll.checkpoint.state import capture_rng_state, load_state, restore_rng_state, save_state
from roll.checkpoint.tensors import Piece, Pieces, StoredTensors, stored_tensors
from roll.config.roles import WorkerConfig
from roll.models.loading import fingerprint

logger = logging.getLogger(__name__)


def describe_model(
    role: WorkerConfig, shapes: Mapping[str, Sequence[int]], trained: Collection[str], scalings: dict[str, float]
) -> ModelContents:
    """Description of a model in a checkpoint: ``shapes`` of all parameters, whole; which of them training changes; and
    ``scalings`` as of :class:`ModelContents`."""
    frozen = [name for name in shapes if name not in trained]
    return ModelContents(
        strategy=role.strategy_args.strategy_name,
        trained={name: list(shape) for name, shape in shapes.items() if name in trained},
        frozen=frozen,
        scalings=scalings,
        base=fingerprint(role.model_args.model_name_or_path) if frozen else None,
        path=role.model_args.model_name_or_path,
        optimizer=role.training_args.optimizer.moments,
    )


def save_training(
    path: Path,
    contents: ModelContents,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    buffers: Mapping[str, Tensor] | None = None,
    background: ThreadPoolExecutor | None = None,
) -> Future[None] | None:
    """Collective. Write this rank's ``pieces``, RNG states, ``state`` (JSON values) and, on rank 0, persistent buffers.

    With ``background`` all tensors are copied to host memory, and written from there in that thread; the result is then
    done when this rank's part is on disk.

    Raises:
        OSError: on all ranks, if one could not write its part (its disk is full, say), so that none waits for another.
    """
    path.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    held = Pieces(pieces, buffers if rank == 0 else None)
    failure = ""
    try:
        save_state(path / f"rng_rank{rank}", capture_rng_state())
        if rank == 0:
            whole = {**state, "format": FORMAT, "world_size": dist.get_world_size(), "model": asdict(contents)}
            (path / STATE_NAME).write_text(json.dumps(whole), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        failure = str(error)
    # Raised on all ranks or none: a single rank that left here would let the others wait in their next collective.
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if (first := next((rank for rank, text in enumerate(failures) if text), None)) is not None:
        raise OSError(f"rank {first} could not write its part of {path}: {failures[first]}")
    if background is not None:
        return background.submit(held.write, path, rank)
    held.write(path, rank)
    return None


@contextmanager
def resumed(
    path: Path, contents: ModelContents, buffers: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[dict[str, Any], StoredTensors]]:
    """The state and the tensors that :func:`save_training` wrote, under whatever strategy and on however many ranks. At
    the end of the block persistent ``buffers`` and RNG states are restored; the log says what could not be.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: a model with ``contents`` would not restore all of it.
        CheckpointDamagedError: the tensors cannot be read.
    """
    state = read_trainer_state(path)
    check_contents(read_contents(state, path), contents, path)
    with stored_tensors(path) as stored:
        yield state, stored
        held = stored.buffers() if buffers else {}
        for name, buffer in (buffers or {}).items():
            if name in held:
                buffer.copy_(held[name])
    if not state.get("has_optimizer", True):
        logger.warning("%s holds no optimizer state (save_only_model): the moments start from zero", path)
    # Under another strategy or number of ranks, ranks hold other parts of the model and see other rows.
    written = state["model"]["strategy"]
    if written == contents.strategy and state["world_size"] == dist.get_world_size():
        restore_rng_state(load_state(path / f"rng_rank{dist.get_rank()}"))
    elif dist.get_rank() == 0:
        logger.warning(
            "%s was written by %d ranks of %s and goes on under %d of %s: weights, moments, step and schedule are "
            "restored; RNG states are not",
            path,
            state["world_size"],
            written,
            dist.get_world_size(),
            contents.strategy,
        )
