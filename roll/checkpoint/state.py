"""A nested state on disk without pickle, and the state of random number generators.

JSON for plain values, safetensors for arrays and tensors: ``state.json`` holds the structure; an array is there as
``{"__array__": "17"}`` and its data under that name in ``arrays.safetensors`` (NumPy) or ``tensors.safetensors``
(torch). Reading one runs no code from the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from roll.checkpoint.folders import STATE_NAME


def capture_rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's global generators (of every CUDA device too, where CUDA is in use).

    The result goes through :func:`roll.checkpoint.state.save_state` unchanged.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`capture_rng_state` returned.

    The states of CUDA devices that this process does not have are left out: they steer nothing here.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


_ARRAYS_NAME = "arrays.safetensors"
_TENSORS_NAME = "tensors.safetensors"
_ARRAY, _TENSOR, _TUPLE = "__array__", "__tensor__", "__tuple__"


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` into ``folder`` (made if need be).

    Values may be None, bool, int of any size, float (nan and inf too), str, list, tuple, dict with str keys, NumPy
    arrays and scalars (numbers and bools; a scalar comes back as a Python number) and torch tensors (any device; they
    come back on the CPU), nested as deep as you like. Raises ``TypeError``: a value of another kind; names its path in
    the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    content = _encode(state, "state", arrays, tensors)
    if arrays:
        save_arrays(arrays, folder / _ARRAYS_NAME)
    if tensors:
        save_tensors(tensors, folder / _TENSORS_NAME)
    (folder / STATE_NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read what :func:`save_state` wrote into ``folder``; equal to it in values, types and dtypes. Raises
    ``FileNotFoundError``: there is no state in ``folder``."""
    content = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    arrays = load_arrays(folder / _ARRAYS_NAME) if (folder / _ARRAYS_NAME).exists() else {}
    tensors = load_tensors(folder / _TENSORS_NAME) if (folder / _TENSORS_NAME).exists() else {}
    state = _decode(content, arrays, tensors)
    assert isinstance(state, dict)
    return state


def _encode(value: object, path: str, arrays: dict[str, np.ndarray[Any, Any]], tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses (numpy.float64 is a float, StrEnum a str) are written as what they are underneath.
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value).reshape(value.shape)
        return {_ARRAY: name}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory, which two entries of one state well may.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}[{index}]", arrays, tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path}: the key {key!r} is {type(key).__name__}, but JSON has only str keys")
            if key in (_ARRAY, _TENSOR, _TUPLE):
                raise TypeError(f"{path}: the key {key!r} is reserved")
        return {key: _encode(item, f"{path}.{key}", arrays, tensors) for key, item in value.items()}
    kind = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"{path}: {kind} cannot be saved; turn it into numbers, strings, lists, dicts, arrays or tensors")


def _decode(value: object, arrays: dict[str, np.ndarray[Any, Any]], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays[value[_ARRAY]]
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_decode(item, arrays, tensors) for item in value[_TUPLE])
    return {key: _decode(item, arrays, tensors) for key, item in value.items()}
