"""New weights inside SGLang's scheduler: loaded by SGLang, then compared with what its model holds.

SGLang fuses matrices (query, key and value; gate and up) and cuts them over the tensor-parallel ranks. Every rank gets
whole tensors, so each compares its own part; the engine is right where all ranks are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    get_group_rank_size,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from roll.weight_sync.encoding import tensor_checksum

LOADER = f"{__name__}.load"
REPORTER = f"{__name__}.report"
"""``load_format`` of an update's messages: the functions below, which SGLang calls with its model."""

FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Where a tensor of a checkpoint goes in a fused layer."""


@dataclass(frozen=True)
class Expected:
    """What an update should leave in the model for one tensor."""

    whole: int
    """Checksum of the tensor as it was sent."""
    part: int
    """Checksum of what this rank should hold of it, in the model's dtype."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank holds its part of a tensor: ``length`` from ``offset`` on of ``parameter``'s dimension ``dim``,
    which are those from ``start`` on of the tensor."""

    parameter: torch.Tensor
    dim: int
    offset: int
    start: int
    length: int

    def held(self) -> torch.Tensor:
        return self.parameter.data.narrow(self.dim, self.offset, self.length)

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(self.dim, self.start, self.length).to(self.parameter.dtype)


_expected: dict[str, Expected] = {}
"""Of every tensor that an update has brought, the last one counts."""
_errors: list[str] = []


@torch.no_grad()
def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket of full tensors by Hugging Face name. An error ends the update, not SGLang: it is reported."""
    try:
        for name, tensor in named_tensors:
            whole = tensor_checksum(tensor)
            place = place_of(model, name, tensor)
            part = whole
            if place is not None and not _is_all_of(place, tensor):
                part = tensor_checksum(place.wanted(tensor))
            _expected[name] = Expected(whole, part, tuple(tensor.shape))
        model.load_weights(iter(named_tensors))
    except Exception as error:  # SGLang's process would end with it
        _errors.append(f"{type(error).__name__}: {error}")


def report(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write what the model holds of all tensors that updates have brought to a file; its folder is the name of the one
    tensor.

    The checksum of a tensor is that of the tensor sent where the model's part of it is exactly the tensor's part.
    """
    folder = Path(named_tensors[0][0])
    held: dict[str, int] = {}
    try:
        for name, expected in _expected.items():
            place = place_of(model, name, torch.empty(expected.shape, device="meta"))
            if place is not None:
                checksum = tensor_checksum(place.held())
                held[name] = expected.whole if checksum == expected.part else checksum
    except Exception as error:  # as above
        _errors.append(f"{type(error).__name__}: {error}")
    from sglang.srt.runtime_context import get_parallel

    content = json.dumps({"held": held, "errors": _errors})
    (folder / f"rank{get_parallel().tp_rank}.json").write_text(content, encoding="utf-8")
    _errors.clear()


def place_of(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Place | None:
    """Where this rank's model holds (its part of) ``tensor``; None: nowhere that is known."""
    module_name, _, parameter_name = name.rpartition(".")
    parent, _, leaf = module_name.rpartition(".")
    modules, shard = dict(model.named_modules()), None
    if module_name not in modules and leaf in FUSED:
        fused, shard = FUSED[leaf]
        module_name = f"{parent}.{fused}"
    layer: Any = modules.get(module_name)
    parameter = getattr(layer, parameter_name, None)
    if parameter is None or parameter.ndim != tensor.ndim:
        return None
    rows = tensor.shape[0]
    if isinstance(layer, VocabParallelEmbedding):
        shard_rows = layer.shard_indices
        start, end = shard_rows.org_vocab_start_index, shard_rows.org_vocab_end_index
        return Place(parameter, 0, 0, start, end - start)
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return Place(parameter, 0, 0, 0, rows) if parameter.shape == tensor.shape else None
    rank, size = get_group_rank_size(layer.tp_group)
    if isinstance(layer, QKVParallelLinear):
        return _place_in_qkv(layer, parameter, str(shard), rank, rows)
    if isinstance(layer, RowParallelLinear):
        if tensor.ndim == 1:  # a bias, which every rank has whole
            return Place(parameter, 0, 0, 0, rows)
        return _share(parameter, 1, 0, rank, layer.input_size_per_partition, tensor.shape[1])
    if isinstance(shard, int):
        sizes = [width // size for width in layer.output_sizes]
        return _share(parameter, 0, sum(sizes[:shard]), rank, sizes[shard], rows)
    return _share(parameter, 0, 0, rank, layer.output_size_per_partition, rows)


def _place_in_qkv(layer: Any, parameter: torch.Tensor, shard: str, rank: int, rows: int) -> Place:
    """Heads are cut over the ranks; where there are fewer key heads than ranks, several ranks hold the same ones."""
    query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    if shard == "q":
        return _share(parameter, 0, 0, rank, query, rows)
    offset = query if shard == "k" else query + key
    return _share(parameter, 0, offset, rank // layer.num_kv_head_replicas, key, rows)


def _share(parameter: torch.Tensor, dim: int, offset: int, index: int, size: int, total: int) -> Place:
    """Share ``index`` of a dimension of ``total`` elements. On a CPU the last ones may be short: SGLang fills layers up
    with zeros to shares that its kernels like."""
    start = min(index * size, total)
    return Place(parameter, dim, offset, start, min(size, total - start))


def _is_all_of(place: Place, tensor: torch.Tensor) -> bool:
    return place.length == tensor.shape[place.dim] and place.parameter.dtype == tensor.dtype
