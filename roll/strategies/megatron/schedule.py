"""Passes over all micro-batches of a step, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from roll.protocol.metrics import Metrics
from roll.strategies.base import LossFunction, TensorBatch
from roll.strategies.megatron.micro_batches import MicroBatch
from roll.strategies.micro_batches import is_empty, layout_metrics

Finish = Callable[..., Any]
"""What the last stage does with the outputs of a micro-batch."""


def run_forward(
    chunks: list[nn.Module], parts: list[MicroBatch], outputs: Collection[str], temperature: float
) -> list[TensorBatch]:
    """Collective. On the last stage, the outputs of each micro-batch in its rows' own layout; elsewhere nothing."""

    def finish(part: MicroBatch, computed: dict[str, Tensor], non_loss_data: bool) -> TensorBatch:
        return _aligned(part, computed)

    return _run(chunks, parts, outputs, temperature, finish, forward_only=True)


def run_training(
    chunks: list[nn.Module],
    parts: list[MicroBatch],
    outputs: Collection[str],
    temperature: float,
    loss_fn: LossFunction,
) -> list[Metrics]:
    """Collective. Forward and backward of all micro-batches, then the sum of gradients over ranks.

    Returns:
        The loss function's metrics of each micro-batch with something to learn from, on the last stage.
    """

    def finish(part: MicroBatch, computed: dict[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        aligned = _aligned(part, computed)
        # Every rank goes through the backward pass: others wait for it in their collectives.
        loss = torch.stack([values.sum() for values in aligned.values()]).sum() * 0.0
        metrics: Metrics = {}
        if not is_empty(part.columns):
            own, metrics = loss_fn(aligned, part.columns)
            loss = own if own.requires_grad else loss
            metrics = metrics | layout_metrics(part.layout)
        # A count of 0 tokens: the loss is divided already. Megatron writes into its loss, which may be in the metrics.
        return loss.clone(), torch.zeros((), dtype=torch.int, device=loss.device), metrics

    return [metrics for metrics in _run(chunks, parts, outputs, temperature, finish, forward_only=False) if metrics]


def _aligned(part: MicroBatch, computed: dict[str, Tensor]) -> TensorBatch:
    group = parallel_state.get_context_parallel_group()
    return {name: part.aligned(values, group) for name, values in computed.items()}


def _run(
    chunks: list[nn.Module],
    parts: list[MicroBatch],
    outputs: Collection[str],
    temperature: float,
    finish: Finish,
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Any, Finish]:
        part = next(iterator)
        computed = chunk(part, outputs, temperature)
        return computed, partial(finish, part)

    rows, length = parts[0].input_ids.shape
    several = len(chunks) > 1
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        return schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in chunks] if several else iter(parts),
            model=chunks if several else chunks[0],
            num_microbatches=len(parts),
            seq_length=length * parallel_state.get_context_parallel_world_size(),
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
