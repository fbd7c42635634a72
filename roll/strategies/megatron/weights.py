"""Weights of a Megatron model: correspondence with Hugging Face's tensors, reading them, and gathering them on rank 0.

Megatron fuses query, key and value matrices, and the gate and up matrices of an MLP, and shards matrices over
tensor-parallel ranks.  A :class:`Layout` splits whole Hugging Face tensors into a rank's parameter and joins the ranks'
parameters into whole tensors again; both only move numbers, so moments of an optimizer go the same way as weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.config.lora import names_of
from roll.models.loading import TensorFiles
from roll.models.lora import DOWN_PART, UP_PART, adapter_names, merged_weight
from roll.models.stored import StoredLayout
from roll.platforms import current_platform
from roll.protocol.metrics import RankInfo
from roll.strategies.base import ALL_WEIGHTS, ModelHead, WeightSelection
from roll.strategies.megatron.parallel import head_dim, num_experts

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig


LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Megatron's linear layers, within a transformer layer."""

_ADAPTERS = ".adapters."


Region = tuple[slice, slice]
"""Rows and columns of a tensor; of a vector, all of whose elements are rows, the columns are all."""

_ALL = slice(None)


class Layout(ABC):
    """Conversion between one parameter and one or more Hugging Face tensors."""

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """The parameter of tensor-parallel rank ``rank`` of ``size``, from whole tensors."""
        regions = [self.region(tensor.shape, rank, size) for tensor in tensors]
        return self.fuse([part_of(tensor, region) for tensor, region in zip(tensors, regions, strict=True)], size)

    @abstractmethod
    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        """What tensor-parallel rank ``rank`` of ``size`` has of a tensor of this shape."""

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """A rank's parameter, from its :meth:`region` of each tensor."""
        return parts[0]

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        """The inverse of :meth:`fuse`."""
        return [parameter]

    @abstractmethod
    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, from the parameters of all tensor-parallel ranks in order."""


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """A view."""
    rows, columns = region
    return tensor[rows] if tensor.ndim < 2 or columns == _ALL else tensor[rows, columns]


def _share(count: int, rank: int, size: int) -> slice:
    """As ``torch.chunk`` divides."""
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


@dataclass(frozen=True)
class Replicated(Layout):
    """The same on all ranks."""

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        return _ALL, _ALL

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Sharded(Layout):
    """Sharded into equal parts along one dimension."""

    dim: int

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        own = _share(shape[self.dim], rank, size) if size > 1 else _ALL
        return (own, _ALL) if self.dim == 0 else (_ALL, own)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class ShardedVocabulary(Layout):
    """Rows of the vocabulary, padded with zeros to a multiple of the ranks."""

    vocab_size: int

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        return _share(self.vocab_size, rank, size), _ALL

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        (own,) = parts
        rows = -(-self.vocab_size // size)
        return torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])])

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        own = _share(self.vocab_size, rank, size)
        return [parameter[: own.stop - own.start]]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.vocab_size]]


@dataclass(frozen=True)
class FusedRows(Layout):
    """Several tensors, each sharded along its rows, a rank's parts one below the other (gate and up)."""

    count: int

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        return _share(shape[0], rank, size), _ALL

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        return torch.cat(list(parts))

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        return list(parameter.chunk(self.count))

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(*(shard.chunk(self.count) for shard in shards), strict=True)
        return [torch.cat(part) for part in parts]


@dataclass(frozen=True)
class FusedHeads(Layout):
    """Queries, keys and values: for each group, its query heads, its key and value head; sharded over groups."""

    groups: int
    head_dim: int

    def region(self, shape: Sequence[int], rank: int, size: int) -> Region:
        own, rows = _share(self.groups, rank, size), shape[0] // self.groups
        return slice(own.start * rows, own.stop * rows), _ALL

    def fuse(self, parts: Sequence[Tensor], size: int) -> Tensor:
        groups = self.groups // size
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def unfuse(self, parameter: Tensor, rank: int, size: int) -> list[Tensor]:
        return FusedHeads(self.groups // size, self.head_dim).join([parameter])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = torch.cat(list(shards))
        fused = fused.reshape(self.groups, -1, *fused.shape[1:])
        queries = fused.shape[1] - 2 * self.head_dim
        parts = fused.split([queries, self.head_dim, self.head_dim], 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


@dataclass(frozen=True)
class Correspondence:
    """One parameter's name, the same under all parallel sizes, and the tensors that it is made of."""

    name: str
    sources: tuple[str, ...]
    layout: Layout
    is_copy: bool = False
    """The output matrix of a last stage that copies the embeddings of the first one."""
    of_expert: bool = False
    """On the ranks of one expert only."""


def parameters_of(
    chunk: GPTModel, hf: PretrainedConfig, head: ModelHead, stored: StoredLayout
) -> Iterator[tuple[Correspondence, nn.Parameter]]:
    """Every parameter of a model chunk with its correspondence; sources are stored tensors."""
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            index, _, inner = name.removeprefix("decoder.layers.").partition(".")
            layer = chunk.decoder.layers[int(index)].layer_number - 1
            prefix, path = f"model.layers.{layer}.", f"decoder.layers.{layer}"
            if inner.startswith(_EXPERTS):
                number, _, part = inner.removeprefix(_EXPERTS).partition(".")
                expert = chunk.decoder.layers[int(index)].mlp.local_expert_indices[int(number)]
                own, layout = _of_expert(part, prefix, expert, num_experts(hf), stored)
                yield Correspondence(f"{path}.mlp.experts.{expert}.{part}", own, layout, of_expert=True), parameter
                continue
            sources, layout = in_layer(inner, hf)
            own = tuple(stored.parts(f"{prefix}{source}")[0].name for source in sources)
            yield Correspondence(f"{path}.{inner}", own, layout), parameter
        else:
            yield _outside_layers(name, hf, head, bool(getattr(parameter, "shared", False))), parameter


_EXPERTS = "mlp.experts.local_experts."


def _of_expert(
    part: str, prefix: str, expert: int, num_experts: int, stored: StoredLayout
) -> tuple[tuple[str, ...], Layout]:
    """The sources and the layout of one of an expert's two matrices."""
    is_first = part == "linear_fc1.weight"
    parts = stored.parts(f"{prefix}mlp.experts.{'gate_up_proj' if is_first else 'down_proj'}")
    count = len(parts) // num_experts
    own = tuple(one.name for one in parts[expert * count : (expert + 1) * count])
    return own, FusedRows(count) if is_first else Sharded(1)


def in_layer(name: str, hf: PretrainedConfig) -> tuple[tuple[str, ...], Layout]:
    """The sources and the layout of a parameter of a transformer layer, by its name there."""
    if _ADAPTERS in name:
        return _of_adapter(name, hf)
    if name == "mlp.shared_experts.gate_weight":
        return ("mlp.shared_expert_gate.weight",), Replicated()
    kind = name.rpartition(".")[2]
    # OLMoE normalises the queries of all heads together, others those of each head alone.
    of_heads: Layout = Sharded(0) if hf.model_type == "olmoe" else Replicated()
    table: dict[str, tuple[tuple[str, ...], Layout]] = {
        "input_layernorm": (("input_layernorm",), Replicated()),
        "self_attention.linear_qkv": (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            FusedHeads(hf.num_key_value_heads, head_dim(hf)),
        ),
        "self_attention.q_layernorm": (("self_attn.q_norm",), of_heads),
        "self_attention.k_layernorm": (("self_attn.k_norm",), of_heads),
        "self_attention.linear_proj": (("self_attn.o_proj",), Sharded(1)),
        "pre_mlp_layernorm": (("post_attention_layernorm",), Replicated()),
        "mlp.router": (("mlp.gate",), Replicated()),
        "mlp.shared_experts.linear_fc1": (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), FusedRows(2)),
        "mlp.shared_experts.linear_fc2": (("mlp.shared_expert.down_proj",), Sharded(1)),
        "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), FusedRows(2)),
        "mlp.linear_fc2": (("mlp.down_proj",), Sharded(1)),
    }
    sources, layout = table[name.rpartition(".")[0]]
    return tuple(f"{source}.{kind}" for source in sources), layout


def _of_adapter(name: str, hf: PretrainedConfig) -> tuple[tuple[str, ...], Layout]:
    """A is sharded where the inputs of its layer are, B where the outputs are."""
    path, _, rest = name.partition(_ADAPTERS)
    projection, _, part = rest.partition(".")
    weights, layout = in_layer(f"{path}.weight", hf)
    (weight,) = (one for one in weights if one.endswith(f".{projection}.weight"))
    down, up = adapter_names(weight)
    shards_inputs = isinstance(layout, Sharded)
    if part == "down":
        return (down,), Sharded(1) if shards_inputs else Replicated()
    return (up,), Replicated() if shards_inputs else Sharded(0)


def _outside_layers(name: str, hf: PretrainedConfig, head: ModelHead, is_copy: bool) -> Correspondence:
    embeddings = "model.embed_tokens.weight"
    if name == "decoder.final_layernorm.weight":
        return Correspondence(name, ("model.norm.weight",), Replicated())
    if name == "embedding.word_embeddings.weight":
        return Correspondence(name, (embeddings,), ShardedVocabulary(hf.vocab_size))
    assert name in ("output_layer.weight", "output_layer.bias"), name
    if head is ModelHead.VALUE:
        return Correspondence(name, (f"score.{name.rpartition('.')[2]}",), Replicated())
    source = embeddings if is_copy else "lm_head.weight"
    return Correspondence(name, (source,), ShardedVocabulary(hf.vocab_size), is_copy)


@dataclass(frozen=True)
class OwnParameter:
    """A parameter on this rank."""

    correspondence: Correspondence
    parameter: nn.Parameter

    @property
    def shards(self) -> ProcessGroup:
        """The ranks over which it is sharded, or which hold it in common."""
        if self.correspondence.of_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def replicas(self) -> ProcessGroup:
        """The ranks that hold the same, and sum its gradients."""
        if self.correspondence.of_expert and not getattr(self.parameter, "allreduce", True):
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def read_parameter(own: OwnParameter, files: TensorFiles, given: Mapping[str, Tensor], stored: StoredLayout) -> Tensor:
    """This rank's part of a parameter, float32. A value head that the folder lacks is zero.

    Args:
        given: whole tensors by name that are not taken from the folder: those of adapters.

    Raises:
        ValueError: the folder lacks a tensor.
    """
    sources, group, layout = own.correspondence.sources, own.shards, own.correspondence.layout
    if sources[0] in given:
        return layout.split([given[name] for name in sources], group.rank(), group.size())
    if sources[0].startswith("score.") and sources[0] not in files:
        return torch.zeros(own.parameter.shape)
    regions = [layout.region(stored.shape(name), group.rank(), group.size()) for name in sources]
    parts = [stored.read(files, name, *region).float() for name, region in zip(sources, regions, strict=True)]
    return layout.fuse(parts, group.size())


def freeze(
    parameters: list[OwnParameter], names: list[str], prefixes: str | Sequence[str] | None, stored: StoredLayout
) -> None:
    """Freeze parameters whose Hugging Face name starts with one of the prefixes (a list, or with commas).

    Args:
        names: those of the whole model.

    Raises:
        ValueError: a prefix that matches nothing, or only a part of what Megatron keeps as one parameter.
    """
    for prefix in names_of(prefixes):
        if not any(name.startswith(prefix) for name in names):
            known = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise ValueError(
                f"model_args.freeze_module_prefix: no parameter starts with {prefix!r}; the top modules are {known}"
            )
        for own in parameters:
            sources = own.correspondence.sources
            matching = [name for name in sources if stored.live_name(name).startswith(prefix)]
            if matching and len(matching) < len(sources):
                raise ValueError(
                    f"model_args.freeze_module_prefix: {prefix!r} freezes {', '.join(matching)} but not all of "
                    f"{', '.join(sources)}, which Megatron keeps as one; name the module above"
                )
            if matching:
                own.parameter.requires_grad_(False)


class FullWeights:
    """Collects whole tensors on rank 0, parameter by parameter, from all pipeline stages and tensor-parallel ranks."""

    def __init__(
        self,
        parameters: list[OwnParameter],
        info: RankInfo,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        scalings: Mapping[str, float] | None = None,
    ) -> None:
        """Collective over pipeline stages.

        Args:
            shapes: of the whole tensors, by Hugging Face name.
            scalings: of the adapters that are merged, by the name of the weight; without them A and B are tensors like
                any other.
        """
        self._own = {own.correspondence.name: own for own in parameters}
        self._info = info
        self._shapes = shapes
        self._dtype = dtype
        self._scalings = dict(scalings or {})
        self._device = current_platform().device()
        mine = [own.correspondence for own in parameters if not own.correspondence.is_copy]
        frozen = {own.correspondence.name for own in parameters if not own.parameter.requires_grad}
        self._frozen: list[set[str]] = [set() for _ in range(info.pp_size)]
        """Names of the parameters of each stage that training never changes."""
        dist.all_gather_object(self._frozen, frozen, group=parallel_state.get_pipeline_model_parallel_group())
        stages: list[list[Correspondence]] = [[] for _ in range(info.pp_size)]
        dist.all_gather_object(stages, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._owners: dict[str, int] = {}
        """The rank that joins an expert's parameter, by name."""
        experts = self._experts_of_stages(parameters)
        self._all = [
            (stage, entry)
            for stage, entries in enumerate(stages)
            for entry in [*(one for one in entries if not one.of_expert), *experts[stage]]
        ]
        places = {entry.sources[0]: (stage, entry) for stage, entry in self._all}
        self._of_adapters = {name: places[name] for weight in self._scalings for name in adapter_names(weight)}
        """Stage and parameter of every A and B that is merged."""

    def _experts_of_stages(self, parameters: list[OwnParameter]) -> list[list[Correspondence]]:
        """Collective over all ranks where there are experts: those of each stage, by expert, on whichever rank."""
        own = [one for one in parameters if one.correspondence.of_expert]
        stages: list[list[Correspondence]] = [[] for _ in range(self._info.pp_size)]
        if not _any_rank(bool(own), self._device):
            return stages
        joins = [one for one in own if not one.replicas.rank() and not one.shards.rank()]
        frozen = {one.correspondence.name for one in joins if not one.parameter.requires_grad}
        mine = (self._info.rank, self._info.pp_rank, [one.correspondence for one in joins], frozen)
        of_ranks: list[tuple[int, int, list[Correspondence], set[str]]] = [mine] * self._info.world_size
        dist.all_gather_object(of_ranks, mine)
        for rank, stage, entries, names in of_ranks:
            for entry in entries:
                if self._owners.setdefault(entry.name, rank) == rank:
                    stages[stage].append(entry)
            self._frozen[stage] |= names
        for entries in stages:
            entries.sort(key=lambda entry: [int(part) if part.isdigit() else part for part in entry.name.split(".")])
        return stages

    def buckets(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Collective. See :meth:`roll.strategies.base.ModelStrategy.named_full_weights`."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for weight in self._selected(selection):
            if size and size + weight.num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            tensor = weight.read()
            if tensor is not None:
                bucket.append((weight.name, tensor))
            size += weight.num_bytes
        if size:
            yield bucket

    def _selected(self, selection: WeightSelection) -> Iterator[_Weight]:
        for parts, scaling in self._weights():
            for weight in parts if selection.adapters_apart else [_merged(parts, scaling)]:
                if weight.is_trained or not selection.trained_only:
                    yield weight

    def _weights(self) -> Iterator[tuple[list[_Weight], float]]:
        """Every tensor of the model without adapters, in the same order on all ranks: itself, or W, A and B."""
        for stage, entry in self._all:
            if entry.sources[0] in self._of_adapters:
                continue
            whole = _Collected(partial(self._collect, stage, entry))
            for index, name in enumerate(entry.sources):
                parts = [self._weight(name, stage, entry, whole, index)]
                if name in self._scalings:
                    for suffix, part in zip((DOWN_PART, UP_PART), adapter_names(name), strict=True):
                        place = self._of_adapters[part]
                        parts.append(self._weight(name + suffix, *place, _Collected(partial(self._collect, *place)), 0))
                yield parts, self._scalings.get(name, 1.0)

    def _weight(self, name: str, stage: int, entry: Correspondence, whole: _Collected, index: int) -> _Weight:
        num_bytes = self._shapes[entry.sources[index]].numel() * self._dtype.itemsize
        return _Weight(name, num_bytes, entry.name not in self._frozen[stage], partial(whole.tensor, index))

    def _collect(self, stage: int, entry: Correspondence) -> list[Tensor]:
        """The tensors of one parameter on rank 0; nothing elsewhere. One replica does the work."""
        if entry.of_expert:
            return self._collect_expert(entry)
        info = self._info
        if info.dp_rank or info.cp_rank:
            return []
        tensors: list[Tensor] = []
        if info.pp_rank == stage:
            tensors = self._joined(entry)
        if stage == 0 or info.tp_rank:
            return tensors if info.rank == 0 else []
        group = parallel_state.get_pipeline_model_parallel_group()
        if info.pp_rank == stage:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0, group=group)
        elif info.pp_rank == 0:
            sender = dist.get_global_rank(group, stage)
            tensors = [
                torch.empty(self._shapes[name], dtype=self._dtype, device=self._device) for name in entry.sources
            ]
            for tensor in tensors:
                dist.recv(tensor, src=sender, group=group)
            return tensors
        return []

    def _collect_expert(self, entry: Correspondence) -> list[Tensor]:
        """:meth:`_collect` of an expert, which is on the ranks of no pipeline of rank 0, maybe."""
        own, owner, rank = self._own.get(entry.name), self._owners[entry.name], self._info.rank
        tensors = self._joined(entry) if own is not None and not own.replicas.rank() else []
        if owner == 0:
            return tensors if rank == 0 else []
        if rank == owner:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0)
        elif rank == 0:
            tensors = [
                torch.empty(self._shapes[name], dtype=self._dtype, device=self._device) for name in entry.sources
            ]
            for tensor in tensors:
                dist.recv(tensor, src=owner)
            return tensors
        return []

    def _joined(self, entry: Correspondence) -> list[Tensor]:
        own = self._own[entry.name]
        shard, group = own.parameter.detach(), own.shards
        if group.size() == 1:
            return [tensor.clone() for tensor in entry.layout.join([shard])]
        shards = [torch.empty_like(shard) for _ in range(group.size())] if not group.rank() else None
        dist.gather(shard.contiguous(), shards, dst=dist.get_global_rank(group, 0), group=group)
        return [] if shards is None else entry.layout.join(shards)


def _any_rank(holds: bool, device: torch.device) -> bool:
    """Collective over all ranks."""
    found = torch.tensor(int(holds), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


@dataclass(frozen=True)
class _Weight:
    """A tensor that may be asked for; reading it is collective."""

    name: str
    num_bytes: int
    is_trained: bool
    read: Callable[[], Tensor | None]
    """Gives None on the ranks that do not get it."""


def _merged(parts: Sequence[_Weight], scaling: float) -> _Weight:
    """``W + scaling * B A`` from W, A and B; W itself where it has no adapter."""
    if len(parts) == 1:
        return parts[0]

    def read() -> Tensor | None:
        weight, down, up = (part.read() for part in parts)
        return None if weight is None or down is None or up is None else merged_weight(weight, down, up, scaling)

    return _Weight(parts[0].name, sum(part.num_bytes for part in parts), any(p.is_trained for p in parts), read)


@dataclass
class _Collected:
    """The tensors of one parameter, collected when the first of them is asked for."""

    collect: Callable[[], list[Tensor]]

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return self.collect()

    def tensor(self, index: int) -> Tensor | None:
        """None on the ranks that do not get it."""
        return self._tensors[index] if self._tensors else None
