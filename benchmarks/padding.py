"""Padding and waiting that packing, dynamic batching and balance leave, counted in tokens.

Responses of many lengths (log-normal, cut at the limit) behind prompts of about 200 tokens, 64 prompts of 8 samples on
8 ranks, one optimizer step. Nothing is computed: the plans are the ones that training makes.

python benchmarks/padding.py [--limit 4096] [--seed 0]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from roll.config.plan.plan import MicroBatching
from roll.models.partitions import workload
from roll.pipelines.model_calls import balanced_order
from roll.strategies.base import TensorBatch
from roll.strategies.training.micro_batches import lay_out, micro_batch, plan_micro_batches

PROMPTS, GROUP, RANKS, ROWS = 64, 8, 8, 4
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=4096, help="longest response in tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
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
