"""Weights of a Megatron model into it from Hugging Face files, and whole out of it again to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from roll.models.lora import DOWN_PART, UP_PART, adapter_names, merged_weight
from roll.models.tensor_files import TensorFiles
from roll.platforms import current_platform
from roll.protocol.rank import RankInfo
from roll.strategies.base import ALL_WEIGHTS, WeightSelection
from roll.strategies.megatron.conversion import Correspondence


@dataclass(frozen=True)
class OwnParameter:
    """A parameter on this rank."""

    correspondence: Correspondence
    parameter: nn.Parameter


def read_parameter(
    own: OwnParameter, files: TensorFiles, given: Mapping[str, Tensor], tensor_rank: int, tensor_size: int
) -> Tensor:
    """This rank's part of a parameter, float32. A value head that the folder lacks is zero.

    Args:
        given: whole tensors by name that are not taken from the folder: those of adapters.

    Raises:
        ValueError: the folder lacks a tensor.
    """
    sources = own.correspondence.sources
    if sources[0] in given:
        return own.correspondence.layout.split([given[name] for name in sources], tensor_rank, tensor_size)
    if sources[0].startswith("score.") and sources[0] not in files:
        return torch.zeros(own.parameter.shape)
    return own.correspondence.layout.split([files.read(name) for name in sources], tensor_rank, tensor_size)


def freeze(parameters: list[OwnParameter], names: list[str], prefixes: str | None) -> None:
    """Freeze parameters whose Hugging Face name starts with one of the comma-separated prefixes.

    Args:
        names: those of the whole model.

    Raises:
        ValueError: a prefix that matches nothing, or only a part of what Megatron keeps as one parameter.
    """
    for prefix in (part.strip() for part in (prefixes or "").split(",") if part.strip()):
        if not any(name.startswith(prefix) for name in names):
            known = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise ValueError(
                f"model_args.freeze_module_prefix: no parameter starts with {prefix!r}; the top modules are {known}"
            )
        for own in parameters:
            matching = [name for name in own.correspondence.sources if name.startswith(prefix)]
            if matching and len(matching) < len(own.correspondence.sources):
                raise ValueError(
                    f"model_args.freeze_module_prefix: {prefix!r} freezes {', '.join(matching)} but not all of "
                    f"{', '.join(own.correspondence.sources)}, which Megatron keeps as one; name the module above"
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
        self._own = {own.correspondence.name: own.parameter for own in parameters}
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
        self._all = [(stage, entry) for stage, entries in enumerate(stages) for entry in entries]
        places = {entry.sources[0]: (stage, entry) for stage, entry in self._all}
        self._of_adapters = {name: places[name] for weight in self._scalings for name in adapter_names(weight)}
        """Stage and parameter of every A and B that is merged."""

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

    def _joined(self, entry: Correspondence) -> list[Tensor]:
        shard = self._own[entry.name].detach()
        if self._info.tp_size == 1:
            return [tensor.clone() for tensor in entry.layout.join([shard])]
        group = parallel_state.get_tensor_model_parallel_group()
        joins = not self._info.tp_rank
        shards = [torch.empty_like(shard) for _ in range(self._info.tp_size)] if joins else None
        dist.gather(shard.contiguous(), shards, dst=dist.get_global_rank(group, 0), group=group)
        return [] if shards is None else entry.layout.join(shards)


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
