"""Padding and waiting that packing, dynamic batching and balance leave, counted in tokens.

Responses of many lengths (log-normal, cut at the limit) behind prompts of about 200 tokens, 64 prompts of 8 samples on
8 ranks, one optimizer step. Nothing is computed: the plans are the ones that training makes.

``--ulysses`` instead: rows of a median of 2,000 tokens (log-normal of sigma 1, cut at 16,384), packed, 128 for each
group of ranks, when all ranks of a group share every row, when micro-batches are divided, and when no row is shared.
The time is that of the model of the plans, ``24576 L + L^2`` and an exchange for shared rows, over the one of a perfect
balance without exchange; ranks wait for one another in every pass. Means of 10 seeds.

python benchmarks/padding.py [--limit 4096] [--seed 0] [--ulysses]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from roll.config.plan.plan import MicroBatching
from roll.models.partitions import MATRICES, workload
from roll.pipelines.model_calls import balanced_order
from roll.strategies.base import TensorBatch
from roll.strategies.training.micro_batches import divide, lay_out, micro_batch, plan_micro_batches

PROMPTS, GROUP, RANKS, ROWS, LONGEST = 64, 8, 8, 4, 16384
RULES = {
    f"{ROWS} rows a pass": MicroBatching(ROWS),
    f"{ROWS} rows a pass, padding removed": MicroBatching(ROWS, removes_padding=True),
    "dynamic, 16,384 tokens": MicroBatching(ROWS, max_tokens=16384, width_multiple=64),
    "packed, 16,384 tokens": MicroBatching(ROWS, removes_padding=True, max_tokens=16384, balances=True),
}


def sample_batch(limit: int, seed: int) -> TensorBatch:
    random = np.random.default_rng(seed)
    prompts = np.repeat(random.integers(100, 300, PROMPTS), GROUP)
    centers = np.repeat(random.normal(np.log(limit / 5), 0.5, PROMPTS), GROUP)
    responses = np.clip(np.exp(random.normal(centers, 0.6)), 8, limit).astype(np.int64)
    columns = torch.arange(int((prompts + responses).max()))
    attention = columns < torch.from_numpy(prompts + responses)[:, None]
    return {
        "input_ids": torch.ones(attention.shape, dtype=torch.int64),
        "attention_mask": attention,
        "response_mask": attention & (columns >= torch.from_numpy(prompts)[:, None]),
    }


def measure(shares: list[TensorBatch], rule: MicroBatching) -> tuple[int, float, float]:
    """Passes that every rank makes, the share of computed tokens that is padding, and the largest micro-batch."""
    counts = [len(plan_micro_batches(share, rule, lambda count: count)) for share in shares]
    layouts = [
        lay_out(micro_batch(share, rows), rule, shares_prompts=False)
        for share in shares
        for rows in plan_micro_batches(share, rule, lambda count: max(count, *counts))
    ]
    tokens = sum(layout.input_ids.numel() for layout in layouts)
    padding = sum(layout.num_padding for layout in layouts)
    return max(counts), padding / tokens, max(layout.input_ids.numel() for layout in layouts)


def sharing_times(ranks: int, capacity: int, exchanges: Sequence[float], seed: int) -> NDArray[np.float64]:
    """Times (4, exchanges) of the four ways, under a budget of ``capacity`` tokens a rank."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(2000), 1.0, 128), 2, LONGEST).astype(np.int64)
    attention = torch.arange(LONGEST) < torch.from_numpy(lengths)[:, None]
    batch = {"input_ids": attention, "attention_mask": attention, "response_mask": attention}
    rule = MicroBatching(1, removes_padding=True, max_tokens=ranks * capacity, balances=True)
    exchange = MATRICES * np.array(exchanges)

    def seconds(rows: Sequence[int], sharers: int) -> NDArray[np.float64]:
        own = lengths[list(rows)]
        return (workload(own).sum() + exchange * (1 - 1 / sharers) * own.sum()) / sharers

    def of_divided(rows: Sequence[int]) -> NDArray[np.float64]:
        shares = divide(micro_batch(batch, rows), rule, ranks, shares_prompts=False)
        return np.max([seconds([rows[row] for row in own], shares.count(own)) for own in shares], axis=0)

    plans = [plan_micro_batches(batch, rule, lambda count, more=more: count + more) for more in (0, 1)]
    times = [np.sum([of_divided(rows) for rows in plan], axis=0) for plan in plans]
    rule = replace(rule, max_tokens=LONGEST)
    orders = balanced_order(lengths, ranks).reshape(ranks, -1)
    parts = [{name: column[order] for name, column in batch.items()} for order in orders]
    most = max(len(plan_micro_batches(part, rule, lambda count: count)) for part in parts)
    plans = [plan_micro_batches(part, rule, lambda _: most) for part in parts]
    passes = [
        np.max([seconds(order[list(rows)].tolist(), 1) for order, rows in zip(orders, one, strict=True)], axis=0)
        for one in zip(*plans, strict=True)
    ]
    alone = np.sum(passes, axis=0)
    return np.stack([seconds(range(len(lengths)), ranks), *times, alone]) / (workload(lengths).sum() / ranks)


def compare_sharing(console: Console) -> None:
    exchanges = (0.1, 0.4)
    table = Table("ranks", "tokens of a rank", "exchange", "all shared", "divided", "in one more pass", "none shared")
    for ranks, capacity in product((2, 4, 8), (8192, LONGEST)):
        # A row that does not fit a rank's budget can only be shared.
        times = np.mean([sharing_times(ranks, capacity, exchanges, seed) for seed in range(10)], axis=0)
        for exchange, (*some, alone) in zip(exchanges, times.T, strict=True):
            none = f"{alone:.3f}" if capacity == LONGEST else "does not fit"
            table.add_row(str(ranks), f"{capacity:,}", str(exchange), *(f"{one:.3f}" for one in some), none)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=4096, help="longest response in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ulysses", action="store_true", help="rows shared by ranks")
    options = parser.parse_args()
    if options.ulysses:
        compare_sharing(Console())
        return
    batch = sample_batch(options.limit, options.seed)
    lengths = batch["attention_mask"].sum(1).numpy()
    order = balanced_order(lengths, RANKS)
    shares = [{name: column[rows] for name, column in batch.items()} for rows in order.reshape(RANKS, -1)]

    console = Console()
    table = Table("micro-batches", "passes of a rank", "padding", "largest pass, tokens")
    for name, rule in RULES.items():
        passes, padding, largest = measure(shares, rule)
        table.add_row(name, str(passes), f"{padding:.1%}", f"{largest:,}")
    console.print(table)
    work = workload(lengths)
    for name, rows in (("as they come", np.arange(len(lengths))), ("balanced", order)):
        loads = work[rows].reshape(RANKS, -1).sum(1)
        console.print(f"slowest rank over the mean, rows {name}: {loads.max() / loads.mean():.3f}")


if __name__ == "__main__":
    main()
