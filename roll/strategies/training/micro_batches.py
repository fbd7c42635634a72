"""Micro-batches of a rank: the rows of each, their layout for the model, and the merging of their metrics.

Rows are grouped by number, by tokens, or packed to equal work. Whatever the plan, every row is in exactly one
micro-batch, and all ranks make the same number of passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from roll.config.plan.plan import MicroBatching
from roll.models.experts import routes_of
from roll.models.layouts import TargetDistributions, TokenLayout, packed_layout, row_layout, tree_layout
from roll.models.partitions import MATRICES, balance_packs, balance_partitions, pack_sequences
from roll.models.patterns import common_beginnings, ends_of_responses, sharers
from roll.models.vision import PROMPT_KEYS
from roll.protocol.metrics import Mean, Metrics, merge_metrics
from roll.strategies.base import Comparison, TensorBatch, target_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

Rows = Sequence[int]
"""Ascending row indices; a ``range`` where they are consecutive. Empty: a pass without a row."""


def fixed_rows(num_rows: int, rows_per_micro_batch: int) -> list[Rows]:
    """Consecutive rows, ``rows_per_micro_batch`` at a time."""
    starts = range(0, num_rows, rows_per_micro_batch)
    return [range(start, min(start + rows_per_micro_batch, num_rows)) for start in starts]


def plan_micro_batches(
    batch: TensorBatch, rule: MicroBatching, largest_count: Callable[[int], int], shares_prompts: bool = False
) -> list[Rows]:
    """Divide a rank's rows into micro-batches.

    Rows that a loss compares (adjacent rows of one ``unit_ids``) are never separated, and count as one row where
    ``rule`` counts rows.

    Args:
        largest_count: collective; the largest of the ranks' numbers of micro-batches.
        shares_prompts: rows with one prompt, or of which one continues the other's, stay together as far as the budget
            allows; what they share costs once.

    Returns:
        As many micro-batches as on every other rank; the last of them may be without rows.

    Raises:
        ValueError: a row of more tokens than a micro-batch may compute.
    """
    total = len(batch["input_ids"])
    units = None
    if (ids := batch.get("unit_ids")) is not None:
        starts = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
        units = [list(range(begin, end)) for begin, end in pairwise(starts) if end > begin]
    if rule.max_tokens is None and not rule.balances:
        if units is None:
            plan = fixed_rows(total, rule.rows)
        else:
            plan = [[row for i in some for row in units[i]] for some in fixed_rows(len(units), rule.rows)]
        return plan + [range(0)] * (largest_count(len(plan)) - len(plan))
    lengths: np.ndarray = batch["attention_mask"].sum(1).cpu().numpy()
    if not rule.balances and not rule.removes_padding and not shares_prompts:
        assert rule.max_tokens is not None
        plan = rows_of_like_lengths(lengths, rule.max_tokens, rule.width_multiple, units)
        return plan + [range(0)] * (largest_count(len(plan)) - len(plan))
    capacity = rule.max_tokens or max(1, int(lengths.max(initial=0)))
    if units is not None:
        groups = [(unit, int(lengths[unit].sum())) for unit in units]
        if shares_prompts:  # tokens that a unit shares are counted once
            common = common_beginnings(keys_of(batch), batch["response_mask"])
            groups = [(unit, cost - sum(sharers(common[np.ix_(unit, unit)])[1])) for unit, cost in groups]
        capacity = rule.max_tokens or max((cost for _, cost in groups), default=1)
    elif shares_prompts:
        groups = _families(batch, lengths, capacity)
    else:
        groups = [([row], n) for row, n in enumerate(lengths)]
    costs = np.array([cost for _, cost in groups], dtype=np.int64)
    packs = pack_sequences(costs, capacity)
    # Called on every rank, with 0 where there are no rows: it is a collective.
    wanted = largest_count(max(len(packs), min(rule.min_count, len(groups))) if groups else 0)
    if rule.balances and groups:
        # This rank makes `wanted` passes in any case; spreading its rows over them costs less than empty passes.
        packs = balance_packs(costs, capacity, min(wanted, len(groups)))
    # Heaviest first on every rank: ranks wait for one another in each pass, so the i-th passes should be alike.
    packs.sort(key=lambda pack: -int(costs[pack].sum()))
    plan = [sorted(row for group in pack for row in groups[group][0]) for pack in packs]
    return plan + [range(0)] * (wanted - len(plan))


def rows_of_like_lengths(
    lengths: np.ndarray, max_tokens: int, width_multiple: int, units: list[list[int]] | None = None
) -> list[Rows]:
    """Group rows from long to short, so that each group, padded to its longest row, has at most ``max_tokens``.
    ``units``: rows that stay together, as long as the longest of them; None: every row alone. Raises ValueError: a row
    (a unit) that is wider alone."""
    units = units or [[row] for row in range(len(lengths))]
    longest = np.array([lengths[unit].max() for unit in units], dtype=np.int64)
    plan: list[list[int]] = []
    room = width = 0
    for index in np.argsort(-longest, kind="stable").tolist():
        size = len(units[index])
        if size > room:
            width = max(1, -(-int(longest[index]) // width_multiple) * width_multiple)
            room = max_tokens // width
            if size > room:
                what = "a row" if size == 1 else f"{size} rows that are compared, the longest"
                raise ValueError(
                    f"{what} of {longest[index]} tokens, {width} wide in steps of {width_multiple}, needs more than "
                    f"the {max_tokens} tokens of a micro-batch; max_tokens_per_microbatch_* of {size * width} would do"
                )
            plan.append([])
        plan[-1] += units[index]
        room -= size
    return [sorted(rows) for rows in plan]


SHARING = 0.1
"""Time that ranks of a shared row spend on exchanges, in units of its matrix products, if there are many ranks: an
estimate for NVLink and hidden states of 4,096. Where it takes less, plans lose at most this much by waiting."""


def divide(part: TensorBatch, rule: MicroBatching, ranks: int, shares_prompts: bool) -> list[list[int]]:
    """The rows of a micro-batch that each of ``ranks`` ranks computes; ranks with the same rows share each of them.

    Rows stay shared unless the slowest rank finishes earlier when they are divided, and no rank exceeds its part of the
    token budget (without a budget: as many tokens as if all rows were as long as the longest). Rows that share a prompt
    stay together.

    Depends on nothing but the arguments, so that all ranks make the same plan.
    """
    lengths: np.ndarray = part["attention_mask"].sum(1).cpu().numpy()
    total, width = len(lengths), -(-int(lengths.max()) // rule.width_multiple) * rule.width_multiple
    units = _families(part, lengths, total * width) if shares_prompts else [([row], n) for row, n in enumerate(lengths)]
    if not (rule.removes_padding or (shares_prompts and rule.max_tokens is not None)):
        lengths = np.full(total, width)
        units = [(rows, len(rows) * width) for rows, _ in units]
    tokens = np.array([count for _, count in units])
    work = tokens * (MATRICES + np.array([lengths[rows].max() for rows, _ in units]))
    capacity = (rule.max_tokens or total * width) / ranks

    def best(some: list[int], ranks: int) -> tuple[float, list[list[int]]]:
        """The time that units of rows take on so many ranks, and the units of each."""
        exchange = SHARING * MATRICES * (1 - 1 / ranks)
        together = (work[some].sum() + exchange * tokens[some].sum()) / ranks, [some] * ranks
        divisor = next((size for size in range(2, ranks + 1) if ranks % size == 0), ranks)
        if ranks == 1 or len(some) < divisor:
            return together
        parts = [[some[place] for place in own] for own in balance_partitions(work[some], divisor)]
        if max(tokens[own].sum() for own in parts) > capacity * (ranks // divisor):
            return together
        found = [best(own, ranks // divisor) for own in parts]
        apart = max(time for time, _ in found), [own for _, shares in found for own in shares]
        return min(together, apart, key=lambda one: one[0])

    return [
        sorted(row for unit in share for row in units[unit][0]) for share in best(list(range(len(units))), ranks)[1]
    ]


def _families(batch: TensorBatch, lengths: np.ndarray, capacity: int) -> list[tuple[list[int], int]]:
    """Rows of which one continues another's whole prompt, and their tokens; split where they exceed ``capacity``."""
    mask = batch["response_mask"].cpu().numpy().astype(bool)
    common, (first, last) = common_beginnings(keys_of(batch), batch["response_mask"]), ends_of_responses(mask)
    # Other common beginnings, such as a system prompt, would make one family of all rows, which no pack holds.
    common[common < np.minimum.outer(first, first)] = 0
    families: list[tuple[list[int], int]] = []
    family_of_row: dict[int, int] = {}
    for row, length in enumerate(lengths.tolist()):
        relatives = np.flatnonzero(common[row, :row])
        # The newest part of the family, where it has been split. A row without a response costs nothing anywhere.
        place = family_of_row[int(relatives[-1])] if len(relatives) else len(families) - 1 if not last[row] else -1
        if place >= 0:
            rows, cost = families[place]
            cost += (length - int(common[row, rows].max())) if last[row] else 0
            if cost <= capacity:
                families[place] = ([*rows, row], cost)
                family_of_row[row] = place
                continue
        families.append(([row], length if last[row] else 0))
        family_of_row[row] = len(families) - 1
    return families


def micro_batch(batch: TensorBatch, rows: Rows) -> TensorBatch:
    """Select rows, truncated to the longest of them. Without rows: one row of one token with nothing to predict, with
    which a rank takes part in the others' collectives and adds nothing to any sum."""
    if not len(rows):
        nothing = torch.zeros(1, 1, dtype=torch.bool, device=batch["input_ids"].device)
        return {"input_ids": nothing.long(), "attention_mask": nothing, "response_mask": nothing}
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
    """Return an index of the rows: a slice if they are consecutive, which selects without a copy."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)


def keys_of(part: TensorBatch) -> torch.Tensor:
    """int64 (B, L), what distinguishes tokens: ids, and of images their features."""
    return part.get(PROMPT_KEYS, part["input_ids"])


def lay_out(part: TensorBatch, rule: MicroBatching, shares_prompts: bool) -> TokenLayout:
    """Lay out a micro-batch's tokens as ``rule`` says."""
    ids, mask = part["input_ids"], part["response_mask"]
    if shares_prompts:
        # The plan under a token budget counted real tokens, so rows without a common prompt must not be padded either.
        no_padding = rule.removes_padding or rule.max_tokens is not None
        return tree_layout(ids, mask, packed_layout if no_padding else row_layout, keys_of(part))
    return packed_layout(ids, mask) if rule.removes_padding else row_layout(ids, mask, rule.width_multiple)


def targets_of(
    layout: TokenLayout, part: TensorBatch, comparisons: Sequence[Comparison]
) -> tuple[TargetDistributions, ...]:
    """Each comparison's targets for a layout's response tokens, from its columns (B, L, ...) of a micro-batch."""
    found = []
    for one in comparisons:
        names = target_columns(one.name)
        if names[0] in part:
            log_probs, ids, tail = (part[name].flatten(0, 1)[layout.destinations] for name in names)
        else:  # an empty micro-batch: no token to be compared
            ids = part["input_ids"].new_zeros(0, 1)
            log_probs, tail = torch.zeros(0, 1), torch.zeros(0)
        found.append(TargetDistributions(one.name, ids.long(), log_probs, tail, one.temperature, one.divergence))
    return tuple(found)


def with_routes(layout: TokenLayout, column: torch.Tensor, layers: int, role: str) -> TokenLayout:
    """With the experts of ``column`` (B, L, layers, k). Raises ValueError: another number of layers."""
    if (recorded := column.shape[2]) != layers:
        raise ValueError(
            f"{role}.router_replay: the engine has recorded {recorded} layers, and the model has {layers} with "
            "experts; set router_replay.mode: R2 or disabled"
        )
    return replace(layout, routes=routes_of(layout, column))


def replay_metrics(counts: torch.Tensor, groups: Sequence[ProcessGroup | None]) -> Metrics:
    """Collective. What the routers of all ranks of ``groups`` (None: of this rank) have replayed, each its own layers
    and tokens.

    Args:
        counts: int64 (3,), tokens of each layer with experts that took recorded routes, that had none, and that went
            elsewhere than they would have; summed in place.
    """
    for group in groups:
        if group is not None:
            dist.all_reduce(counts, group=group)
    replayed, missing, changed = counts.tolist()
    if missing:
        _warn_once("router_replay: some tokens have no recorded route and choose anew; see moe_replay_missing")
    return {"moe_replay_missing": Mean(missing, replayed + missing), "moe_replay_changed": Mean(changed, replayed)}


def is_empty(batch: TensorBatch) -> bool:
    return not bool(batch["response_mask"].any())


def merged_floats(parts: Iterable[Metrics]) -> Metrics:
    """Merge the metrics of micro-batches and turn their tensors into floats in one transfer: each ``.item()`` would
    wait for the device."""
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
