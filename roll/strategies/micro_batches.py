"""Cutting a rank's rows into micro-batches, and putting results together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch

from roll.config.plan.micro_batching import MicroBatching
from roll.models.layouts import TokenLayout, packed_layout, row_layout, shared_prompt_layout
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import TensorBatch
from roll.strategies.micro_batch_plan import Rows


def micro_batch(batch: TensorBatch, rows: Rows) -> TensorBatch:
    """Some rows, cut to the longest of them; without rows an empty micro-batch.

    An empty micro-batch is one row of one token with nothing to predict: it lets a rank take part in the others'
    collectives and adds nothing to any sum.
    """
    if not len(rows):
        return _empty_micro_batch(batch)
    index = row_index(rows)
    part = {name: column[index] for name, column in batch.items()}
    full = part["input_ids"].shape[1]
    real = part["attention_mask"].any(0).nonzero()
    width = int(real[-1]) + 1 if len(real) else 1
    return {
        name: column[:, :width] if column.ndim >= 2 and column.shape[1] == full else column
        for name, column in part.items()
    }


def row_index(rows: Rows) -> slice | list[int]:
    """What picks the rows out of a tensor: without a copy where they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)


def lay_out(part: TensorBatch, rule: MicroBatching, shares_prompts: bool) -> TokenLayout:
    """The tokens of a micro-batch as a model computes them under ``rule``."""
    ids, mask = part["input_ids"], part["response_mask"]
    if shares_prompts:
        # A token budget counts what rows without a common prompt have in common with it: no padding either.
        no_padding = rule.removes_padding or rule.max_tokens is not None
        return shared_prompt_layout(ids, mask, packed_layout if no_padding else row_layout)
    return packed_layout(ids, mask) if rule.removes_padding else row_layout(ids, mask, rule.width_multiple)


def layout_metrics(layout: TokenLayout) -> Metrics:
    """Tokens that a micro-batch computes, and the share of them that is padding."""
    tokens = layout.input_ids.numel()
    return {"tokens_per_micro_batch": Mean(tokens), "padding_ratio": Mean(layout.num_padding, tokens)}


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
