"""Whole weights for engines and exports: sharded parameters, gathered on rank 0 in buckets.

FSDP1, FSDP2 and ZeRO-3 have this in common: a rank holds a contiguous run (perhaps empty) of a flattened parameter, and
the runs in the order of the ranks are the parameter.  So rank 0 receives every run at its place in the whole tensor,
without an intermediate copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from roll.models.build import folder_config, has_tied_embeddings
from roll.models.loading import TensorFiles, persistent_tensors
from roll.models.log_probs import ResponseModel
from roll.models.lora import MergedWeight, merged_rows, merged_weight
from roll.models.stored import StoredLayout, other_names, whole_config
from roll.protocol.columns import copy_into, flat_view
from roll.strategies.base import ALL_WEIGHTS, ModelHead, ModelStrategy, WeightSelection
from roll.weight_sync.encoding import in_buckets

EXPORT_BUCKET_BYTES = 2**30
"""Device memory for gathered tensors of an export; the whole model is assembled in host memory."""

ADAPTER_FOLDER = "adapter"
"""Folder of the unmerged adapter, in peft's format, next to the merged model of an export."""


@dataclass(frozen=True)
class Pieces:
    """One parameter over the ranks of a shard group."""

    shape: torch.Size
    sizes: tuple[int, ...]
    """Elements that each rank holds; they sum to those of ``shape``."""

    def within(self, part: torch.Tensor, rank: int, begin: int, end: int) -> tuple[torch.Tensor, Pieces]:
        """Return the elements of ``part``, held by ``rank``, that lie in ``begin:end`` of the flattened whole, and the
        pieces of that stretch."""
        ends = list(accumulate(self.sizes))
        runs = [(max(begin, last - size), min(end, last)) for last, size in zip(ends, self.sizes, strict=True)]
        stretch = Pieces(torch.Size([end - begin]), tuple(max(0, last - first) for first, last in runs))
        first, start = runs[rank][0], ends[rank] - self.sizes[rank]
        return flat_view(part)[first - start : first - start + stretch.sizes[rank]], stretch


def gather_to_rank0(
    parts: list[torch.Tensor],
    pieces: list[Pieces],
    group: ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    span: tuple[int, int] | None = None,
) -> list[torch.Tensor]:
    """Collective over ``group``, which rank 0 of the world is in. There the tensors whole, or ``span`` of each,
    flattened, of ``dtype`` on ``device``, by messages all in flight at once; empty ones on the other ranks. ``parts``:
    this rank's elements of each tensor, flat or not; more than the rank's share are ignored."""
    rank = dist.get_rank(group)
    if span is not None:
        cut = [piece.within(part, rank, *span) for part, piece in zip(parts, pieces, strict=True)]
        parts, pieces = [part for part, _ in cut], [piece for _, piece in cut]
    # To the device of the collective: with offload, shards are in host memory, which NCCL cannot send.
    held = [part.detach().to(device) for part in parts]
    if rank != 0:
        # Cast by the sender: bfloat16 is half the bytes of float32 master weights.
        own = [flat_view(part)[: piece.sizes[rank]].to(dtype) for part, piece in zip(held, pieces, strict=True)]
        leaving = [dist.P2POp(dist.isend, run, 0, group, tag) for tag, run in enumerate(own) if run.numel()]
        for work in dist.batch_isend_irecv(leaving) if leaving else []:
            work.wait()
        return [torch.empty(0, dtype=dtype, device=device) for _ in parts]
    whole = [torch.empty(piece.shape, dtype=dtype, device=device) for piece in pieces]
    runs = [tensor.view(-1).split(list(piece.sizes)) for tensor, piece in zip(whole, pieces, strict=True)]
    arriving = [
        dist.P2POp(dist.irecv, run, dist.get_global_rank(group, peer), group, tag)
        for tag, of_ranks in enumerate(runs)
        for peer, run in enumerate(of_ranks)
        if peer and run.numel()
    ]
    works = dist.batch_isend_irecv(arriving) if arriving else []
    # Rank 0's own runs are copied while the others' arrive.
    for (run, *_), part in zip(runs, held, strict=True):
        copy_into(run, flat_view(part)[: run.numel()])
    for work in works:
        work.wait()
    return whole


class GatheredWeights(ModelStrategy):
    """The part of a strategy that sends its whole model to engines and exports it."""

    model: ResponseModel
    rank: int
    _stored: StoredLayout
    _on_the_way: StoredLayout

    def _sharded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Pieces] | None:
        """This rank's elements of a tensor, and the pieces of all ranks; None: every rank holds the whole tensor."""
        return None

    def _shard_group(self) -> ProcessGroup | None:
        """The ranks with a tensor's pieces between them; None on a rank of another copy than rank 0's."""
        return None

    def _gather(self, tensors: Sequence[torch.Tensor], span: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Collective. The tensors whole, or ``span`` of each, flattened, on the device, in :meth:`_wire_dtype`. Other
        ranks may return empty ones."""
        # An exchange for each dtype: weights travel in the compute dtype, buffers in their own.
        by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor, Pieces]]] = {}
        found: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(tensors):
            dtype, shard = self._wire_dtype(tensor), self._sharded(tensor)
            if shard is None:
                held = tensor.detach() if span is None else flat_view(tensor)[slice(*span)]
                found[index] = held.to(self.device, dtype)
            else:
                by_dtype.setdefault(dtype, []).append((index, *shard))
        group = self._shard_group() if by_dtype else None
        for dtype, shards in by_dtype.items():
            parts, pieces = [part for _, part, _ in shards], [piece for _, _, piece in shards]
            gathered = [torch.empty(0, dtype=dtype, device=self.device) for _ in shards]
            if group is not None:
                gathered = gather_to_rank0(parts, pieces, group, dtype, self.device, span)
            found |= {index: tensor for (index, _, _), tensor in zip(shards, gathered, strict=True)}
        return [found[index] for index in range(len(tensors))]

    def _reshard(self) -> None:
        """Free gathered parameters, if the backend keeps some after a forward pass."""

    def named_full_weights(
        self, bucket_bytes: int, selection: WeightSelection = ALL_WEIGHTS
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. Full tensors in the compute dtype (float32 master weights stay here); tied weights come once.

        At most a bucket is gathered at a time, or one larger tensor (as engines name it).
        """
        for bucket in in_buckets(self._selected_weights(selection), bucket_bytes, self._num_bytes):
            first = bucket[0]
            # The live tensor is several stored ones (experts, fused here), gathered as many at a time as fit.
            is_divided = len(self._on_the_way.parts(first.name)) > 1
            if len(bucket) == 1 and is_divided and self._num_bytes(first) > bucket_bytes:
                yield from self._stretches(first, bucket_bytes)
                continue
            parts = (part for named in self._whole_weights(bucket) for part in self._on_the_way.split(*named))
            whole = [(name, part.contiguous()) for name, part in parts]
            # A layer's experts, gathered as two tensors, become hundreds of matrices: sent in buckets of their own.
            yield from (
                [whole] if len(whole) <= len(bucket) else in_buckets(whole, bucket_bytes, lambda named: named[1].nbytes)
            )

    def _stretches(self, weight: MergedWeight, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Collective. The stored tensors of a weight larger than a bucket, in runs that are not, one gather each."""
        tensor, *adapter = weight.parts
        itemsize = self._wire_dtype(tensor).itemsize
        down_up = self._gather(adapter)
        for stretch in self._on_the_way.stretches(weight.name, bucket_bytes // itemsize):
            (flat,) = self._gather([tensor], (stretch.begin, stretch.end))
            found = list(stretch.of(flat)) if self.rank == 0 else []
            if found and down_up:
                (down, up), shape = down_up, self._on_the_way.live_shape(weight.name)
                found = [
                    (name, merged_rows(part, begin // shape[-1], shape, down, up, weight.scaling))
                    for (name, part), (_, begin, _) in zip(found, stretch.parts, strict=True)
                ]
            yield found

    def _whole_weights(self, bucket: list[MergedWeight]) -> list[tuple[str, torch.Tensor]]:
        """Collective. On rank 0, the weights with their adapters merged."""
        whole = iter(self._gather([part for weight in bucket for part in weight.parts]))
        parts = [[next(whole) for _ in weight.parts] for weight in bucket]
        if self.rank != 0:
            return []
        return [
            (weight.name, own[0] if len(own) == 1 else merged_weight(own[0], own[1], own[2], weight.scaling))
            for weight, own in zip(bucket, parts, strict=True)
        ]

    def _selected_weights(self, selection: WeightSelection) -> Iterator[MergedWeight]:
        named = self._named_tensors()
        if self.adapters is None:
            weights: Iterable[MergedWeight] = (MergedWeight(name, (tensor,)) for name, tensor in named)
        else:
            weights = self.adapters.merged(named)
        for weight in weights:
            for part in weight.separate() if selection.adapters_apart else [weight]:
                # Training may change it; so may persistent buffers.
                is_trained = any(not isinstance(one, nn.Parameter) or one.requires_grad for one in part.parts)
                if is_trained or not selection.trained_only:
                    yield part

    def _num_bytes(self, weight: MergedWeight) -> int:
        shards = [(part, self._sharded(part)) for part in weight.parts]
        return sum(
            (part.numel() if shard is None else shard[1].shape.numel()) * self._wire_dtype(part).itemsize
            for part, shard in shards
        )

    def save_hf(self, path: Path) -> None:
        """Collective. Weights are written in the compute dtype; adapters merged, and separately in ``adapter/``."""
        weights: dict[str, torch.Tensor] = {}
        for bucket in in_buckets(self._selected_weights(ALL_WEIGHTS), EXPORT_BUCKET_BYTES, self._num_bytes):
            weights |= {name: tensor.cpu() for name, tensor in self._whole_weights(bucket)}
        if self.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            language_model: Any = self.model.language_model
            if has_tied_embeddings(language_model):
                names = {id(parameter): name for name, parameter in language_model.named_parameters()}
                embeddings = names[id(language_model.get_input_embeddings().weight)]
                for name, parameter in language_model.named_parameters(remove_duplicate=False):
                    if names[id(parameter)] == embeddings:
                        weights[name] = weights[embeddings]
            others = self._other_tensors()
            if self._stored.transposes or others:
                # save_pretrained would reverse the layout by the shapes of the live parameters, which may be shards,
                # and rename tensors of other parts: so it is done here, and its own conversions are switched off.
                split = (part for name, tensor in weights.items() for part in self._stored.split(name, tensor))
                weights = {name: tensor.contiguous() for name, tensor in split} | others
                language_model._weight_conversions = []
            language_model.save_pretrained(path, state_dict=weights)
            # The model wrote the type of the weights it holds (float32 master weights), not of those it was given.
            language_model.config.dtype = self.compute_dtype
            config = language_model.config
            if others:
                config = whole_config(folder_config(self.role.model_args), config)
            config.save_pretrained(path)
        if self.adapters is not None:
            own = dict(self.adapters.own(self._named_tensors()))
            whole = [tensor.cpu() for tensor in self._gather(list(own.values()))]
            if self.rank == 0:
                base = str(self.role.model_args.model_name_or_path)
                self.adapters.save(path / ADAPTER_FOLDER, dict(zip(own, whole, strict=True)), base)
        dist.barrier()

    def _other_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the role's folder that belong to parts which a language model by itself does not have."""
        if self.head is not ModelHead.CAUSAL_LM:
            return {}
        try:
            files = TensorFiles(str(self.role.model_args.model_name_or_path))
        except OSError:
            return {}
        return {name: files.read_region(name, slice(None)) for name in other_names(self.model.language_model, files)}

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, tied ones once, then persistent buffers, under their Hugging Face names."""
        self._reshard()
        yield from persistent_tensors(self.model.language_model).items()

    def _buffers(self) -> dict[str, torch.Tensor]:
        tensors = self._named_tensors()
        return {name: tensor for name, tensor in tensors if not isinstance(tensor, torch.nn.Parameter)}

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Buffers keep theirs: what balances experts by a bias does so in float32."""
        is_weight = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
        return self.compute_dtype if is_weight else tensor.dtype
