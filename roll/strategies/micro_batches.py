"""Cutting a rank's rows into micro-batches, and putting results together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch

from roll.protocol.metrics import Metrics, merge_metrics
from roll.strategies.base import TensorBatch


def num_rows(batch: TensorBatch) -> int:
    return batch["input_ids"].shape[0]


def num_micro_batches(batch: TensorBatch, rows_per_micro_batch: int) -> int:
    assert rows_per_micro_batch > 0, rows_per_micro_batch
    return -(-num_rows(batch) // rows_per_micro_batch)


def micro_batch(batch: TensorBatch, index: int, rows_per_micro_batch: int) -> TensorBatch:
    """Rows of micro-batch ``index``, cut to the longest of them; an empty one past the end of the batch.

    An empty micro-batch is one row of one token with nothing to predict: it lets a rank take part in the others'
    collectives and adds nothing to any sum.
    """
    start = index * rows_per_micro_batch
    if start >= num_rows(batch):
        return _empty_micro_batch(batch)
    rows = {name: column[start : start + rows_per_micro_batch] for name, column in batch.items()}
    full = rows["input_ids"].shape[1]
    real = rows["attention_mask"].any(0).nonzero()
    width = int(real[-1]) + 1 if len(real) else 1
    return {
        name: column[:, :width] if column.ndim >= 2 and column.shape[1] == full else column
        for name, column in rows.items()
    }


def is_empty(batch: TensorBatch) -> bool:
    return not bool(batch["response_mask"].any())


def _empty_micro_batch(batch: TensorBatch) -> TensorBatch:
    device = batch["input_ids"].device
    false = torch.zeros(1, 1, dtype=torch.bool, device=device)
    return {
        "input_ids": torch.zeros(1, 1, dtype=torch.int64, device=device),
        "attention_mask": false,
        "response_mask": false,
    }


def merged_floats(parts: Iterable[Metrics]) -> Metrics:
    """Merge the metrics of micro-batches, then turn tensors in them into floats, all in one transfer."""
    merged = merge_metrics(parts)
    places = [
        (name, item.name)
        for name, metric in merged.items()
        for item in fields(metric)  # type: ignore[arg-type]
        if isinstance(getattr(metric, item.name), torch.Tensor)
    ]
    if not places:
        return merged
    values = torch.stack([getattr(merged[name], item).detach().double() for name, item in places]).tolist()
    for (name, item), value in zip(places, values, strict=True):
        merged[name] = replace(merged[name], **{item: value})  # type: ignore[type-var]
    return merged
