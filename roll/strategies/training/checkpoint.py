"""Training state on disk: what every strategy writes, and PyTorch distributed checkpoints, for any number of ranks.

``trainer_state.json`` (:mod:`roll.checkpoint.contents`) and ``rng_rank<r>/`` (JSON and safetensors) for each rank r are
the same under every strategy.  FSDP adds ``model_and_optimizer/``, in which each rank wrote its shards.  Whoever calls
makes the folder appear at once or not at all.  Tensors have their Hugging Face names, so that what FSDP2 wrote can be
continued under FSDP1 and the other way round.

Only tensors are written: hyperparameters of the optimizer are those of the configuration that resumes.  PyTorch keeps
the index of the tensors as a pickle; it is read by :class:`SafeReader`, which knows the few classes of an index and no
other, so that a rewritten file cannot run code.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import Optimizer

from roll.checkpoint import CheckpointDamagedError
from roll.checkpoint.contents import (
    FORMAT,
    STATE_NAME,
    ModelContents,
    check_contents,
    read_contents,
    read_trainer_state,
)
from roll.checkpoint.state import capture_rng_state, load_state, restore_rng_state, save_state
from roll.config.roles import WorkerConfig
from roll.models.expert_parallel import ExpertMesh
from roll.models.loading import fingerprint

logger = logging.getLogger(__name__)


def describe_model(
    role: WorkerConfig, shapes: Mapping[str, Sequence[int]], trained: Collection[str], scalings: dict[str, float]
) -> ModelContents:
    """Description of a model in a checkpoint.

    Args:
        shapes: of all parameters, whole, by name.
        trained: names of those that training changes.
        scalings: see :attr:`ModelContents.scalings`.
    """
    frozen = [name for name in shapes if name not in trained]
    return ModelContents(
        strategy=role.strategy_args.strategy_name,
        trained={name: list(shape) for name, shape in shapes.items() if name in trained},
        frozen=frozen,
        scalings=scalings,
        base=fingerprint(role.model_args.model_name_or_path) if frozen else None,
    )


def save_trainer_state(path: Path, contents: ModelContents, state: dict[str, Any]) -> None:
    """Collective. Write ``state`` (JSON values) with the number of ranks, ``contents``, and this rank's RNG states."""
    save_state(_rng_folder(path), capture_rng_state())
    if dist.get_rank() == 0:
        whole = {**state, "format": FORMAT, "world_size": dist.get_world_size(), "model": contents.as_json()}
        (path / STATE_NAME).write_text(json.dumps(whole), encoding="utf-8")
    dist.barrier()


def load_trainer_state(path: Path, contents: ModelContents) -> dict[str, Any]:
    """The state given to :func:`save_trainer_state`, and ``world_size``.

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


_TENSORS = "model_and_optimizer"
_INDEX = ".metadata"
_METADATA = metadata.__name__


@dataclass(frozen=True)
class Checkpointed:
    """Contents of a checkpoint."""

    module: nn.Module
    """Sharded, no parameter gathered."""
    optimizer: Optimizer
    prefix: str = ""
    """Prefix of ``module`` to the Hugging Face names."""
    with_frozen: bool = False
    """Hold frozen parameters too, such as the base under LoRA, though they are what they were loaded as."""
    experts: ExpertMesh | None = None
    """The ranks over which experts are divided; None: they are not."""

    def state(self, with_optimizer: bool) -> dict[str, Any]:
        """Sharded tensors under Hugging Face names."""
        with _quiet():
            left_out = set() if self.with_frozen else self._frozen()
            weights = get_model_state_dict(self.module)
            held = {name: tensor for name, tensor in weights.items() if name not in left_out}
            state: dict[str, Any] = {"model": _renamed(held, self._short)}
            if with_optimizer:
                optimizer = get_optimizer_state_dict(self.module, self.optimizer)
                state["optimizer"] = _renamed_optimizer(optimizer, self._short)
        return state if self.experts is None else _mapped(state, self.experts.whole)

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        if self.experts is not None:
            state = _mapped(state, self.experts.part)
        with _quiet():
            complete = StateDictOptions(strict=not self._frozen())
            set_model_state_dict(self.module, _renamed(state["model"], self._long), options=complete)
            if "optimizer" in state:
                optimizer = _renamed_optimizer(state["optimizer"], self._long)
                set_optimizer_state_dict(self.module, self.optimizer, optimizer)

    def planner(self) -> DefaultLoadPlanner:
        """Frozen parameters that a checkpoint does not hold stay as they are."""
        return _TensorPlanner(allow_partial_load=bool(self.with_frozen and self._frozen()))

    def _frozen(self) -> set[str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}

    def _short(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _long(self, name: str) -> str:
        return self.prefix + name


def save_sharded(
    path: Path,
    checkpointed: Checkpointed,
    contents: ModelContents,
    state: dict[str, Any],
    model_only: bool = False,
    background: ProcessGroup | None = None,
) -> Future[Any] | None:
    """Collective. Write parameters, optimizer (unless ``model_only``), RNG states and ``state`` (JSON values).

    Args:
        background: a gloo group of all ranks that nobody else uses: copy all tensors to host memory, and write them
            from there in a thread.

    Returns:
        With ``background``: done when this rank's part is on disk.
    """
    path.mkdir(parents=True, exist_ok=True)
    save_trainer_state(path, contents, {**state, "has_optimizer": not model_only})
    tensors = _tensors_of(checkpointed.state(with_optimizer=not model_only))
    if background is None:
        save_distributed(tensors, checkpoint_id=path / _TENSORS)
        return None
    writing = async_save(tensors, checkpoint_id=path / _TENSORS, process_group=background)
    assert isinstance(writing, Future), writing
    return writing


def load_sharded(path: Path, checkpointed: Checkpointed, contents: ModelContents) -> dict[str, Any]:
    """Collective. Put back what :func:`save_sharded` wrote, for any number of ranks; returns its ``state``.

    RNG states are put back where as many ranks run as wrote them.

    Raises:
        FileNotFoundError: ``path`` is no such checkpoint.
        CheckpointMismatchError: something of it would be left behind by a model with ``contents``.
        CheckpointDamagedError: the tensors cannot be read.
    """
    state = load_trainer_state(path, contents)
    restored = checkpointed.state(with_optimizer=state["has_optimizer"])
    reader = SafeReader(path / _TENSORS)
    try:
        load_distributed(_tensors_of(restored), storage_reader=reader, planner=checkpointed.planner())
    except CheckpointException as error:  # not an Exception, so it would pass by whoever reports errors
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointDamagedError(f"{path / _TENSORS} cannot be read: {reason}") from error
    checkpointed.restore(restored)
    if not state["has_optimizer"]:
        logger.warning("%s holds no optimizer state (save_only_model): the moments start from zero", path)
    restore_rng_states(path, state)
    return state


class SafeReader(FileSystemReader):
    """Reads what :func:`save_sharded` wrote, and runs nothing that a file might say."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """
        Raises:
            pickle.UnpicklingError: the index holds other things than an index has.
        """
        with open(Path(self.path) / _INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise pickle.UnpicklingError(f"{self.path}/{_INDEX} is no index of tensors")
        for info in index.storage_data.values():
            if not isinstance(info, _StorageInfo) or Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"{self.path}/{_INDEX} names {info!r}, which is no file of this folder")
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of the few classes that PyTorch puts into the index of a checkpoint of tensors."""

    _CLASSES: ClassVar[dict[tuple[str, str], Any]] = {
        **{
            (_METADATA, name): getattr(metadata, name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        },
        (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
        ("pathlib", "PosixPath"): PurePosixPath,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): {str(torch.strided): torch.strided}.__getitem__,
        **{
            ("torch", name): getattr(torch, name)
            for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._CLASSES:
            raise pickle.UnpicklingError(
                f"{_INDEX} refers to {module}.{name}, which no index of tensors does; the checkpoint has been changed"
            )
        return self._CLASSES[module, name]


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """PyTorch would unpickle these."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor; the checkpoint has been changed")


def _tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of :meth:`Checkpointed.state`, the same objects, without the optimizer's hyperparameters."""
    by_kind = {"model": state["model"]}
    if "optimizer" in state:
        by_kind["optimizer"] = state["optimizer"]["state"]
    return by_kind


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of these functions about FSDP1's own state dicts, which they use themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP\.state_dict_type", category=FutureWarning)
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``", category=UserWarning)
        yield


def _mapped(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree of dictionaries with ``change`` applied to its tensors."""
    if isinstance(state, dict):
        return {name: _mapped(value, change) for name, value in state.items()}
    return change(state) if isinstance(state, torch.Tensor) else state


def _renamed(tensors: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    return {rename(name): tensor for name, tensor in tensors.items()}


def _renamed_optimizer(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": _renamed(state["state"], rename), "param_groups": groups}
