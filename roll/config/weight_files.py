"""The headers of a model folder's weight files, read without torch.

transformers fills a tensor that is missing with random numbers. The loader of a role compares every name and refuses
(:func:`roll.models.build.build_model`); :func:`weights_problem` finds such a folder in `roll check`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from roll.config.model_files import CONFIG, cache_home

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100 << 20
# Wrappers of torch keep the module that they wrap under a private name, which no model's own tensor has; PEFT puts the
# matrix that an adapter belongs to under ``base_layer``.
_WRAPPED = re.compile(
    r"(?:^module|(?:^|\.)_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)"
    r"|(?P<peft>^base_model|\.base_layer|\.lora_[AB]))\."
)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all tensors, by name; None where there are no safetensors files. Raises ``ValueError``: a file or a
    tensor that the index names is not there, or a header that cannot be read."""
    files = _files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensors in files.items():
        if not os.path.isfile(folder / name):
            raise ValueError(f"{INDEX} names {name}, which is not in {folder}: the download is not complete")
        header = _header(folder / name)
        if absent := sorted(tensors - header.keys()):
            raise ValueError(
                f"{INDEX} says that {name} holds {absent[0]}, and it does not: the files are of two models"
            )
        shapes |= {key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    return shapes if files else None


def file_of_each_tensor(folder: Path) -> dict[str, Path]:
    """Raises: as :func:`stored_shapes`."""
    return {key: folder / name for name in _files(folder) for key in _header(folder / name) if key != "__metadata__"}


def _files(folder: Path) -> dict[str, set[str]]:
    """The safetensors files, each with the tensors that the index promises."""
    if not (folder / INDEX).is_file():
        return {SINGLE: set()} if (folder / SINGLE).is_file() else {}
    files: dict[str, set[str]] = {}
    try:
        for tensor, file in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(file, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} cannot be read: {error}") from error
    return dict(sorted(files.items()))


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(stream.read(size))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    if os.path.getsize(path) < 8 + size + end:
        raise ValueError(f"{path} is cut off: it has {os.path.getsize(path)} bytes of {8 + size + end}")
    return header


def weights_problem(folder: Path, overrides: Mapping[str, Any], without_head: bool = False) -> str | None:
    """Why the folder cannot be the model that its ``config.json`` describes; None: nothing is seen to be missing.

    The comparison imports transformers, which takes seconds: what was found whole is remembered by the contents of
    ``config.json`` and of the headers.

    Args:
        overrides: ``model_config_kwargs``.
        without_head: the role has a head of its own, so that no output matrix is needed.
    """
    try:
        shapes, pickled = stored_shapes(folder), sorted(folder.glob("pytorch_model*.bin"))
        if shapes is None and not pickled:
            if not (folder / "adapter_config.json").is_file():
                return None
            return (
                "holds an adapter and no model: name it in model_args.adapter_name_or_path, and the model that it was "
                "made for in model_args.model_name_or_path"
            )
        config = (folder / CONFIG).read_text(encoding="utf-8")
        if "auto_map" in json.loads(config):
            return None  # Code of its own is run by the role alone, which asks for trust_remote_code.
        files: list[Any] = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in pickled]
        found = files if shapes is None else sorted(shapes.items())
        seen = json.dumps([config, found, sorted(overrides.items()), without_head], default=str)
        digest = hashlib.blake2b(f"{version('transformers')} {seen}".encode(), digest_size=20).hexdigest()
        marker = cache_home() / "whole_models" / digest
        if marker.exists():
            return None
        build = import_module("roll.models.build")  # imports torch
        if shapes is None:
            shapes = build.pickled_shapes(pickled)
        problem: str | None = build.compare_with_headers(shapes, str(folder), overrides, without_head)
    except (OSError, ValueError) as error:
        return str(error)
    if problem is None:
        # Only a hint for the next check: a folder that cannot be written costs the comparison again.
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return problem


def how_to_unwrap(names: Iterable[str]) -> str | None:
    """The remedy for names that a wrapper has given; None: no name looks like that."""
    for name in names:
        if found := _WRAPPED.search(name):
            if found["peft"] is None:
                return f"save the module inside the wrapper ({name}), by its save_pretrained"
            return (
                f"merge the adapter into the model ({name}) by merge_and_unload, or name the adapter in "
                "model_args.adapter_name_or_path"
            )
    return None
