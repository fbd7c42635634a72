"""A micro-batch as a Megatron stage computes it: padded tokens, this rank's chunk of them, and where results belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.config.plan.micro_batching import MicroBatching
from roll.models.layouts import AttentionPattern, TokenLayout, padded
from roll.strategies.base import TensorBatch
from roll.strategies.micro_batch_plan import Rows, plan_micro_batches
from roll.strategies.micro_batches import lay_out, micro_batch


@dataclass(frozen=True)
class Arrangement:
    """Who sees whom, and at which position, in a flat run of tokens.

    It travels where Megatron's layers hand on their own description of packed sequences, which tells them nothing: of
    the names that they ask for it has only these, with values that mean rows.
    """

    qkv_format: ClassVar[str] = "sbhd"
    cp_group: ClassVar[None] = None

    position_ids: Tensor
    """int64 (s / ranks,), of this context-parallel rank's chunk."""
    pattern: AttentionPattern
    """Of the whole run."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch (B, L), laid out as (b, s) tokens of which this context-parallel rank computes (b, s / ranks)."""

    rows: Rows
    columns: TensorBatch
    """The rows' columns, for the loss."""
    input_ids: Tensor
    """int64 (b, s / ranks)."""
    arrangement: Arrangement | None
    """None: each of the b sequences is causal, at positions from 0."""
    predictors: Tensor
    """int64 (N,), indices into the flattened (s / ranks, b) hidden states of this chunk."""
    targets: Tensor
    """int64 (N,), the response tokens that they predict."""
    destinations: Tensor
    """int64 (N,), indices of those tokens in the flattened (B, L) batch."""
    layout: TokenLayout
    """The whole of it, before padding."""

    def aligned(self, values: Tensor, context_group: ProcessGroup) -> Tensor:
        """Float32 (B, L) with ``values`` (N,) of all context-parallel ranks at their places, the same on each rank.

        Gradients flow back to this rank's own values.
        """
        shape = self.columns["input_ids"].shape
        flat = values.new_zeros(shape.numel()).scatter(0, self.destinations, values)
        if context_group.size() > 1:
            flat = reduce_from_tensor_model_parallel_region(flat, group=context_group)
        return flat.view(shape)


@dataclass(frozen=True)
class Chunking:
    """How micro-batches are padded and cut."""

    context_rank: int
    context_size: int
    divisor: int
    """The padded length is a multiple of this."""
    same_shape: bool
    """All micro-batches of a pass get one shape, and their number is a multiple of ``count_divisor``."""
    count_divisor: int
    device: torch.device
    shares_prompts: bool = False

    def micro_batches(self, batch: TensorBatch, rule: MicroBatching) -> list[MicroBatch]:
        """The rows of ``batch`` as ``rule`` says; at least one micro-batch, if an empty one."""
        plan = plan_micro_batches(batch, rule, self._count, self.shares_prompts)
        parts = [micro_batch(batch, rows) for rows in plan]
        layouts = [lay_out(part, rule, self.shares_prompts) for part in parts]
        shapes = [(layout.input_ids.shape[0], self._width(layout)) for layout in layouts]
        if self.same_shape:
            shapes = [(max(rows for rows, _ in shapes), max(width for _, width in shapes))] * len(shapes)
        return [self._build(*arguments) for arguments in zip(plan, parts, layouts, shapes, strict=True)]

    def _count(self, count: int) -> int:
        """Replicas need not make as many passes as each other: gradients are summed after the last."""
        count = max(1, count)
        return count + -count % self.count_divisor if self.same_shape else count

    def _width(self, layout: TokenLayout) -> int:
        width = layout.input_ids.shape[1]
        return width + -width % self.divisor

    def _build(self, rows: Rows, part: TensorBatch, layout: TokenLayout, shape: tuple[int, int]) -> MicroBatch:
        whole = padded(layout, *shape).to(self.device)
        height, width = shape
        chunk = width // self.context_size
        start = self.context_rank * chunk
        row, column = whole.predictors // width, whole.predictors % width
        mine = (column >= start) & (column < start + chunk)
        arrangement = None
        if whole.pattern is not None:
            assert whole.position_ids is not None
            arrangement = Arrangement(whole.position_ids[0, start : start + chunk], whole.pattern)
        return MicroBatch(
            rows=rows,
            columns={name: column.to(self.device, non_blocking=True) for name, column in part.items()},
            input_ids=whole.input_ids[:, start : start + chunk].contiguous(),
            arrangement=arrangement,
            predictors=(column[mine] - start) * height + row[mine],
            targets=whole.targets[mine],
            destinations=whole.destinations[mine],
            layout=layout,
        )
