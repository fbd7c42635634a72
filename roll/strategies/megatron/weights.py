"""Weights of a Megatron model into it from Hugging Face files, and whole out of it again to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from roll.models.tensor_files import TensorFiles
from roll.protocol.rank import RankInfo
from roll.strategies.megatron.conversion import Correspondence


@dataclass(frozen=True)
class OwnParameter:
    """A parameter on this rank."""

    correspondence: Correspondence
    parameter: nn.Parameter


def read_parameter(own: OwnParameter, files: TensorFiles, tensor_rank: int, tensor_size: int) -> Tensor:
    """This rank's part of a parameter, float32. A value head that the folder lacks is zero.

    Raises:
        ValueError: the folder lacks a tensor.
    """
    sources = own.correspondence.sources
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
        self, parameters: list[OwnParameter], info: RankInfo, shapes: dict[str, torch.Size], dtype: torch.dtype
    ) -> None:
        """Collective over pipeline stages.

        Args:
            shapes: of the whole tensors, by Hugging Face name.
        """
        self._own = {own.correspondence.name: own.parameter for own in parameters}
        self._info = info
        self._shapes = shapes
        self._dtype = dtype
        self._device = parameters[0].parameter.device
        mine = [own.correspondence for own in parameters if not own.correspondence.is_copy]
        frozen = {own.correspondence.name for own in parameters if not own.parameter.requires_grad}
        self._frozen: list[set[str]] = [set() for _ in range(info.pp_size)]
        """Names of the parameters of each stage that training never changes."""
        dist.all_gather_object(self._frozen, frozen, group=parallel_state.get_pipeline_model_parallel_group())
        stages: list[list[Correspondence]] = [[] for _ in range(info.pp_size)]
        dist.all_gather_object(stages, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._all = [(stage, entry) for stage, entries in enumerate(stages) for entry in entries]

    def buckets(self, bucket_bytes: int, trained_only: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """Collective. See :meth:`roll.strategies.base.ModelStrategy.named_full_weights`."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, read in self._tensors(trained_only):
            num_bytes = self._shapes[name].numel() * self._dtype.itemsize
            if size and size + num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            tensor = read()
            if tensor is not None:
                bucket.append((name, tensor))
            size += num_bytes
        if size:
            yield bucket

    def _tensors(self, trained_only: bool) -> Iterator[tuple[str, Callable[[], Tensor | None]]]:
        """Every tensor of the model, in the same order on all ranks; reading it is collective."""
        for stage, entry in self._all:
            if trained_only and entry.name in self._frozen[stage]:
                continue
            parameter = _Collected(partial(self._collect, stage, entry))
            for index, name in enumerate(entry.sources):
                yield name, partial(parameter.tensor, index)

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
