"""Training state on disk, in one format for all strategies, so that each can resume from another's checkpoint.

A role's folder holds ``trainer_state.json`` (:mod:`roll.checkpoint.contents`), ``rng_rank<r>/`` for each rank r
(:mod:`roll.checkpoint.state`), and ``model_and_optimizer/rank<r>.safetensors``: of every trained parameter of the
Hugging Face model, under its name there, the float32 weight and AdamW's moments that rank r keeps::

    weight/model.layers.0.self_attn.q_proj.weight       exp_avg/...      exp_avg_sq/...

A tensor in a file is a *piece* of the whole: consecutive elements of it, flattened (a run of rows under FSDP2, any run
under FSDP1 and ZeRO), or some columns of some rows (tensor parallelism).  Where a piece begins is in the file's
metadata, so every file says for itself what it holds.  A reader takes the elements that it needs from whichever files
have them: any strategy, any number of ranks, any parallel sizes, and no rank ever has more than its own part and one
tensor in memory.  Reading runs no code of a file.

The caller makes the folder appear at once or not at all.  Hyperparameters of the optimizer are not written: they come
from the configuration of the resumed run.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint.contents import (
    FORMAT,
    STATE_NAME,
    ModelContents,
    check_contents,
    read_contents,
    read_trainer_state,
)
from roll.checkpoint.folders import CheckpointDamagedError
from roll.checkpoint.state import capture_rng_state, load_state, restore_rng_state, save_state
from roll.config.roles import WorkerConfig
from roll.models.loading import fingerprint

logger = logging.getLogger(__name__)

FOLDER = "model_and_optimizer"
WEIGHT = "weight"
BUFFER = "buffer"
"""Kind of a persistent buffer, in its own type."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)

_PIECES, _UPDATES = "pieces", "updates"


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: elements ``start`` to ``start + n`` of it, flattened; or, with a ``stride``, a matrix of
    which element (i, j) is element ``start + i * stride + j`` of the parameter."""

    name: str
    tensors: Mapping[str, Tensor]
    """Tensors by kind (:data:`WEIGHT`, :data:`MOMENTS`, :data:`MUON_MOMENTS`): 1-D; (rows, columns) with a stride."""
    start: int = 0
    stride: int = 0
    """Elements from one row of the whole parameter to the next; 0: consecutive elements."""
    updates: int = 0
    """Optimizer updates that the moments are the result of."""


class Pieces:
    """Pieces copied to host memory, still to be written."""

    def __init__(self, pieces: Iterable[Piece], buffers: Mapping[str, Tensor] | None = None) -> None:
        self._tensors: dict[str, Tensor] = {}
        places: dict[str, list[int]] = {}
        counts: Counter[str] = Counter()
        updates: dict[str, int] = {}
        for piece in pieces:
            # A rank may keep several runs of one parameter; tensors of a safetensors file need different names.
            key = f"{piece.name}#{counts[piece.name]}" if counts[piece.name] else piece.name
            counts[piece.name] += 1
            places[key] = [piece.start, piece.stride]
            updates[piece.name] = piece.updates
            for kind, tensor in piece.tensors.items():
                # Copied: training continues, and changes the parameters, while the file is written in the background.
                self._tensors[f"{kind}/{key}"] = tensor.detach().float().to("cpu", copy=True).contiguous()
        for name, buffer in (buffers or {}).items():
            self._tensors[f"{BUFFER}/{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
        self._metadata = {_PIECES: json.dumps(places), _UPDATES: json.dumps(updates)}

    def write(self, path: Path, rank: int) -> None:
        """Write this rank's file below ``path``, a role's folder; none where the rank has nothing to write."""
        folder = path / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self._tensors:
            save_file(self._tensors, folder / f"rank{rank:05d}.safetensors", metadata=self._metadata)


@dataclass
class _Held:
    """A piece in an opened file."""

    file: Any
    key: str
    start: int
    stride: int

    def copy_into(self, wanted: Tensor, kind: str, begin: int) -> int:
        """Fill in what this piece has of ``wanted``, elements ``begin`` and on; the number of elements filled in."""
        held = self.file.get_slice(f"{kind}/{self.key}")
        shape, end = held.get_shape(), begin + len(wanted)
        if not self.stride:
            low, high = max(begin, self.start), min(end, self.start + shape[0])
            if low >= high:
                return 0
            wanted[low - begin : high - begin] = held[low - self.start : high - self.start]
            return high - low
        base, column = divmod(self.start, self.stride)
        first = max(0, begin // self.stride - base)
        last = min(shape[0], -(-end // self.stride) - base)
        if first >= last:
            return 0
        # Rows of which all columns are wanted are copied as one block; the first and the last one may be cut.
        rows, found = held[first:last], 0
        whole_first = max(first, -(-begin // self.stride) - base)
        whole_last = max(whole_first, min(last, end // self.stride - base))
        if whole_first < whole_last:
            offset, count = (base + whole_first) * self.stride - begin, whole_last - whole_first
            target = wanted[offset : offset + count * self.stride].view(count, self.stride)
            target[:, column : column + shape[1]] = rows[whole_first - first : whole_last - first]
            found += count * shape[1]
        for row in (*range(first, min(whole_first, last)), *range(whole_last, last)):
            start = (base + row) * self.stride + column
            low, high = max(begin, start), min(end, start + shape[1])
            if low < high:
                wanted[low - begin : high - begin] = rows[row - first, low - start : high - start]
                found += high - low
        return found


@dataclass
class StoredTensors:
    """The tensors of a checkpoint's opened files, by kind and name of the parameter."""

    folder: Path
    _pieces: dict[str, list[_Held]] = field(default_factory=dict)
    _files: dict[str, Any] = field(default_factory=dict)
    """The file of every tensor."""
    _updates: dict[str, int] = field(default_factory=dict)

    def add(self, file: safe_open, path: Path) -> None:
        """Add the pieces of an opened file. Raises ``CheckpointDamagedError``: its metadata does not say so."""
        metadata = file.metadata() or {}
        try:
            places = json.loads(metadata[_PIECES])
            counts = json.loads(metadata[_UPDATES])
            for key, (start, stride) in places.items():
                name = key.partition("#")[0]
                self._pieces.setdefault(name, []).append(_Held(file, key, int(start), int(stride)))
                self._updates[name] = int(counts.get(name, 0))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointDamagedError(f"{path} does not say which elements it holds ({error!r})") from error
        self._files |= dict.fromkeys(file.keys(), file)

    def has(self, kind: str, name: str) -> bool:
        return any(f"{kind}/{held.key}" in self._files for held in self._pieces.get(name, ()))

    def moments(self, name: str) -> list[str]:
        """Kinds of a parameter's moments."""
        return [kind for kind in (*MOMENTS, *MUON_MOMENTS) if self.has(kind, name)]

    def updates(self, name: str) -> int:
        """Optimizer updates that a parameter's moments are the result of."""
        return self._updates.get(name, 0)

    def read(self, kind: str, name: str, begin: int, end: int) -> Tensor:
        """float32 (end - begin,): elements of the flattened tensor, on the host. Raises ``CheckpointDamagedError``: the
        files lack some of them."""
        wanted = torch.empty(end - begin)
        found = sum(held.copy_into(wanted, kind, begin) for held in self._pieces.get(name, ()))
        # The buffer is uninitialised: elements that no file has would be whatever was in memory.
        if found != end - begin:
            raise CheckpointDamagedError(
                f"{self.folder} has {found} of the elements {begin} to {end} of {kind}/{name}; files are missing"
            )
        return wanted

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of the model."""
        prefix = f"{BUFFER}/"
        held = {key: file for key, file in self._files.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): file.get_tensor(key) for key, file in held.items()}


@contextmanager
def stored_tensors(path: Path) -> Iterator[StoredTensors]:
    """The tensors of a role's folder. Raises ``CheckpointDamagedError``: a file that cannot be read, or does not say
    what it holds."""
    folder = path / FOLDER
    files = StoredTensors(folder)
    with ExitStack() as stack:
        try:
            for name in sorted(folder.glob("rank*.safetensors")):
                files.add(stack.enter_context(safe_open(name, framework="pt")), name)
            yield files
        except SafetensorError as error:
            raise CheckpointDamagedError(f"{folder} cannot be read: {error}") from error


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
