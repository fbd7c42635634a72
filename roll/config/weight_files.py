"""The headers of a model folder's weight files, read without torch.

transformers fills a tensor that is missing with random numbers. The loader of a role compares every name and refuses
(:func:`roll.models.build.build_model`); this finds most of such folders in `roll check`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100 << 20
# Wrappers of torch keep the module that they wrap under a private name, which no model's own tensor has; PEFT puts the
# matrix that an adapter belongs to under ``base_layer``.
_WRAPPED = re.compile(r"(?:^|\.)(_\w+|base_layer|lora_[AB])\.")
_IN_LAYER = re.compile(r"^((?:[A-Za-z_]\w*\.)*)(\d+)\.(.+)$")


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all tensors, by name; None where there are no safetensors files.

    Raises:
        ValueError: a file that the index names is not there, or a header that cannot be read.
    """
    files = _files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        if not os.path.isfile(folder / name):
            raise ValueError(f"{INDEX} names {name}, which is not in {folder}: the download is not complete")
        shapes |= {key: tuple(entry["shape"]) for key, entry in _header(folder / name).items() if key != "__metadata__"}
    return shapes if files else None


def file_of_each_tensor(folder: Path) -> dict[str, Path]:
    """Raises: as :func:`stored_shapes`."""
    return {key: folder / name for name in _files(folder) for key in _header(folder / name) if key != "__metadata__"}


def _files(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return [SINGLE] if (folder / SINGLE).is_file() else []
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} cannot be read: {error}") from error


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


def weights_problem(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Why the folder cannot be the model that its ``config.json`` describes; None: nothing is seen to be missing."""
    try:
        shapes = stored_shapes(folder)
    except ValueError as error:
        return str(error)
    if shapes is None:
        return None
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    return _wrapped(shapes) or _incomplete_layers(shapes, text) or _no_output_matrix(shapes, config, text)


def _wrapped(shapes: Mapping[str, Any]) -> str | None:
    for name in shapes:
        if found := _WRAPPED.search(name):
            how = (
                "merge the adapter into the model first (merge_and_unload), or name the adapter in adapter_name_or_path"
                if not found[1].startswith("_")
                else "save the module inside the wrapper, with save_pretrained"
            )
            return f"its weights were saved with the names of a wrapper ({name}), which the model does not have: {how}"
    return None


def _incomplete_layers(shapes: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """A layer without tensors, or one between the first and the last that lacks what all others have."""
    depth = text.get("num_hidden_layers", text.get("n_layer"))
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in shapes:
        if found := _IN_LAYER.match(name):
            stacks[found[1]][int(found[2])].add(found[3])
    for prefix, layers in stacks.items():
        # A layer's own lists (experts) come later in the name; other stacks (a vision tower) have another depth.
        if not isinstance(depth, int) or not depth - 1 <= max(layers) <= depth + 1 or len(layers) < 2:
            continue
        absent = sorted(set(range(depth)) - layers.keys())
        if absent:
            return f"the files hold no tensor of layer {absent[0]} ({prefix}{absent[0]}.)"
        # What all other layers have. The first and the last may differ by design (modernbert, rwkv).
        for number in range(1, depth - 1):
            others = [names for other, names in layers.items() if other != number]
            lacking = set.intersection(*others) - layers[number]
            if lacking and layers[number] <= set.union(*others):  # A layer of another kind has names of its own.
                return f"the files lack {prefix}{number}.{min(lacking)}, which the other layers have"
    return None


def _no_output_matrix(shapes: Mapping[str, Any], config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """A language model whose output matrix is not the embeddings has two matrices over the vocabulary."""
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    size, architectures = text.get("vocab_size"), config.get("architectures") or [""]
    if tied is not False or not isinstance(size, int) or not str(architectures[0]).endswith("ForCausalLM"):
        return None
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and size in shape]
    if len(matrices) == 1 and not matrices[0].endswith("lm_head.weight"):
        return (
            f"the files hold one matrix over the vocabulary ({matrices[0]}), and {config.get('model_type')} with "
            "tie_word_embeddings: false has two: the output matrix (lm_head.weight) is missing"
        )
    return None
