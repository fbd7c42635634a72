"""Micro-batches of a rank: which rows form each, their layout for the model, and results merged again.

Rows are grouped by number, by tokens, or packed to equal work. Whatever the plan, every row is in exactly one
micro-batch, and all ranks make the same number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from roll.config.plan.micro_batching import MicroBatching
from roll.models.layouts import TokenLayout, leads_a_group, packed_layout, row_layout, shared_prompt_layout
from roll.models.partitions import balance_packs, pack_sequences
from roll.models.vision import PROMPT_KEYS
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import TensorBatch

Rows = Sequence[int]
"""Ascending row indices; a ``range`` where they are consecutive. None of them: a pass without a row."""


def fixed_rows(num_rows: int, rows_per_micro_batch: int) -> list[Rows]:
    """Consecutive rows, so many at a time."""
    assert rows_per_micro_batch > 0, rows_per_micro_batch
    starts = range(0, num_rows, rows_per_micro_batch)
    return [range(start, min(start + rows_per_micro_batch, num_rows)) for start in starts]


def plan_micro_batches(
    batch: TensorBatch, rule: MicroBatching, largest_count: Callable[[int], int], shares_prompts: bool = False
) -> list[Rows]:
    """Divide a rank's rows into micro-batches.

    Args:
        largest_count: collective; the largest of the ranks' numbers of micro-batches.
        shares_prompts: adjacent rows with one prompt stay together as far as the budget allows, and cost it once.

    Returns:
        As many micro-batches as on every other rank; the last of them may be without rows.

    Raises:
        ValueError: a row of more tokens than a micro-batch may compute.
    """
    total = len(batch["input_ids"])
    if rule.max_tokens is None and not rule.balances:
        plan = fixed_rows(total, rule.rows)
        return _filled(plan, largest_count(len(plan)))
    lengths = row_lengths(batch)
    if not rule.balances and not rule.removes_padding and not shares_prompts:
        assert rule.max_tokens is not None
        plan = rows_of_like_lengths(lengths, rule.max_tokens, rule.width_multiple)
        return _filled(plan, largest_count(len(plan)))
    capacity = rule.max_tokens or max(1, int(lengths.max(initial=0)))
    groups = (
        _prompt_groups(batch, lengths, capacity) if shares_prompts else [([row], n) for row, n in enumerate(lengths)]
    )
    costs = np.array([cost for _, cost in groups], dtype=np.int64)
    packs = pack_sequences(costs, capacity)
    wanted = largest_count(max(len(packs), min(rule.min_count, len(groups))) if groups else 0)
    if rule.balances and groups:
        packs = balance_packs(costs, capacity, min(wanted, len(groups)))
    # Every rank's heaviest passes first: ranks that wait for one another in each pass then have like work in it.
    packs.sort(key=lambda pack: -int(costs[pack].sum()))
    plan = [sorted(row for group in pack for row in groups[group][0]) for pack in packs]
    return _filled(plan, wanted)


def row_lengths(batch: TensorBatch) -> np.ndarray:
    """int64 (B,): tokens of each row."""
    lengths: np.ndarray = batch["attention_mask"].sum(1).cpu().numpy()
    return lengths


def rows_of_like_lengths(lengths: np.ndarray, max_tokens: int, width_multiple: int) -> list[Rows]:
    """Rows from long to short, as many at a time as make at most ``max_tokens`` when all are as wide as the longest.

    Raises:
        ValueError: a row that is wider alone.
    """
    plan: list[Rows] = []
    open_rows: list[int] = []
    most = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        if len(open_rows) == most:
            width = max(1, -(-int(lengths[row]) // width_multiple) * width_multiple)
            most = max_tokens // width
            if not most:
                raise ValueError(
                    f"a row of {lengths[row]} tokens is {width} wide in steps of {width_multiple}, more than the "
                    f"{max_tokens} tokens of a micro-batch; max_tokens_per_microbatch_* of {width} would do"
                )
            open_rows = []
            plan.append(open_rows)
        open_rows.append(row)
    return [sorted(rows) for rows in plan]


def _prompt_groups(batch: TensorBatch, lengths: np.ndarray, capacity: int) -> list[tuple[list[int], int]]:
    """Adjacent rows behind one prompt with their tokens (the prompt once), split where they exceed ``capacity``."""
    mask = batch["response_mask"]
    leads = leads_a_group(batch.get(PROMPT_KEYS, batch["input_ids"]), mask).tolist()
    answers = mask.any(1).tolist()
    prompts = torch.where(mask.any(1), mask.int().argmax(1), 0).tolist()
    groups: list[tuple[list[int], int]] = []
    for row, length in enumerate(lengths.tolist()):
        own = length - prompts[row] if answers[row] else 0
        if groups and not leads[row] and groups[-1][1] + own <= capacity:
            groups[-1] = ([*groups[-1][0], row], groups[-1][1] + own)
        else:
            groups.append(([row], length if answers[row] else 0))
    return groups


def _filled(plan: list[Rows], count: int) -> list[Rows]:
    return plan + [range(0)] * (count - len(plan))


def micro_batch(batch: TensorBatch, rows: Rows) -> TensorBatch:
    """Some rows, truncated to the longest of them; without rows an empty micro-batch.

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
    """Index of the rows in a tensor: without a copy where they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)


def lay_out(part: TensorBatch, rule: MicroBatching, shares_prompts: bool) -> TokenLayout:
    """The tokens of a micro-batch as a model computes them under ``rule``."""
    ids, mask = part["input_ids"], part["response_mask"]
    if shares_prompts:
        # A token budget counts what rows without a common prompt have in common with it: no padding either.
        no_padding = rule.removes_padding or rule.max_tokens is not None
        return shared_prompt_layout(ids, mask, packed_layout if no_padding else row_layout, part.get(PROMPT_KEYS))
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
