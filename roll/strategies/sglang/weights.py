"""Weight updates of SGLang inside its schedulers: what a rank should hold of each tensor, and what it does.

SGLang fuses matrices (query, key and value; gate and up) and shards them over the tensor-parallel ranks. Every rank
gets whole tensors, so each compares its own part; the engine is right where all ranks are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, get_group_rank_size
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from roll.weight_sync.encoding import tensor_checksum

LOADER = f"{__name__}.load"
REPORTER = f"{__name__}.report"
"""``load_format`` of an update's messages: the functions below, which SGLang calls with its model."""

# Fused layer, and shard of it, of a checkpoint's tensor.
FUSED: dict[str, tuple[str, str | int]] = {f"{shard}_proj": ("qkv_proj", shard) for shard in "qkv"}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# Parameter of all experts of a layer, and half of its rows, of one expert's matrix.
_OF_EXPERTS: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13_weight", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("w13_weight", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("w2_weight", None)),
}


@dataclass(frozen=True)
class Expected:
    """Checksums that an update should leave in the model for one tensor."""

    whole: int  # checksum of the tensor as it was sent
    part: int  # checksum of what this rank should hold of it, in the model's dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Place of a rank's part of a tensor: ``length`` from ``offset`` on of ``parameter``'s dimension ``dim``,
    which are those from ``start`` on of the tensor."""

    parameter: torch.Tensor
    dim: int
    offset: int
    start: int
    length: int


_expected: dict[str, Expected] = {}
"""Expectation of every tensor that an update has brought; the last update counts."""
_errors: list[str] = []


@torch.no_grad()
def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket of full tensors by Hugging Face name. An error is reported at the end of the update: raised here,
    it would end SGLang's process."""
    try:
        for name, tensor in named_tensors:
            whole = tensor_checksum(tensor)
            place = place_of(model, name, tensor)
            part = whole
            if place is not None and (place.length != tensor.shape[place.dim] or place.parameter.dtype != tensor.dtype):
                part = tensor_checksum(tensor.narrow(place.dim, place.start, place.length).to(place.parameter.dtype))
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
            if (place := place_of(model, name, torch.empty(expected.shape, device="meta"))) is not None:
                checksum = tensor_checksum(place.parameter.data.narrow(place.dim, place.offset, place.length))
                held[name] = expected.whole if checksum == expected.part else checksum
    except Exception as error:  # as above
        _errors.append(f"{type(error).__name__}: {error}")
    from sglang.srt.runtime_context import get_parallel

    content = json.dumps({"held": held, "errors": _errors})
    (folder / f"rank{get_parallel().tp_rank}.json").write_text(content, encoding="utf-8")
    _errors.clear()


def place_of(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Place | None:
    """Place of (this rank's part of) ``tensor`` in its model; None: unknown."""
    module_name, _, parameter_name = name.rpartition(".")
    parent, _, leaf = module_name.rpartition(".")
    modules, shard = dict(model.named_modules()), None
    expert = _EXPERT.fullmatch(name)
    if expert is not None and module_name not in modules:
        return _place_in_experts(modules.get(expert[1]), int(expert[2]), expert[3], tensor)
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
        # Heads are sharded over the ranks; of fewer key heads than ranks, several ranks hold the same ones.
        query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        if shard == "q":
            return _share(parameter, 0, 0, rank, query, rows)
        offset = query if shard == "k" else query + key
        return _share(parameter, 0, offset, rank // layer.num_kv_head_replicas, key, rows)
    if isinstance(layer, RowParallelLinear):
        if tensor.ndim == 1:  # a bias, which every rank has whole
            return Place(parameter, 0, 0, 0, rows)
        return _share(parameter, 1, 0, rank, layer.input_size_per_partition, tensor.shape[1])
    if isinstance(shard, int):
        sizes = [width // size for width in layer.output_sizes]
        return _share(parameter, 0, sum(sizes[:shard]), rank, sizes[shard], rows)
    return _share(parameter, 0, 0, rank, layer.output_size_per_partition, rows)


def _place_in_experts(layer: Any, expert: int, matrix: str, tensor: torch.Tensor) -> Place | None:
    """None as well of an expert that another rank has."""
    if matrix not in _OF_EXPERTS or not hasattr(layer, "moe_tp_rank"):
        return None
    local = layer._map_global_expert_id_to_local_expert_id(expert)
    if local < 0:
        return None
    parameter_name, half = _OF_EXPERTS[matrix]
    own = getattr(layer, parameter_name).data[local]
    size = layer.intermediate_size_per_partition
    if half is None:
        return _share(own, 1, 0, layer.moe_tp_rank, size, tensor.shape[1])
    return _share(own, 0, half * (len(own) // 2), layer.moe_tp_rank, size, tensor.shape[0])


def _share(parameter: torch.Tensor, dim: int, offset: int, index: int, size: int, total: int) -> Place:
    """Share ``index`` of a dimension of ``total`` elements. On a CPU the last ones may be short: SGLang fills layers up
    with zeros to shares that its kernels like."""
    start = min(index * size, total)
    return Place(parameter, dim, offset, start, min(size, total - start))


def agreed_checksums(reports: Sequence[Mapping[str, Any]], num_ranks: int) -> dict[str, int]:
    """The checksum of every tensor of which each rank holds exactly its part, from what the ranks have written (see
    :func:`report`); 0 where they do not agree. RuntimeError where a model could not load a tensor, or a rank is
    silent."""
    errors = [error for report in reports for error in report["errors"]]
    if errors or len(reports) != num_ranks:
        raise RuntimeError(f"sglang: the model did not load the weights: {'; '.join(errors) or 'a rank is silent'}")
    first, *others = [report["held"] for report in reports]
    known = [name for name in first if all(name in held for held in others)]
    return {name: first[name] if all(held[name] == first[name] for held in others) else 0 for name in known}
