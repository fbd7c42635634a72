"""Weights of a Megatron model: read from Hugging Face's files and gathered on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.models.loading import TensorFiles
from roll.models.lora import DOWN_PART, UP_PART, adapter_names, merged_rows, merged_weight
from roll.models.stored import StoredLayout
from roll.platforms import current_platform
from roll.protocol.metrics import RankInfo
from roll.strategies.base import ALL_WEIGHTS, WeightSelection
from roll.strategies.megatron.correspondence import Correspondence, ShardedExperts
from roll.weight_sync.encoding import in_buckets


@dataclass(frozen=True)
class OwnParameter:
    """A parameter on this rank."""

    correspondence: Correspondence
    parameter: nn.Parameter

    @property
    def shards(self) -> ProcessGroup:
        """The ranks over which it is sharded, or which hold it in common."""
        if isinstance(self.correspondence.layout, ShardedExperts):
            return parallel_state.get_expert_tensor_and_model_parallel_group()
        if self.correspondence.of_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def has_expert_ranks(self) -> bool:
        """The ranks that sum its gradients are an expert's own; it is in an optimizer of its own."""
        return self.correspondence.of_expert and not getattr(self.parameter, "allreduce", True)

    @property
    def replicas(self) -> ProcessGroup:
        """The ranks that hold the same, and sum its gradients."""
        if self.has_expert_ranks:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def read_parameter(own: OwnParameter, files: TensorFiles, given: Mapping[str, Tensor], stored: StoredLayout) -> Tensor:
    """Read this rank's part of a parameter, float32. A value head that the folder lacks is zero. ``given``: whole
    tensors by name that are not taken from the folder: those of adapters. Raises ValueError: the folder lacks one."""
    sources, group, layout = own.correspondence.sources, own.shards, own.correspondence.layout
    if sources[0] in given:
        return layout.split([given[name] for name in sources], group.rank(), group.size())
    if sources[0].startswith("score.") and sources[0] not in files:
        return torch.zeros(own.parameter.shape)
    regions = [layout.region(stored.part(name).shape, group.rank(), group.size()) for name in sources]
    parts = [stored.read(files, name, *region).float() for name, region in zip(sources, regions, strict=True)]
    return layout.fuse(parts, group.size())


Collect = Callable[[], list[Tensor]]
"""Collective. Gives the whole tensors of a parameter on rank 0, and none elsewhere."""


class FullWeights:
    """Collects whole tensors on rank 0, parameter by parameter, from all pipeline stages and tensor-parallel ranks."""

    def __init__(
        self,
        parameters: list[OwnParameter],
        info: RankInfo,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        stored: StoredLayout,
        scalings: Mapping[str, float] | None = None,
    ) -> None:
        """Collective over pipeline stages. ``shapes`` are those of the whole tensors; ``scalings`` those of the
        adapters to be merged, by weight: without them A and B are tensors like any other."""
        self._own = {own.correspondence.name: own for own in parameters}
        self._info, self._shapes, self._dtype = info, shapes, dtype
        self._stored = stored
        self._scalings = dict(scalings or {})
        self._device = current_platform().device()
        mine = [own.correspondence for own in parameters if not own.correspondence.is_copy]
        frozen = {own.correspondence.name for own in parameters if not own.parameter.requires_grad}
        stages = [(mine, frozen)] * info.pp_size
        dist.all_gather_object(stages, (mine, frozen), group=parallel_state.get_pipeline_model_parallel_group())
        self._frozen = [names for _, names in stages]
        """Names of the parameters of each stage that training never changes."""
        self._owners: dict[str, int] = {}
        """The rank that joins an expert's parameter, by name."""
        experts = self._experts_of_stages(parameters)
        self._all = [
            (stage, entry)
            for stage, (entries, _) in enumerate(stages)
            for entry in [*(one for one in entries if not one.of_expert), *experts[stage]]
        ]
        places = {entry.sources[0]: (stage, entry) for stage, entry in self._all}
        self._of_adapters = {name: places[name] for weight in self._scalings for name in adapter_names(weight)}
        """Stage and parameter of every A and B that is merged."""

    def _experts_of_stages(self, parameters: list[OwnParameter]) -> list[list[Correspondence]]:
        """Collective where there are experts: those of each stage, by expert, on whichever rank."""
        own = [one for one in parameters if one.correspondence.of_expert]
        stages: list[list[Correspondence]] = [[] for _ in range(self._info.pp_size)]
        most = torch.tensor(len(own), device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not int(most):
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
        weights = self._weights(selection.adapters_apart)
        selected = (weight for weight in weights if weight.is_trained or not selection.trained_only)
        for bucket in in_buckets(selected, bucket_bytes, lambda weight: weight.num_bytes):
            whole: list[tuple[str, Tensor]] = []
            while bucket:
                weight = bucket.pop(0)  # drops its cache of gathered tensors, or a bucket would hold them all
                if (tensor := weight.read()) is not None:
                    whole.append((weight.name, tensor))
            yield whole

    def _weights(self, adapters_apart: bool) -> Iterator[_Weight]:
        """Every tensor of the model, in the same order on all ranks, with its adapter merged, or followed by A and B.

        Matrices of experts come merged: A and B are of all experts of a layer, and are kept until the next layer.
        """
        layer, of_experts = "", dict[str, list[_Weight]]()
        for stage, entry in self._all:
            if entry.sources[0] in self._of_adapters:
                continue
            whole = cache(partial(self._collect, stage, entry))
            for index, name in enumerate(entry.sources):
                weight, live = self._weight(name, stage, entry, whole, index), self._stored.live_name(name)
                if entry.of_expert and live in self._scalings:
                    if layer != live.rpartition(".")[0]:
                        layer, of_experts = live.rpartition(".")[0], {}
                    if live not in of_experts:
                        of_experts[live] = self._adapter(live, keeps=True)
                    begin, shape = self._stored.part(name).begin, self._stored.live_shape(live)
                    merged = weight.merged(of_experts[live], partial(_merged_rows, begin, shape, self._scalings[live]))
                    yield replace(merged, num_bytes=weight.num_bytes)
                elif name not in self._scalings:
                    yield weight
                elif adapters_apart:
                    yield from (weight, *self._adapter(name))
                else:
                    yield weight.merged(self._adapter(name), partial(merged_weight, scaling=self._scalings[name]))

    def _adapter(self, weight: str, keeps: bool = False) -> list[_Weight]:
        """A and B of a weight; ``keeps``: gathered once, however often they are read."""
        found = []
        for suffix, part in zip((DOWN_PART, UP_PART), adapter_names(weight), strict=True):
            stage, entry = self._of_adapters[part]
            collect = partial(self._collect, stage, entry)
            found.append(self._weight(weight + suffix, stage, entry, cache(collect) if keeps else collect, 0))
        return found

    def _weight(self, name: str, stage: int, entry: Correspondence, collect: Collect, index: int) -> _Weight:
        num_bytes = self._shapes[entry.sources[index]].numel() * self._dtype.itemsize
        return _Weight(name, num_bytes, entry.name not in self._frozen[stage], ((collect, index),))

    def _collect(self, stage: int, entry: Correspondence) -> list[Tensor]:
        info, group = self._info, None
        if entry.of_expert:  # its owner may be outside rank 0's pipeline group, so this goes over the world
            own, owner = self._own.get(entry.name), self._owners[entry.name]
            tensors = self._joined(entry) if own is not None and not own.replicas.rank() else []
        elif info.dp_rank or info.cp_rank:
            return []
        else:
            tensors = self._joined(entry) if info.pp_rank == stage else []
            if info.tp_rank:
                return []
            group = parallel_state.get_pipeline_model_parallel_group()
            owner = dist.get_global_rank(group, stage)
        if info.rank == owner != 0:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0, group=group)
        elif info.rank == 0 != owner:
            tensors = [
                torch.empty(self._shapes[name], dtype=self._dtype, device=self._device) for name in entry.sources
            ]
            for tensor in tensors:
                dist.recv(tensor, src=owner, group=group)
        return tensors if info.rank == 0 else []

    def _joined(self, entry: Correspondence) -> list[Tensor]:
        own = self._own[entry.name]
        shard, group = own.parameter.detach(), own.shards
        shapes = [self._shapes[name] for name in entry.sources]
        if group.size() == 1:
            return entry.layout.join([shard], shapes)
        shards = [torch.empty_like(shard) for _ in range(group.size())] if not group.rank() else None
        dist.gather(shard.contiguous(), shards, dst=dist.get_global_rank(group, 0), group=group)
        return [] if shards is None else entry.layout.join(shards, shapes)


@dataclass(frozen=True)
class _Weight:
    """A tensor that can be read from others, which are collected."""

    name: str
    num_bytes: int
    is_trained: bool
    parts: tuple[tuple[Collect, int], ...]
    """The collector of a part, and which of its tensors the part is."""
    merge: Callable[..., Tensor] | None = None
    """Makes one tensor of several parts."""

    def read(self) -> Tensor | None:
        """Collective. None on the ranks that do not get it."""
        collected = [(collect(), index) for collect, index in self.parts]
        tensors = [found[index] for found, index in collected if found]
        if len(tensors) < len(self.parts):
            return None
        return tensors[0] if self.merge is None else self.merge(*tensors)

    def merged(self, adapter: Sequence[_Weight], merge: Callable[..., Tensor]) -> _Weight:
        """With A and B, which ``merge`` adds to it."""
        all_parts = [self, *adapter]
        return _Weight(
            self.name,
            sum(one.num_bytes for one in all_parts),
            any(one.is_trained for one in all_parts),
            tuple(part for one in all_parts for part in one.parts),
            merge,
        )


def _merged_rows(begin: int, shape: Sequence[int], scaling: float, rows: Tensor, down: Tensor, up: Tensor) -> Tensor:
    # B is collected as (out r, E), in which the experts of a rank are some of the columns.
    return merged_rows(rows, begin, shape, down, up.view(shape[1], -1), scaling)
