"""The worker whose model learns: one class for every role and algorithm; what is minimised arrives with the call."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from roll.distributed import Dispatch, register
from roll.methods.base import Loss, Totals
from roll.methods.losses import SAME_WEIGHTS
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, merge_metrics
from roll.strategies.base import LossFunction, TensorBatch, WeightSelection
from roll.strategies.training.micro_batches import merged_floats
from roll.weight_sync.encoding import LostEngines, SyncOptions, SyncReport
from roll.weight_sync.quantization import quantized_names, rounded
from roll.weight_sync.sender import RayEngines, Update, WeightSender, build_transport
from roll.workers.model import ModelWorker, columns_of

STEP_METRICS = ("grad_norm", "lr", "loss_scale", "tokens_per_micro_batch", "padding_ratio", "moe_")
"""Beginnings of the names of what a strategy itself reports."""


def loss_columns(batch: DataProto, loss: Loss, **_: object) -> tuple[str, ...]:
    """The columns that a call with this loss sends."""
    return loss.columns


class TrainWorker(ModelWorker):
    """A model that learns, on one rank; the policy sends its weights to the engines."""

    _sender: WeightSender | None = None
    _quantized: frozenset[str] = frozenset()

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def step(self, batch: DataProto, loss: Loss, *, mini_batches: int = 1, epochs: int = 1) -> Metrics:
        """Collective. ``epochs`` passes over the rows, with an optimizer step on each of ``mini_batches`` equal parts.

        What the strategy itself reports has the loss's prefix. A loss that is not finite on any rank drops the step on
        all, as a gradient does.
        """
        shares = equal_parts(columns_of(batch), mini_batches)
        totals = self.totals(loss, shares)
        metrics = []
        for _ in range(epochs):
            for share, total in zip(shares, totals, strict=True):
                minimised = partial(watched_loss, loss=partial(loss, totals=total))
                found = self.strategy.train_step(share, minimised, loss.outputs, loss.temperature, loss.comparisons)
                metrics.append(prefixed(found, loss.prefix))
                for later in shares:  # later mini-batches are computed with other weights
                    later.pop(SAME_WEIGHTS, None)
        return merge_metrics(metrics)

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def backward(self, batch: DataProto, loss: Loss) -> Metrics:
        """Collective. The first half of a :meth:`step`: add the gradient of the loss to those since the last optimizer
        step."""
        rows = columns_of(batch)
        (total,) = self.totals(loss, [rows])
        minimised = partial(watched_loss, loss=partial(loss, totals=total))
        found = self.strategy.backward(rows, minimised, loss.outputs, loss.temperature, loss.comparisons)
        return prefixed(found, loss.prefix)

    @register(Dispatch.DP_MP_COMPUTE)
    def optimizer_step(self, prefix: str) -> Metrics:
        """Collective. The second half; ``prefix`` begins the names of the metrics."""
        return prefixed(self.strategy.optimizer_step(), prefix)

    @register(Dispatch.DP_MP_COMPUTE, columns=loss_columns)
    def measure(self, batch: DataProto, loss: Loss) -> Metrics:
        """Collective. The metrics of the loss, without gradient."""
        rows = columns_of(batch)
        outputs = self.strategy.forward(rows, loss.outputs, loss.temperature, loss.comparisons)
        return merged_floats([loss(outputs, rows, loss.counts(rows))[1]])

    def totals(self, loss: Loss, shares: list[TensorBatch]) -> list[Totals]:
        """Collective. The denominators of each mini-batch, in one sum over the ranks."""
        counts = [loss.counts(share) for share in shares]
        shapes = {name: part.shape for name, part in counts[0].items()}
        # Float64: float32 counts tokens exactly up to 2**24 only. All mini-batches at once: one all-reduce a call
        # instead of one an optimizer step.
        flat = torch.stack([torch.cat([part.double().reshape(-1) for part in own.values()]) for own in counts])
        sizes = [shape.numel() for shape in shapes.values()]
        return [
            {name: part.view(shape) for (name, shape), part in zip(shapes.items(), row.split(sizes), strict=True)}
            for row in self.strategy.all_reduce_sum(flat)
        ]

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Collective. Everything needed to continue, written into the folder ``path``; see :meth:`checkpoint_saved`."""
        self.strategy.save(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_saved(self, wait: bool) -> bool:
        """True when this rank's part of the last :meth:`save_checkpoint` is on disk; ``wait`` until it is."""
        return self.strategy.saved(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Collective. The inverse of :meth:`save_checkpoint`."""
        self.strategy.load(Path(path))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(
        self, engines: dict[int, Any], version: int, base_version: int | None, options: SyncOptions
    ) -> SyncReport | LostEngines | None:
        """Collective. Rank 0 sends the policy to ``engines`` and verifies it; the others help to gather.

        Args:
            base_version: what all of the engines hold; None: they are sent everything.
        """
        selection = WeightSelection(base_version is not None, options.adapters_apart)
        # A generator whose steps are collectives: all ranks have to exhaust it, whatever happens on rank 0.
        buckets = self.strategy.named_full_weights(options.bucket_bytes, selection)
        if self.context.rank == 0:
            if options.quantization is not None:
                self._quantized = self._quantized or quantized_names(self.context.role.model_args)
                form, names = options.quantization, self._quantized
                buckets = (
                    [(name, rounded(tensor, form) if name in names else tensor) for name, tensor in bucket]
                    for bucket in buckets
                )
            scalings = self.strategy.adapter_scalings() if options.adapters_apart else {}
            update = Update(version, options.deadline, base_version, scalings, options.patience)
            # Made at the first update; it stays, with its connections and what it remembers.
            if self._sender is None:
                backend, host = current_platform().collective_backend, self.context.master_addr
                transport = build_transport(options.transport, options.directory, backend, host)
                self._sender = WeightSender(transport, options.bucket_bytes, delta=options.mode == "delta")
            return self._sender.try_send(buckets, RayEngines(engines), update)
        for _ in buckets:
            pass
        return None


def prefixed(metrics: Metrics, prefix: str) -> Metrics:
    """Name what a strategy itself reports after the loss."""
    return {prefix + name if name.startswith(STEP_METRICS) else name: metric for name, metric in metrics.items()}


def watched_loss(outputs: TensorBatch, batch: TensorBatch, loss: LossFunction) -> tuple[torch.Tensor, Metrics]:
    """``loss``, whose gradient is nan where its value is not finite.

    Such a loss may have a finite gradient (the infinity of a masked term, say), and only on one rank. The norm of the
    gradient is what all ranks know and agree on.
    """
    value, metrics = loss(outputs, batch)
    if value.requires_grad:
        # Without a wait for the device, and exact where the value is finite.
        factor = torch.ones_like(value.detach()).masked_fill(~value.isfinite(), torch.nan)
        value.register_hook(lambda gradient: gradient * factor)
    return value, metrics


def equal_parts(batch: TensorBatch, count: int) -> list[TensorBatch]:
    """Divide this rank's rows into ``count`` consecutive mini-batches of equal size."""
    total = len(batch["input_ids"])
    assert total % count == 0, f"{total} rows do not divide into {count} mini-batches"
    rows = total // count
    return [{k: v[begin : begin + rows] for k, v in batch.items()} for begin in range(0, total, rows)]
