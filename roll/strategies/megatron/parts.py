"""The part of a model that a Megatron rank holds: its chunks and parameters, their weights, adapters and checkpoints.

Of each parameter one of the ranks that hold the same writes its part, taken apart into the tensors of the Hugging Face
model (:mod:`roll.checkpoint.tensors`); a reader takes its own part of each of them, and fuses those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from roll.checkpoint.contents import ModelContents
from roll.checkpoint.tensors import MOMENTS, WEIGHT, Piece, StoredTensors, describe_model, resumed, save_training
from roll.config.lora import uses_lora
from roll.config.strategies.megatron import MegatronStrategyConfig
from roll.models.build import freeze_modules
from roll.models.experts import sparse_layers
from roll.models.invariant import is_invariant
from roll.models.loading import TensorFiles
from roll.models.lora import adapter_names, is_trained_whole, source_name
from roll.models.stored import StoredLayout
from roll.protocol.metrics import RankInfo
from roll.strategies.base import ModelHead, ModelStrategy
from roll.strategies.megatron import cpu_compat
from roll.strategies.megatron.adapters import adapted_skeleton, add_to_chunk
from roll.strategies.megatron.correspondence import parameters_of
from roll.strategies.megatron.layers import make_invariant
from roll.strategies.megatron.model import ResponseGPT
from roll.strategies.megatron.optimizer import MasterStates, MatrixShapes, Named
from roll.strategies.megatron.parallel import build_transformer_config, num_experts, rotary_frequencies, skeleton
from roll.strategies.megatron.weights import OwnParameter, read_parameter
from roll.strategies.training.muon import hidden_matrices
from roll.strategies.training.optimizer import TrainingProgress


class OwnPart(ModelStrategy):
    """The part of the model that is on this rank, in the process groups that exist."""

    config: MegatronStrategyConfig
    transformer_config: TransformerConfig
    masters: MasterStates | None = None
    chunks: list[nn.Module]
    parameters: list[OwnParameter]
    progress: TrainingProgress
    _info: RankInfo

    def _read_config(self) -> None:
        hf, args = self._skeleton.config, self.role.model_args
        self.transformer_config = build_transformer_config(hf, args, self.config, self.dims, self.compute_dtype)

    def _read_skeleton(self) -> None:
        args = self.role.model_args
        self._skeleton = skeleton(args, self.head)
        self._sparse_layers = sparse_layers(self._skeleton)  # before adapters wrap some of it
        freeze_modules(self._skeleton, args.freeze_module_prefix)
        self._live = {name: parameter.shape for name, parameter in self._skeleton.named_parameters()}
        self._stored = StoredLayout(self._skeleton, self._live)
        self._shapes = self._stored.stored_shapes()
        self._adapter_tensors: dict[str, torch.Tensor] = {}
        if uses_lora(args):
            self.adapters = adapted_skeleton(self._skeleton, args, self.seed, self.compute_dtype)
        self._live_names = {source_name(name): name for name, p in self._skeleton.named_parameters() if p.requires_grad}
        """The trained parameters' names in the model folder, to those that peft gives them."""
        if self.adapters is not None:
            # Whole on every rank: they are small.
            tensors = {name: p.detach() for name, p in self._skeleton.named_parameters() if p.requires_grad}
            experts = num_experts(self._skeleton.config)
            ups = {adapter_names(weight)[1] for weight in self.adapters.scalings if not weight.endswith(".weight")}
            # peft's B (out, r E) as (out r, E), in which the experts of a rank are some of the columns.
            named = {name: own.reshape(-1, experts) if name in ups else own for name, own in tensors.items()}
            self._shapes |= {source_name(name): tensor.shape for name, tensor in named.items()}
            # A critic's head is the model folder's, unless it continues from an adapter that has one.
            from_adapter = args.adapter_name_or_path is not None
            self._adapter_tensors = {
                source_name(name): tensor for name, tensor in named.items() if from_adapter or source_name(name) == name
            }

    def _build_chunks(self) -> None:
        hf, frequencies = self._skeleton.config, rotary_frequencies(self._skeleton).to(self.device)
        self.gpt_chunks: list[ResponseGPT] = []
        with cpu_compat.construction():
            for index in range(self.dims.vpp):
                stage = index if self.dims.vpp > 1 else None
                config = self.transformer_config
                chunk = ResponseGPT(config, hf, head=self.head, inverse_frequencies=frequencies, virtual_stage=stage)
                if self.adapters is not None:
                    dropout = self.role.model_args.lora_dropout
                    add_to_chunk(chunk, hf, self._shapes, self.adapters.scalings, dropout, self._stored)
                if is_invariant(self.role.model_args):
                    make_invariant(chunk, config)
                self.gpt_chunks.append(chunk.to(self.device))
        self.chunks = list(self.gpt_chunks)
        self._routers = [router for chunk in self.gpt_chunks for router in chunk.routers]
        self._experts = num_experts(hf)
        self.parameters = [
            OwnParameter(correspondence, parameter)
            for chunk in self.gpt_chunks
            for correspondence, parameter in parameters_of(chunk, hf, self.head, self._stored)
        ]
        for own in self.parameters:
            # Megatron marks only what its own initialisation shards. A parameter without the mark counts as a copy, and
            # the gradient norm takes it from one tensor-parallel rank.
            own.parameter.tensor_model_parallel = own.correspondence.layout.dim is not None  # type: ignore[attr-defined]
            if own.correspondence.of_expert:
                # Megatron marks an expert's own process groups with several expert-parallel ranks only.
                own.parameter.allreduce = not self.dims.has_expert_groups  # type: ignore[attr-defined]
            sources = own.correspondence.sources
            frozen = [name for name in sources if self._stored.live_name(name) not in self._live_names]
            if frozen and len(frozen) < len(sources):
                raise ValueError(
                    f"model_args.freeze_module_prefix: {self.role.model_args.freeze_module_prefix!r} freezes "
                    f"{', '.join(frozen)} but not all of {', '.join(sources)}, which Megatron keeps as one; name the "
                    "module above"
                )
            own.parameter.requires_grad_(not frozen)
        self._read_weights()

    def _hidden_matrices(self) -> dict[nn.Parameter, MatrixShapes]:
        """The trained parameters that are matrices of the Hugging Face model's hidden layers, or parts of some."""
        hidden = hidden_matrices(self._skeleton, self._sparse_layers, Tensor.dim)
        names = {name for name, parameter in self._skeleton.named_parameters() if parameter in hidden}
        found: dict[nn.Parameter, MatrixShapes] = {}
        for own in self.parameters:
            matrices: dict[str, list[torch.Size]] = {}
            for source in own.correspondence.sources:
                matrices.setdefault(self._named(source).name, []).append(self._shapes[source])
            if own.parameter.requires_grad and matrices.keys() <= names:
                found[own.parameter] = list(matrices.values())
        return found

    @torch.no_grad()
    def _read_weights(self) -> None:
        files = TensorFiles(str(self.role.model_args.model_name_or_path))
        for own in self.parameters:
            weight = read_parameter(own, files, self._adapter_tensors, self._stored)
            if self.masters is None:
                own.parameter.copy_(weight)
            else:
                self.masters.set_weight(own.parameter, weight.to(self.device))

    @cached_property
    def _originals(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters trained in full alongside adapters, and this rank's part of the base's own, in host memory."""
        if self.adapters is None or self.head is not ModelHead.CAUSAL_LM:
            return []
        files = TensorFiles(str(self.role.model_args.model_name_or_path))
        whole = {source_name(name) for name, _ in self._skeleton.named_parameters() if is_trained_whole(name)}
        return [
            (own.parameter, read_parameter(own, files, {}, self._stored).to(self.compute_dtype))
            for own in self.parameters
            if own.correspondence.sources[0] in whole
        ]

    def save(self, path: Path) -> None:
        assert self.masters is not None
        # A rank or stage may train nothing and count 0 updates, but must take part in the same collectives below.
        newest = torch.tensor(self.masters.step, device=self.device)
        dist.all_reduce(newest, op=dist.ReduceOp.MAX)
        updates = int(newest)
        save_training(path, self.contents, self._written_pieces(updates), {**self.progress.state(), "updates": updates})

    def _written_pieces(self, updates: int) -> Iterator[Piece]:
        """Collective. What this rank writes of each parameter."""
        assert self.masters is not None
        for own in self.parameters:
            if not own.parameter.requires_grad:
                continue
            # Only AdamW counts its updates.
            moments = self.masters.moments(own.parameter)
            counted = updates if moments is MOMENTS else 0
            kinds = (WEIGHT, *(moments if counted or moments is not MOMENTS else ()))
            held = {kind: self.masters.get(own.parameter, kind) for kind in kinds}
            layout, rank, size = own.correspondence.layout, own.shards.rank(), own.shards.size()
            is_shared = layout.dim is None and rank > 0
            if own.replicas.rank() or own.correspondence.is_copy or is_shared:
                continue
            by_kind = {kind: layout.unfuse(tensor, rank, size) for kind, tensor in held.items()}
            for index, source in enumerate(own.correspondence.sources):
                named = self._named(source)
                first, last, left, right = named.place(layout.region(named.shape, rank, size))
                stride = 0 if right - left == named.width else named.width
                shape = (last - first, right - left) if stride else (-1,)
                tensors = {kind: parts[index].reshape(shape) for kind, parts in by_kind.items()}
                if last > first:
                    yield Piece(named.name, tensors, first * named.width + left, stride, counted)

    def load(self, path: Path) -> None:
        assert self.masters is not None
        with resumed(path, self.contents) as (state, stored):
            for own in self.parameters:
                if not own.parameter.requires_grad:  # it is as the model folder has it
                    continue
                names = [self._named(source) for source in own.correspondence.sources]
                updates = max(stored.updates(named.name) for named in names)
                kinds = sorted({kind for named in names for kind in stored.moments(named.name)})
                values = {kind: _read(own, names, stored, kind).to(self.device) for kind in (WEIGHT, *kinds)}
                self.masters.set_weight(own.parameter, values.pop(WEIGHT))
                if values:
                    self.masters.set_moments(own.parameter, values, updates)
        self.progress.restore(state)

    def _named(self, source: str) -> Named:
        """A checkpoint's tensor that holds a source: experts are fused there, and peft gives some another name."""
        part = self._stored.part(source)
        assert not part.is_transposed, source
        live = self._stored.live_name(source)
        return Named(self._live_names.get(live, live), part.begin, torch.Size(self._shapes[source]))

    @cached_property
    def contents(self) -> ModelContents:
        shapes = {name: parameter.shape for name, parameter in self._skeleton.named_parameters()}
        return describe_model(self.role, shapes, set(self._live_names.values()), self.adapter_scalings())


def _read(own: OwnParameter, names: list[Named], stored: StoredTensors, kind: str) -> Tensor:
    layout, rank, size = own.correspondence.layout, own.shards.rank(), own.shards.size()
    parts = []
    for named in names:
        first, last, left, right = named.place(layout.region(named.shape, rank, size))
        if kind != WEIGHT and not stored.has(kind, named.name):
            rows = torch.zeros((last - first) * named.width)  # of a module that had no gradient yet
        else:
            rows = stored.read(kind, named.name, first * named.width, last * named.width)
        own_rows = rows.view(last - first, named.width)[:, left:right]
        parts.append(own_rows if len(named.shape) > 1 else own_rows.flatten())
    return layout.fuse(parts, size)
