"""The tensors of a model folder in safetensors format, read one by one when they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class TensorFiles:
    """The tensors of a model folder or of a model on the Hugging Face hub."""

    def __init__(self, name_or_path: str) -> None:
        """
        Raises:
            OSError: no such folder, or one without safetensors files.
        """
        self.folder = _local_folder(name_or_path)
        self._files = _file_of_each_tensor(self.folder)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in set(self._files.values()):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return {name: shapes[name] for name in self._files}

    def fingerprint(self) -> str:
        """Tells one model from another without reading all of it: names, shapes, and two rows of every tensor."""
        digest = hashlib.blake2b(digest_size=16)
        by_file: dict[Path, list[str]] = {}
        for name, path in self._files.items():
            by_file.setdefault(path, []).append(name)
        samples: dict[str, bytes] = {}
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                samples |= {name: _sample(file.get_slice(name)) for name in names}
        for name in sorted(samples):
            digest.update(name.encode())
            digest.update(samples[name])
        return digest.hexdigest()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in float32.

        Raises:
            ValueError: the folder lacks it.
        """
        return self.read_rows(name, slice(None)).float()

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """``tensor[rows]`` along the first dimension, on the CPU, in the type of the file; nothing else is read.

        Raises:
            ValueError: the folder lacks the tensor.
        """
        if name not in self._files:
            raise ValueError(f"model_args.model_name_or_path: {self.folder} has no tensor {name}")
        with safe_open(self._files[name], framework="pt") as file:
            if rows == slice(None):
                return file.get_tensor(name)
            return file.get_slice(name)[rows]


def _sample(tensor: Any) -> bytes:
    """Shape, and the first and the middle row of a tensor in a file (of a vector: some of its elements)."""
    shape = list(tensor.get_shape())
    if not shape or not all(shape):
        return str(shape).encode()
    count = 1 if len(shape) > 1 else 1024
    rows = [tensor[start : start + count] for start in (0, shape[0] // 2)]
    return str(shape).encode() + b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)


def fingerprint(name_or_path: str | None) -> str | None:
    """:meth:`TensorFiles.fingerprint` of a model; None where it has no safetensors files."""
    try:
        return TensorFiles(str(name_or_path)).fingerprint()
    except OSError:
        return None


def _local_folder(name_or_path: str) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_path, allow_patterns=["*.safetensors", "*.json"]))


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    file = folder / "model.safetensors"
    if not file.is_file():
        raise OSError(f"{folder}: no model.safetensors; save the model with save_pretrained in safetensors format")
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)
