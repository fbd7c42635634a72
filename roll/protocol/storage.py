"""A DataProto in a file: safetensors for tensors and arrays, JSON for everything else, nothing that executes.

One safetensors file: tensor columns are under ``batch/NAME``, tensors and numeric arrays met inside objects under
``object/NUMBER``, and one uint8 tensor, ``structure``, holds UTF-8 JSON of ``non_tensor_batch`` and ``meta_info``.
Objects may be None, bool, int, float, str, bytes, list, tuple, dict, numpy scalars and arrays, and tensors, nested at
will.  A type that JSON lacks is written as a dict with a single key that starts with ``$``.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.protocol.columns import ObjectColumns, TensorColumns

_FORMAT = "roll.DataProto 1"
_STRUCTURE = "structure"
_ENCODING = ("utf-8", "surrogatepass")  # a str may hold half a surrogate pair, which a truncated token stream leaves


def save(columns: TensorColumns, objects: ObjectColumns, meta_info: Mapping[str, Any], path: Path) -> None:
    """Write a batch to ``path`` (its folder must exist), through a temporary file that replaces it when complete.

    Raises:
        TypeError: an object of a kind that the format does not hold; the message names its column.
        OSError: the file could not be written; no part of it remains.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"batch/{key}": _storable(columns.peek(key)) for key in columns}
    encoder = _Encoder(tensors)
    structure = {
        "columns": list(columns),
        "non_tensor_batch": {
            key: [encoder.encode(value, f"non_tensor_batch[{key!r}]") for value in values]
            for key, values in objects.items()
        },
        "meta_info": encoder.encode(dict(meta_info), "meta_info"),
    }
    text = bytearray(json.dumps(structure, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING))
    tensors[_STRUCTURE] = torch.frombuffer(text, dtype=torch.uint8)
    # In the same folder: os.replace() is atomic within one file system only.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"format": _FORMAT})
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, SafetensorError):  # what the system said, in words alone
            raise OSError(f"{path}: {error}") from error
        raise


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]], dict[str, Any]]:
    """Columns, objects and ``meta_info`` in a file of :func:`save`; tensors come to the CPU. Raises ``ValueError``: a
    safetensors file that holds no DataProto."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = (file.metadata() or {}).get("format")
        if found != _FORMAT:
            raise ValueError(f"{path} is no DataProto file: its format is {found!r}, expected {_FORMAT!r}")
        structure = json.loads(file.get_tensor(_STRUCTURE).numpy().tobytes().decode(*_ENCODING))
        tensors = {key: file.get_tensor(f"batch/{key}") for key in structure["columns"]}
        objects = {
            key: [_decode(value, file.get_tensor) for value in values]
            for key, values in structure["non_tensor_batch"].items()
        }
        return tensors, objects, _decode(structure["meta_info"], file.get_tensor)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: safetensors refuses tensors that share memory, and columns may be views of each other.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass
class _Encoder:
    """Turns objects into JSON; tensors met on the way go to ``tensors``."""

    tensors: dict[str, torch.Tensor]

    def encode(self, value: object, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.encode(entry, where) for entry in value]
        if type(value) is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(entry, f"{where}[{key!r}]") for key, entry in value.items()}
            return {"$dict": [[self.encode(key, where), self.encode(entry, where)] for key, entry in value.items()]}
        if type(value) is tuple:
            return {"$tuple": [self.encode(entry, where) for entry in value]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
            return {"$objects": [self.encode(entry, where) for entry in value]}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            name = self._keep(torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8)))
            return {"$array": [value.dtype.str, list(value.shape), name]}
        raise TypeError(
            f"{where} holds a {type(value).__name__}, which a DataProto file cannot: it holds None, numbers, strings, "
            "bytes, lists, tuples, dicts, arrays and tensors"
        )

    def _keep(self, tensor: torch.Tensor) -> str:
        name = f"object/{len(self.tensors)}"
        self.tensors[name] = _storable(tensor)
        return name


def _decode(value: object, get_tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(entry, get_tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": entries}:
            return tuple(_decode(entry, get_tensor) for entry in entries)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tensor": name}:
            return get_tensor(name)
        case {"$scalar": [dtype, text]}:
            return np.frombuffer(base64.b64decode(text), dtype)[0]
        case {"$objects": entries}:
            decoded = [_decode(entry, get_tensor) for entry in entries]
            return np.fromiter(decoded, dtype=object, count=len(decoded))
        case {"$array": [dtype, shape, name]}:
            return get_tensor(name).numpy().view(dtype).reshape(shape)
        case {"$dict": pairs}:
            return {_decode(key, get_tensor): _decode(entry, get_tensor) for key, entry in pairs}
    return {key: _decode(entry, get_tensor) for key, entry in value.items()}
