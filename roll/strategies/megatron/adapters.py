"""LoRA in Megatron's fused and sharded linear layers.

A Hugging Face projection has its own A (r, in) and B (out, r), as under every other backend, also where Megatron keeps
several projections as one matrix (query, key and value; gate and up).  With tensor parallelism

    column-parallel (rows of W sharded):   A whole on each rank, B this rank's rows;  B_part (A x)
    row-parallel (columns of W sharded):   A this rank's columns, B whole;            B sum_ranks(A_part x_part)

so ranks exchange the r numbers of ``A x`` for each token, never whole hidden states.  The gradient of a whole matrix is
whole on each rank; with sequence parallelism it covers the rank's tokens only, and Megatron sums the parameters marked
``sequence_parallel``.

Dropout is applied to x, with a separate mask for each projection.  Every tensor-parallel rank draws the mask of the
whole x from the same random state and takes the part that it computes with, so the mask is that of one rank.

LoRA of experts: peft adapts the two tensors W: (E, out, in) of a layer's experts; each expert has an A and a B, held as
A: (E r, in), expert by expert, and B: (out, r E), in whose columns the expert is the inner index.  A rank holds those
of its experts, and of them an equal part for each of the ranks that share an expert's matrices:

    A (E r, in)                 rows of the rank's experts, a part of the columns
    B as a matrix (out r, E)    a part of the rows, columns of the rank's experts

Ranks that share a matrix compute with the same tokens, and Megatron sums their partial outputs and partial gradients
of inputs.  So A or B is gathered for a pass where a rank needs it whole, and the gradient is reduce-scattered to the
parts: no element is held, counted in the norm of the gradient or updated twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from roll.config.lora import is_trained_whole_everywhere
from roll.models.lora import Adapters, adapter_names, add_adapters, base_name, is_trained_whole
from roll.models.lora_targets import EXPERT_TENSORS
from roll.models.stored import StoredLayout
from roll.strategies.megatron.correspondence import LINEARS, SHARED_LINEARS, FusedHeads, in_layer

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig, PreTrainedModel

    from roll.config.roles import ModelArguments


class Adapter(nn.Module):
    """A and B of one projection: this tensor-parallel rank's parts."""

    def __init__(self, inputs: int, outputs: int, rank: int, scaling: float, dropout: float, like: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(like.new_empty(rank, inputs))
        self.up = nn.Parameter(like.new_empty(outputs, rank))
        self.scaling, self.dropout = scaling, dropout

    def low(self, input_: Tensor, sharded_dim: int | None, group: ProcessGroup) -> Tensor:
        """``A dropout(x)`` of this rank's part of x along ``sharded_dim``; None: each rank of ``group`` has all of
        it."""
        if self.training and self.dropout:
            shape = list(input_.shape)
            if sharded_dim is not None:
                shape[sharded_dim] *= group.size()
            # Drawn for the whole tensor, on all ranks alike: Megatron's layers run in a random state that differs
            # between tensor-parallel ranks; this one they share.
            kept = torch.empty(shape, dtype=torch.bool, device=input_.device)
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                kept.bernoulli_(1.0 - self.dropout)
            if sharded_dim is not None:
                kept = kept.chunk(group.size(), sharded_dim)[group.rank()]
            input_ = input_ * (kept.to(input_.dtype) / (1.0 - self.dropout))
        return linear(input_, self.down)


class Adapted:
    """A module of Megatron's with adapters by the name of the projection."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = nn.ModuleDict()
        self.uses_adapters = True


class AdaptedColumnLinear(Adapted, ColumnParallelLinear):
    """Column-parallel; its outputs are those of one or more projections."""

    def adapt(
        self,
        ranks: Mapping[str, int],
        scalings: Mapping[str, float],
        dropout: float,
        widths: Mapping[str, int],
        groups: int,
    ) -> None:
        """Add an adapter for each projection in ``ranks``. ``widths`` are the outputs of every projection on this rank,
        in order; of ``groups`` of them each has a part of every projection."""
        self._widths, self._groups = dict(widths), groups
        for name, rank in ranks.items():
            adapter = Adapter(self.input_size, widths[name], rank, scalings[name], dropout, self.weight)
            adapter.down.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            self.adapters[name] = adapter

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, weight, runtime_gather_output)
        if self.adapters and self.uses_adapters:
            output = output + self._update(input_)
        return output, bias

    def _update(self, hidden: Tensor) -> Tensor:
        adapters = cast("dict[str, Adapter]", dict(self.adapters.items()))
        if self.training and any(adapter.dropout for adapter in adapters.values()):
            tokens = 0 if self.sequence_parallel else None
            low = torch.cat([adapter.low(hidden, tokens, self.tp_group) for adapter in adapters.values()], -1)
        else:
            low = linear(hidden, torch.cat([adapter.down for adapter in adapters.values()]))
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        split = low.split([len(adapter.down) for adapter in adapters.values()], -1)
        updates = {
            name: linear(part, adapter.up) * adapter.scaling
            for (name, adapter), part in zip(adapters.items(), split, strict=True)
        }
        parts = [
            updates[name] if name in updates else low.new_zeros(*low.shape[:-1], width)
            for name, width in self._widths.items()
        ]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in parts], -1).flatten(-2)


class AdaptedRowLinear(Adapted, RowParallelLinear):
    """Row-parallel; one projection."""

    def adapt(self, ranks: Mapping[str, int], scalings: Mapping[str, float], dropout: float) -> None:
        """Add an adapter for each projection in ``ranks``."""
        for name, rank in ranks.items():
            inputs = self.input_size_per_partition
            adapter = Adapter(inputs, self.output_size, rank, scalings[name], dropout, self.weight)
            adapter.up.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            self.adapters[name] = adapter

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if self.uses_adapters:
            for adapter in cast("list[Adapter]", list(self.adapters.values())):
                low = adapter.low(input_, -1, self.tp_group)
                if self.sequence_parallel:
                    low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
                else:
                    low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
                output = output + linear(low, adapter.up) * adapter.scaling
        return output, bias


class ExpertAdapter(nn.Module):
    """A and B of one tensor of the experts on this rank: its part of each."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, experts: int, scaling: float, group: ProcessGroup, like: Tensor
    ) -> None:
        """``inputs`` and ``outputs`` are the whole tensor's, whose matrices the ranks of ``group`` share; ``experts``
        are those on this rank."""
        super().__init__()
        self.down = nn.Parameter(like.new_empty(experts * rank, inputs // group.size()))
        self.up = nn.Parameter(like.new_empty(outputs * rank // group.size(), experts))
        self.scaling, self.experts, self.group = scaling, experts, group

    def whole_up(self) -> Tensor:
        """(experts, out, r), scaled."""
        rows = gather_from_sequence_parallel_region(self.up, group=self.group)
        ranks = len(self.down) // self.experts
        return rows.view(-1, ranks, self.experts).permute(2, 0, 1) * self.scaling


class _AdaptedLinear:
    """A matrix of an expert, to whose outputs the update of this pass is added."""

    update: tuple[Tensor, Tensor] | None = None
    """A (r, in) and B (out, r), scaled."""

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if self.update is not None:
            down, up = self.update
            output = output + linear(linear(input_, down), up)
        return output, bias


class ExpertColumnLinear(_AdaptedLinear, ColumnParallelLinear):
    """Gate and up of an expert: its rows are sharded, its gradient of inputs is partial."""


class ExpertRowLinear(_AdaptedLinear, RowParallelLinear):
    """Down of an expert: its columns are sharded, its output is partial."""


class AdaptedExperts(Adapted, SequentialMLP):
    """The experts on this rank."""

    def adapt(
        self, ranks: Mapping[str, int], scalings: Mapping[str, float], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """Add an adapter for each of the two tensors, by the name that peft gives it. ``shapes``: of the whole tensors,
        (E, out, in). Raises ValueError: sizes that do not divide a tensor."""
        like, sharing = self.local_experts[0].linear_fc1.weight, self.tp_group.size()
        for name, rank in ranks.items():
            _, outputs, inputs = shapes[name]
            for size in (outputs, inputs):
                if size % sharing:
                    raise ValueError(
                        f"strategy_config.expert_tensor_parallel_size: {sharing} does not divide {size}, a dimension "
                        f"of the experts' {name}, which has adapters; use 1"
                    )
            self.adapters[name] = ExpertAdapter(
                inputs, outputs, rank, self.num_local_experts, scalings[name], self.tp_group, like
            )

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Megatron's own; ``hidden`` (T, in) are the tokens of each expert, one expert after the other."""
        updates = list(self._updates()) if self.uses_adapters and self.adapters else []
        try:
            for layer, update in updates:
                layer.update = update
            output: tuple[Tensor, Tensor | None] = super().forward(hidden, tokens_per_expert, probs)
        finally:
            for layer, _ in updates:
                layer.update = None
        return output

    def _updates(self) -> Iterator[tuple[_AdaptedLinear, tuple[Tensor, Tensor]]]:
        first, second = (self.adapters[name] for name in EXPERT_TENSORS)
        assert isinstance(first, ExpertAdapter) and isinstance(second, ExpertAdapter)
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        # Rows of gate, then rows of up: of each, this rank has a part.
        halves = first.whole_up().unflatten(1, (2, -1))
        own_rows = halves.chunk(ranks, 2)[rank].flatten(1, 2)
        columns = gather_from_sequence_parallel_region(first.down.t().contiguous(), group=first.group)
        downs = columns.t().unflatten(0, (first.experts, -1)), second.down.unflatten(0, (second.experts, -1))
        for expert, *parts in zip(self.local_experts, downs[0], own_rows, downs[1], second.whole_up(), strict=True):
            yield expert.linear_fc1, (parts[0], parts[1])
            yield expert.linear_fc2, (parts[2], parts[3])


def adapted_skeleton(model: PreTrainedModel, args: ModelArguments, seed: int, dtype: torch.dtype) -> Adapters:
    """Put whole adapters into a model without weights, in place, by the code that does so under every other backend.

    Targets and the random numbers of A are therefore the same everywhere. ``dtype``: of the base, to which a new A is
    rounded. Raises ValueError: see :func:`roll.models.lora.add_adapters`; modules to be trained in full that are no
    embeddings, output matrix or norm.
    """
    # peft puts an adapter on the device of its base, which here is meta: so the base becomes expanded zeros on the CPU,
    # one element of memory each.
    model._apply(lambda tensor: torch.zeros((), dtype=dtype if tensor.is_floating_point() else None).expand_as(tensor))
    model.tie_weights()
    adapters = add_adapters(model, args, seed, torch.float32)
    for name, parameter in model.named_parameters():
        if not is_trained_whole(name) or name.startswith("score."):
            continue
        module = base_name(name).rpartition(".")[0]
        if not is_trained_whole_everywhere(module):
            where = "adapter_name_or_path" if args.adapter_name_or_path else "additional_target"
            raise ValueError(
                f"model_args.{where}: {module} is to be trained in full alongside adapters, which the Megatron backend "
                "does with embed_tokens, lm_head and norms only; leave it out, or use strategy_name: fsdp2_train"
            )
        if not args.adapter_name_or_path:
            # The copy that peft has made of zeros: its numbers are read from the model's folder.
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return adapters


def add_to_chunk(
    chunk: GPTModel,
    hf: PretrainedConfig,
    shapes: Mapping[str, Sequence[int]],
    scalings: Mapping[str, float],
    dropout: float,
    stored: StoredLayout,
) -> None:
    """Give a model chunk this rank's parts of the adapters, not yet filled; ``shapes`` are those of whole tensors, A
    and B among them, ``scalings`` by the Hugging Face name of an adapted weight. Raises ValueError:
    expert-tensor-parallel ranks that do not divide the experts' adapters."""
    tensor_size = chunk.config.tensor_model_parallel_size
    for layer in chunk.decoder.layers:
        is_sparse = not hasattr(layer.mlp, "linear_fc1")
        if is_sparse:
            path = f"model.layers.{layer.layer_number - 1}.mlp.experts"
            if weights := {name: f"{path}.{name}" for name in EXPERT_TENSORS if f"{path}.{name}" in scalings}:
                whole = {name: stored.live_shape(weight) for name, weight in weights.items()}
                ranks = {name: shapes[adapter_names(one)[0]][0] // whole[name][0] for name, one in weights.items()}
                layer.mlp.experts.adapt(ranks, {name: scalings[one] for name, one in weights.items()}, whole)
        has_shared = is_sparse and layer.mlp.shared_experts is not None
        for path in LINEARS[:2] + (SHARED_LINEARS if has_shared else ()) if is_sparse else LINEARS:
            sources, layout = in_layer(f"{path}.weight", hf)
            # `q_proj` of `self_attn.q_proj.weight`.
            weights = {name.split(".")[-2]: f"model.layers.{layer.layer_number - 1}.{name}" for name in sources}
            if not (adapted := {name: weight for name, weight in weights.items() if weight in scalings}):
                continue
            ranks = {name: shapes[adapter_names(weight)[0]][0] for name, weight in adapted.items()}
            factors = {name: scalings[weight] for name, weight in adapted.items()}
            module = layer.get_submodule(path)
            if isinstance(module, AdaptedRowLinear):
                module.adapt(ranks, factors, dropout)
            else:
                widths = {name: shapes[weight][0] // tensor_size for name, weight in weights.items()}
                groups = layout.groups // tensor_size if isinstance(layout, FusedHeads) else 1
                module.adapt(ranks, factors, dropout, widths, groups)


@contextmanager
def disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute without adapters, in a block without gradients."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapted)]
    for module in modules:
        module.uses_adapters = False
    try:
        yield
    finally:
        for module in modules:
            module.uses_adapters = True
