"""Micro-batches as a Megatron stage computes them, run through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.config.plan.plan import MicroBatching
from roll.models.experts import routes_of
from roll.models.layouts import TokenLayout, TopTokens, on_device, padded
from roll.models.patterns import AttentionPattern
from roll.protocol.metrics import Mean, Metrics
from roll.strategies.base import Comparisons, LossFunction, Output, TensorBatch
from roll.strategies.training.micro_batches import (
    Rows,
    is_empty,
    lay_out,
    micro_batch,
    plan_micro_batches,
    targets_of,
)


@dataclass(frozen=True)
class Arrangement:
    """Attention pattern and positions of a flat run of tokens, and what routers have to know of any tokens.

    It is passed as ``packed_seq_params``, which Megatron's layers hand on to attention without interpreting it, except
    for the two attributes below; their values mean ordinary rows.
    """

    qkv_format: ClassVar[str] = "sbhd"
    cp_group: ClassVar[None] = None

    position_ids: Tensor | None
    """int64 (s / ranks,), of this context-parallel rank's chunk; None: each of the b sequences counts from 0."""
    pattern: AttentionPattern | None
    """Pattern of the whole run; None: each of the b sequences is causal."""
    is_padding: Tensor | None = None
    """bool (s / ranks, b), for routers."""
    share: float = 1.0
    """Weight of the micro-batch in the balance loss: 1 / the number of micro-batches of all replicas."""
    routes: Tensor | None = None
    """int64 (s / ranks, b, layers, k), experts that tokens are to go to (:mod:`roll.models.experts`)."""
    sources: Tensor | None = None
    """int64 (s / ranks, b), as of the layout."""
    recorded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer with experts, what its router notes: its tokens' sources (T,) and their experts (T, k)."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch (B, L), laid out as (b, s) tokens of which this context-parallel rank computes (b, s / ranks)."""

    rows: Rows
    columns: TensorBatch
    """The rows' columns, for the loss."""
    layout: TokenLayout
    """The whole of it, before padding."""
    own: TokenLayout
    """This rank's chunk: b sequences of s / ranks tokens."""
    arrangement: Arrangement | None
    """None: each of the b sequences is causal, at positions from 0, and there are no routers."""

    @property
    def predictors(self) -> Tensor:
        """int64 (N,), indices into the flattened (s / ranks, b) hidden states of this chunk."""
        height, width = self.own.input_ids.shape
        return self.own.predictors % width * height + self.own.predictors // width

    def aligned(self, values: Tensor, context_group: ProcessGroup) -> Tensor:
        """(B, L, ...) with ``values`` (N, ...) of all context-parallel ranks at their places, the same on each rank.

        Gradients flow back to this rank's own values.
        """
        whole = self.own.scatter(values, self.columns["input_ids"].shape)
        if context_group.size() > 1:
            # All-reduce forward, identity backward: all of these ranks compute the same loss from the sum, so a
            # backward all-reduce would count its gradient once for each.
            whole = reduce_from_tensor_model_parallel_region(whole, group=context_group)
        return whole


@dataclass(frozen=True)
class Chunking:
    """Padding of micro-batches, and their chunks along the sequence."""

    context_rank: int
    context_size: int
    divisor: int
    """The padded length is a multiple of this."""
    same_shape: bool
    """All micro-batches of a pass get one shape, and their number is a multiple of ``count_divisor``."""
    count_divisor: int
    device: torch.device
    shares_prompts: bool = False
    peers: ProcessGroup | None = None
    """Ranks that exchange tokens for their experts with this one in every pass: they make as many passes."""
    peers_share_shapes: bool = False
    """They can only exchange micro-batches of one shape."""
    routes: bool = False
    """There are routers."""
    balances: bool = False
    """They have a balance loss."""
    top_tokens: TopTokens | None = None
    """See :class:`roll.models.layouts.TokenLayout`."""
    comparisons: Comparisons = ()
    """Targets that the response tokens' distributions are compared with."""

    def micro_batches(self, batch: TensorBatch, rule: MicroBatching) -> list[MicroBatch]:
        """Divide the rows of ``batch`` as ``rule`` says; at least one micro-batch, even if it is empty."""
        plan = plan_micro_batches(batch, rule, self._count, self.shares_prompts)
        parts = [micro_batch(batch, rows) for rows in plan]
        layouts = [lay_out(part, rule, self.shares_prompts) for part in parts]
        sizes = [layout.input_ids.shape for layout in layouts]
        shapes = [(rows, width + -width % self.divisor) for rows, width in sizes]
        # The interleaved schedule runs without variable_seq_lengths: all its messages have one shape.
        if self.same_shape:
            shapes = [(max(rows for rows, _ in shapes), max(width for _, width in shapes))] * len(shapes)
        if self.peers_share_shapes:
            shapes = [(rows, width) for rows, width in self._largest(shapes).tolist()]
        share = 0.0
        if self.balances:  # 1 / the number of micro-batches of all replicas that are not empty
            count = torch.tensor(float(sum(not is_empty(part) for part in parts)), device=self.device)
            dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
            share = 1.0 / max(1.0, float(count))
        return [self._build(*arguments, share) for arguments in zip(plan, parts, layouts, shapes, strict=True)]

    def _largest(self, value: int | list[tuple[int, int]]) -> Tensor:
        largest = torch.tensor(value, device=self.device)
        if self.peers is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.peers)
        return largest

    def _count(self, count: int) -> int:
        # Replicas may make different numbers of passes, since gradients are summed after the last one, unless they
        # exchange tokens for experts. The interleaved schedule refuses a last group smaller than the pipeline.
        count = max(1, count if self.peers is None else int(self._largest(count)))
        return count + -count % self.count_divisor if self.same_shape else count

    def _build(
        self, rows: Rows, part: TensorBatch, layout: TokenLayout, shape: tuple[int, int], share: float
    ) -> MicroBatch:
        whole = padded(layout, *shape)
        whole = replace(
            whole,
            routes=routes_of(whole, part[Output.ROUTES]) if Output.ROUTES in part else None,
            top_tokens=self.top_tokens,
            comparisons=targets_of(layout, part, self.comparisons),
        )
        own = on_device(whole.chunk(self.context_rank, self.context_size), self.device)
        arrangement = None
        if own.pattern is not None or self.routes:
            arrangement = Arrangement(
                position_ids=own.position_ids[0] if own.pattern is not None and own.position_ids is not None else None,
                pattern=own.pattern,
                is_padding=own.sources.t() < 0,
                share=0.0 if is_empty(part) else share,
                routes=None if own.routes is None else own.routes.transpose(0, 1),
                sources=own.sources.t(),
            )
        columns = {name: column.to(self.device, non_blocking=True) for name, column in part.items()}
        return MicroBatch(rows, columns, layout, own, arrangement)


class _Computed(dict[str, Tensor]):
    """Outputs of the last stage. With experts, Megatron reads ``output_tensor.device`` for the scale of its balance
    loss."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.values())).device


def run(
    chunks: list[nn.Module],
    parts: list[MicroBatch],
    outputs: Collection[str],
    temperature: float,
    loss_fn: LossFunction | None = None,
) -> list[Any]:
    """Collective. Forward passes of all micro-batches; with a loss their backward passes too, then the sum of
    gradients over ranks.

    Returns:
        On the last stage, the outputs of each micro-batch in its rows' own layout; with a loss, the metrics of each one
        with something to learn from. Elsewhere nothing.
    """
    group = parallel_state.get_context_parallel_group()

    def finish(part: MicroBatch, computed: dict[str, Tensor], **_: object) -> Any:
        aligned = {name: part.aligned(values, group) for name, values in computed.items()}
        if loss_fn is None:
            return aligned
        # Every rank needs a backward pass, also without a loss: others wait for it in their collectives.
        loss = torch.stack([values.sum() for values in aligned.values()]).sum() * 0.0
        metrics: Metrics = {}
        if not is_empty(part.columns):
            own, metrics = loss_fn(aligned, part.columns)
            loss = own if own.requires_grad else loss
            tokens, padding = part.layout.input_ids.numel(), part.layout.num_padding
            metrics = metrics | {"tokens_per_micro_batch": Mean(tokens), "padding_ratio": Mean(padding, tokens)}
        # A count of 0 tokens: the loss is divided already. Megatron writes into its loss, which may be in the metrics.
        return loss.clone(), torch.zeros((), dtype=torch.int, device=loss.device), metrics

    def forward_step(iterator: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
        part = next(iterator)
        computed = chunk(part, outputs, temperature)
        return _Computed(computed) if isinstance(computed, dict) else computed, partial(finish, part)

    rows, length = parts[0].own.input_ids.shape
    several, forward_only = len(chunks) > 1, loss_fn is None
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        results: list[Any] = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in chunks] if several else iter(parts),
            model=chunks if several else chunks[0],
            num_microbatches=len(parts),
            seq_length=length * parallel_state.get_context_parallel_world_size(),  # which the schedule divides again
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return results if forward_only else [metrics for metrics in results if metrics]
