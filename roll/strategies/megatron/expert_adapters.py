"""LoRA of experts: A and B of all experts on this rank, computed with next to each expert's matrices.

peft adapts the two tensors W: (E, out, in) of a layer's experts; each expert has A and B of its own, held as
A: (E r, in), expert by expert, and B: (out, r E), in whose columns the expert is the inner index.  A rank holds those
of its experts, and of them an equal part for each of the ranks that share an expert's matrices:

    A (E r, in)                 rows of the rank's experts, a part of the columns
    B as a matrix (out r, E)    a part of the rows, columns of the rank's experts

Ranks that share a matrix compute with the same tokens, and Megatron sums their partial outputs and partial gradients
of inputs.  So what a rank has to know whole of A and B is gathered for the pass, and of its gradient each rank gets the
sum over ranks of its own part: no element is held, counted in the norm of the gradient or updated twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from roll.models.lora import EXPERT_TENSORS

_FIRST, _SECOND = EXPERT_TENSORS


class ExpertAdapter(nn.Module):
    """A and B of one tensor of the experts on this rank: its part of each."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, experts: int, scaling: float, group: ProcessGroup, like: Tensor
    ) -> None:
        """
        Args:
            inputs: of the whole tensor, as are ``outputs``; the ranks of ``group`` share its matrices.
            experts: on this rank.
        """
        super().__init__()
        self.down = nn.Parameter(like.new_empty(experts * rank, inputs // group.size()))
        self.up = nn.Parameter(like.new_empty(outputs * rank // group.size(), experts))
        self.scaling, self.experts, self.group = scaling, experts, group

    def whole_down(self) -> Tensor:
        """(experts, r, in)."""
        columns = gather_from_sequence_parallel_region(self.down.t().contiguous(), group=self.group)
        return columns.t().unflatten(0, (self.experts, -1))

    def own_down(self) -> Tensor:
        """(experts, r, in / ranks)."""
        return self.down.unflatten(0, (self.experts, -1))

    def whole_up(self) -> Tensor:
        """(experts, out, r), scaled."""
        rows = gather_from_sequence_parallel_region(self.up, group=self.group)
        ranks = len(self.down) // self.experts
        return rows.view(-1, ranks, self.experts).permute(2, 0, 1) * self.scaling


class _AdaptedLinear:
    """A matrix of an expert, to whose outputs the update of this pass is added."""

    update: tuple[Tensor, Tensor] | None = None
    """A (r, in) and B (out, r), scaled."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if self.update is not None:
            down, up = self.update
            output = output + linear(linear(input_, down), up)
        return output, bias


class ExpertColumnLinear(_AdaptedLinear, ColumnParallelLinear):
    """Gate and up of an expert: its rows are sharded, its gradient of inputs is partial."""


class ExpertRowLinear(_AdaptedLinear, RowParallelLinear):
    """Down of an expert: its columns are sharded, its output is partial."""


class AdaptedExperts(SequentialMLP):
    """The experts on this rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = nn.ModuleDict()
        self.uses_adapters = True

    def adapt(
        self, ranks: Mapping[str, int], scalings: Mapping[str, float], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """Add an adapter for each of the two tensors, by the name that peft gives it.

        Args:
            shapes: of the whole tensors, (E, out, in).

        Raises:
            ValueError: sizes that do not divide a tensor.
        """
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
        updates = self._updates() if self.uses_adapters and self.adapters else []
        try:
            for layer, update in updates:
                layer.update = update
            output: tuple[Tensor, Tensor | None] = super().forward(hidden, tokens_per_expert, probs)
        finally:
            for layer, _ in updates:
                layer.update = None
        return output

    def _updates(self) -> list[tuple[_AdaptedLinear, tuple[Tensor, Tensor]]]:
        """The two layers of each expert, and A and B as each needs them."""
        first, second = self.adapters[_FIRST], self.adapters[_SECOND]
        assert isinstance(first, ExpertAdapter) and isinstance(second, ExpertAdapter)
        ranks, rank = self.tp_group.size(), self.tp_group.rank()
        # Rows of gate, then rows of up: of each, this rank has a part.
        halves = first.whole_up().unflatten(1, (2, -1))
        own_rows = halves.chunk(ranks, 2)[rank].flatten(1, 2)
        layers = [expert.linear_fc1 for expert in self.local_experts]
        layers += [expert.linear_fc2 for expert in self.local_experts]
        parts = [*zip(first.whole_down(), own_rows, strict=True)]
        parts += zip(second.own_down(), second.whole_up(), strict=True)
        return list(zip(layers, parts, strict=True))


def as_matrix(up: Tensor, experts: int) -> Tensor:
    """peft's B (out, r E) as (out r, E), in which the experts of a rank are some of the columns."""
    return up.reshape(-1, experts)
