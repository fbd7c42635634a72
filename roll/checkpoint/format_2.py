"""Checkpoints of format 2 that FSDP wrote: PyTorch's distributed checkpoints, read without running code from them.

PyTorch keeps the index of the tensors as a pickle; it is read by an unpickler that knows the few classes of an index
and no other, so that a rewritten file cannot run code, and the tensors with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from roll.checkpoint.folders import CheckpointDamagedError

_INDEX = ".metadata"
_METADATA = metadata.__name__


class DistributedTensors:
    """:class:`roll.checkpoint.tensors.StoredTensors` of such a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _index(self) -> Metadata:
        """
        Raises:
            pickle.UnpicklingError: the index holds other things than an index has.
        """
        with open(self._folder / _INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise pickle.UnpicklingError(f"{self._folder / _INDEX} is no index of tensors")
        for info in index.storage_data.values():
            if not isinstance(info, _StorageInfo) or Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"{self._folder / _INDEX} names {info!r}, which is no file of this folder")
        return index

    @cached_property
    def _chunks(self) -> dict[str, list[tuple[Any, Any]]]:
        """Places and files of the chunks of each tensor."""
        chunks: dict[str, list[tuple[Any, Any]]] = {}
        for place, info in self._index.storage_data.items():
            chunks.setdefault(place.fqn, []).append((place, info))
        return chunks

    def has(self, kind: str, name: str) -> bool:
        return self._key(kind, name) in self._index.state_dict_metadata

    def updates(self, name: str) -> int:
        return int(self.read("step", name, 0, 1)) if self.has("step", name) else 0

    def read(self, kind: str, name: str, begin: int, end: int) -> Tensor:
        key = self._key(kind, name)
        described = self._index.state_dict_metadata.get(key)
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointDamagedError(f"{self._folder} has no tensor {key}; the checkpoint has been changed")
        wanted, found = torch.empty(end - begin), 0
        width = described.size[1:].numel()
        for place, info in self._chunks.get(key, ()):
            # Chunks are rows of the tensor.
            start = place.offset[0] * width if place.offset else 0
            chunk = self._load(info)
            low, high = max(begin, start), min(end, start + chunk.numel())
            if low < high:
                wanted[low - begin : high - begin] = chunk.flatten()[low - start : high - start]
                found += high - low
        if found != end - begin:
            raise CheckpointDamagedError(f"{self._folder} has {found} of the elements {begin} to {end} of {key}")
        return wanted

    def buffers(self) -> dict[str, Tensor]:
        """None: parameters and buffers have no marks there that tell one from the other."""
        return {}

    def _load(self, info: Any) -> Tensor:
        try:
            with open(self._folder / info.relative_path, "rb") as file:
                file.seek(info.offset)
                chunk = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointDamagedError(f"{self._folder / info.relative_path} cannot be read: {error}") from error
        if not isinstance(chunk, Tensor):
            raise CheckpointDamagedError(f"{self._folder / info.relative_path} is no tensor")
        return chunk

    @staticmethod
    def _key(kind: str, name: str) -> str:
        return f"model.{name}" if kind == "weight" else f"optimizer.{name}.{kind}"


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
