"""Training state on disk, which other tensor-, pipeline- and data-parallel sizes can read.

A folder holds ``model_and_optimizer/stage<p>_tensor<t>.safetensors``: the float32 weights and moments of what
tensor-parallel rank t of pipeline stage p holds, under names that do not depend on how the model is cut.  A reader
takes a parameter's parts from the files of all t, joins them and cuts them its own way.  Beside them is the trainer's
state.  Whoever calls makes the folder appear at once or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.contents import ModelContents
from roll.protocol.rank import RankInfo
from roll.strategies.megatron.optimizer import MOMENTS, MasterStates
from roll.strategies.megatron.weights import OwnParameter
from roll.strategies.trainer_state import load_trainer_state, restore_rng_states, save_trainer_state

_FOLDER = "model_and_optimizer"
_KINDS = ("weight", *MOMENTS)


def save(
    path: Path,
    parameters: list[OwnParameter],
    masters: MasterStates,
    info: RankInfo,
    contents: ModelContents,
    state: dict[str, Any],
) -> None:
    """Collective. Write weights, moments, ``state`` (JSON values) and RNG states."""
    folder = path / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    writes = info.dp_rank == 0 and info.cp_rank == 0
    for own in parameters:
        for kind in _KINDS if own.parameter.requires_grad else ():
            whole = masters.get(own.parameter, kind)
            if writes and not own.correspondence.is_copy:
                tensors[f"{kind}/{own.correspondence.name}"] = whole.cpu()
    if writes:
        save_file(tensors, folder / f"stage{info.pp_rank:03d}_tensor{info.tp_rank:03d}.safetensors")
    save_trainer_state(path, contents, {**state, "updates": masters.step, "tensor_parallel_size": info.tp_size})


def load(
    path: Path, parameters: list[OwnParameter], masters: MasterStates, info: RankInfo, contents: ModelContents
) -> dict[str, Any]:
    """Collective. Put back what :func:`save` wrote, under any parallel sizes; returns its ``state``.

    Frozen parameters are not in a checkpoint: they are as the model folder has them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
        CheckpointDamagedError: the files lack something that it should have.
    """
    state = load_trainer_state(path, contents)
    with _open(path / _FOLDER) as files:
        for own in parameters:
            if own.parameter.requires_grad:
                _load_parameter(own, masters, files, state, info)
    restore_rng_states(path, state)
    return state


def _load_parameter(
    own: OwnParameter, masters: MasterStates, files: dict[str, list[Any]], state: dict[str, Any], info: RankInfo
) -> None:
    values = {}
    for kind in _KINDS:
        key = f"{kind}/{_ORIGINALS[own.correspondence.name] if own.correspondence.is_copy else own.correspondence.name}"
        if key not in files:
            raise CheckpointDamagedError(f"the checkpoint's files have no {key}")
        if state["tensor_parallel_size"] == info.tp_size:
            values[kind] = files[key][info.tp_rank].get_tensor(key)
        else:
            whole = own.correspondence.layout.join([file.get_tensor(key) for file in files[key]])
            values[kind] = own.correspondence.layout.split(whole, info.tp_rank, info.tp_size)
    masters.set_weight(own.parameter, values.pop("weight").to(own.parameter.device))
    if state["updates"]:
        moments = {kind: value.to(own.parameter.device) for kind, value in values.items()}
        masters.set_moments(own.parameter, moments, state["updates"])


_ORIGINALS = {"output_layer.weight": "embedding.word_embeddings.weight"}


@contextmanager
def _open(folder: Path) -> Iterator[dict[str, list[Any]]]:
    """For each key, the opened files that hold its parts, by tensor-parallel rank."""
    with ExitStack() as stack:
        by_key: dict[str, list[Any]] = {}
        for name in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                by_key.setdefault(key, []).append(file)
        yield by_key
