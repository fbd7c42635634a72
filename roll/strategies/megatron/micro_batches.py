"""A micro-batch as a Megatron stage computes it: padded tokens, this rank's chunk of them, and where results belong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.strategies.base import TensorBatch
from roll.strategies.micro_batch_plan import fixed_rows
from roll.strategies.micro_batches import micro_batch


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch (B, L), as (b, s) tokens of which this context-parallel rank computes (b, s / ranks)."""

    columns: TensorBatch
    """The rows' columns, for the loss."""
    input_ids: Tensor
    """int64 (b, s / ranks)."""
    predictors: Tensor
    """int64 (N,), indices into the flattened (s / ranks, b) hidden states of this chunk."""
    targets: Tensor
    """int64 (N,), the response tokens that they predict."""
    destinations: Tensor
    """int64 (N,), indices of those tokens in the flattened (B, L) batch."""

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

    def micro_batches(self, batch: TensorBatch, rows: int) -> list[MicroBatch]:
        """The rows of ``batch``, ``rows`` at a time; at least one micro-batch, if an empty one."""
        plan = fixed_rows(len(batch["input_ids"]), rows)
        count = max(1, len(plan))
        if self.same_shape:
            count += -count % self.count_divisor
        plan += [range(0)] * (count - len(plan))
        parts = [micro_batch(batch, own) for own in plan]
        widths = [self._width(part) for part in parts]
        if self.same_shape:
            widths = [max(widths)] * count
        heights = [rows if self.same_shape else len(part["input_ids"]) for part in parts]
        return [self._build(*arguments) for arguments in zip(parts, heights, widths, strict=True)]

    def _width(self, part: TensorBatch) -> int:
        """Columns up to the last one that predicts something, rounded up."""
        used = part["response_mask"][:, 1:].any(0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1
        return width + -width % self.divisor

    def _build(self, part: TensorBatch, height: int, width: int) -> MicroBatch:
        columns = {name: column.to(self.device, non_blocking=True) for name, column in part.items()}
        ids = columns["input_ids"]
        length = ids.shape[1]
        chunk = width // self.context_size
        start = self.context_rank * chunk
        padded = torch.nn.functional.pad(ids[:, :width], (0, max(0, width - length), 0, height - ids.shape[0]))
        row, column = columns["response_mask"][:, 1:].nonzero(as_tuple=True)
        mine = (column >= start) & (column < start + chunk)
        row, column = row[mine], column[mine]
        return MicroBatch(
            columns=columns,
            input_ids=padded[:, start : start + chunk].contiguous(),
            predictors=(column - start) * height + row,
            targets=ids[row, column + 1],
            destinations=row * length + column + 1,
        )
