"""Training state on disk, which any number of ranks under any ZeRO stage can read.

A folder holds ``model_and_optimizer/rank<r>.safetensors``: of every trained parameter the run of elements whose float32
weight and moments rank r keeps, flat, with the place where it begins.  A reader takes the elements that it keeps itself
from whichever files have them.  Alongside is what :mod:`roll.strategies.trainer_state` writes.  Whoever calls makes the
folder appear at once or not at all.

DeepSpeed's own files are pickles, which run code when they are read, and tied to the stage that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.contents import ModelContents
from roll.strategies.deepspeed.partitions import MOMENTS, MasterStates
from roll.strategies.trainer_state import load_trainer_state, restore_rng_states, save_trainer_state

_FOLDER = "model_and_optimizer"
_WEIGHT = "weight"
_STARTS = "starts"
"""In a file's metadata: of each parameter the number of the first element that it holds."""


def save(path: Path, engine: Any, contents: ModelContents, state: dict[str, Any]) -> None:
    """Collective. Write trained parameters' float32 weights, moments, ``state`` (JSON values) and RNG states."""
    folder = path / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    masters = MasterStates(engine)
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for run in masters.runs():
        if masters.writes(run):
            starts[run.name] = run.start
            for kind in (_WEIGHT, *(MOMENTS if masters.updates else ())):
                held = masters.get(run, None if kind == _WEIGHT else kind)
                tensors[f"{kind}/{run.name}"] = held.float().to("cpu", copy=True).contiguous()
    if tensors:
        save_file(tensors, folder / f"rank{dist.get_rank():05d}.safetensors", metadata={_STARTS: json.dumps(starts)})
    save_trainer_state(path, contents, {**state, "updates": masters.updates})


def load(path: Path, engine: Any, contents: ModelContents) -> dict[str, Any]:
    """Collective. Put back what :func:`save` wrote, for any number of ranks and any stage; returns its ``state``.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
    """
    state = load_trainer_state(path, contents)
    updates = int(state["updates"])
    masters = MasterStates(engine)
    if updates:
        masters.make_moments(updates)
    with _opened(path / _FOLDER) as written:
        for run in masters.runs():
            # A parameter that lies whole on this rank is its master rounded, also where another rank keeps the master.
            begin, end = (0, run.size) if run.has_whole_parameter else (run.start, run.start + run.length)
            weight = written.read(_WEIGHT, run.name, begin, end)
            masters.set_weight(run, weight)
            for moment in MOMENTS if updates else ():
                masters.set_moment(run, moment, written.read(moment, run.name, run.start, run.start + run.length))
    restore_rng_states(path, state)
    return state


@dataclass
class _WrittenRuns:
    """Opened files, and for every parameter the runs of elements in them: start and file."""

    runs: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)

    def read(self, kind: str, name: str, begin: int, end: int) -> Tensor:
        """float32: elements ``begin`` to ``end`` of the flattened parameter.

        Raises:
            CheckpointDamagedError: the files lack some of them.
        """
        wanted = torch.empty(end - begin)
        found = 0
        for start, file in self.runs.get(name, ()):
            held = file.get_slice(f"{kind}/{name}")
            low, high = max(begin, start), min(end, start + held.get_shape()[0])
            if low < high:
                wanted[low - begin : high - begin] = held[low - start : high - start]
                found += high - low
        if found != end - begin:
            raise CheckpointDamagedError(
                f"the checkpoint has {found} of elements {begin} to {end} of {kind}/{name}; files are missing"
            )
        return wanted


@contextmanager
def _opened(folder: Path) -> Iterator[_WrittenRuns]:
    written = _WrittenRuns()
    with ExitStack() as stack:
        for path in sorted(folder.glob("rank*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            starts = (file.metadata() or {}).get(_STARTS)
            if starts is None:
                raise CheckpointDamagedError(f"{path} does not say which elements it holds")
            for name, start in json.loads(starts).items():
                written.runs.setdefault(name, []).append((int(start), file))
        yield written
