"""Time of the algorithms on one core, on the path that a step takes, and of the same written by hand without metrics.

CPU milliseconds, the least of the repeats (what other work on the machine adds is not the code's), in turn with what is
written by hand; the ratio is the median of the pairs.  By hand: vectorised group statistics; the usual loop over tokens
for GAE; the bare expression of PPO's loss.

python benchmarks/algorithms.py [--repeats 30]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from roll.algorithms.aggregation import denominators_from, denominators_of
from roll.algorithms.losses import actor_loss, actor_loss_options
from roll.algorithms.policy_losses import LossInputs
from roll.algorithms.returns import generalized_advantages
from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import Choice
from roll.methods.policy import PolicyMethod
from roll.models.partitions import balance_partitions, pack_sequences
from roll.pipelines.rlvr.config import RLVRConfig
from roll.protocol import DataProto

Row = tuple[str, float, float | None, float | None]
"""Name, milliseconds, those of what is written by hand, and the ratio of the two."""


def row(name: str, repeats: int, ours: Callable[[], object], by_hand: Callable[[], object] | None = None) -> Row:
    functions = [ours] if by_hand is None else [ours, by_hand]
    samples = np.empty((repeats + 3, len(functions)))
    for sample in samples:
        for column, function in enumerate(functions):
            begin = time.process_time()
            function()
            sample[column] = time.process_time() - begin
    least = 1e3 * samples[3:].min(0)
    if by_hand is None:
        return name, float(least[0]), None, None
    return name, float(least[0]), float(least[1]), float(np.median(samples[3:, 0] / samples[3:, 1]))


def token_loop_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    """The usual loop over token positions, vectorised over rows."""
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros(len(rewards))
    running = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = mask[:, t]
        running = torch.where(here, delta + gamma * lambd * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = running * here
    return advantages


def tool_mask(rows: int, length: int) -> Tensor:
    """Turns of 48 tokens with 16 tokens of tool output between them."""
    return (torch.arange(length) % 64 < 48).expand(rows, length).contiguous()


def scored_step(rows: int, length: int) -> DataProto:
    """A step's samples as they come from the engines: responses of random lengths, groups of 8."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.randint(length // 4, length + 1, (rows, 1), generator=generator)
    tensors = {
        "scores": (torch.rand(rows, generator=generator) < 0.5).float(),
        "response_mask": mask,
        "attention_mask": mask,
        "group_ids": torch.arange(rows) // 8,
    }
    columns = {"domain": ["math"] * rows, "finish_reason": ["stop"] * rows}
    return DataProto.from_dict(tensors, {name: np.array(values, object) for name, values in columns.items()})


def grpo_by_hand(scores: Tensor, mask: Tensor, index: Tensor, count: int) -> Tensor:
    """Group statistics by index_add, spread over the tokens."""
    size = torch.zeros(count).index_add_(0, index, torch.ones_like(scores))
    mean = torch.zeros(count).index_add_(0, index, scores) / size
    centred = scores - mean[index]
    std = (torch.zeros(count).index_add_(0, index, centred.square()) / (size - 1)).sqrt()
    return (centred / (std[index] + 1e-6)).unsqueeze(-1) * mask


def advantage_rows(repeats: int) -> list[Row]:
    rows = length = 1024
    batch = scored_step(rows, length)
    config = RLVRConfig(estimator=Choice("grpo"), num_return_sequences_in_group=8)
    advantages = PolicyMethod(config, (config.norm_mean_type, config.norm_std_type), length)
    mask, group_ids, scores = (batch.batch[name] for name in ("response_mask", "group_ids", "scores"))
    lengths, holes, full = mask.sum(-1), tool_mask(rows, length), torch.ones_like(mask)
    rewards, values = torch.randn(2, rows, length).unbind(0)

    def ours(mask: Tensor) -> Callable[[], object]:
        return lambda: generalized_advantages(rewards, values, mask, 1.0, 0.95)

    def loop(mask: Tensor) -> Callable[[], object]:
        return lambda: token_loop_gae(rewards, values, mask, 1.0, 0.95)

    return [
        row(
            "grpo advantages of a step",
            repeats,
            lambda: advantages.add_advantages(batch, lengths),
            lambda: grpo_by_hand(scores, mask, group_ids, rows // 8),
        ),
        row("all that comes before the update, with its metrics", repeats, lambda: advantages.credit(batch)),
        row("GAE, tool output between turns", repeats, ours(holes), loop(holes)),
        row("GAE, no holes", repeats, ours(full), loop(full)),
    ]


def loss_rows(repeats: int) -> list[Row]:
    """PPO's loss as a step computes it: old log-probs, the engine's log-probs, every metric that is always logged."""
    results = []
    options = actor_loss_options(PPOConfig(loss_agg_mode="token-mean"))
    for rows, length in ((1024, 1024), (256, 1024), (256, 80)):
        mask = scored_step(rows, length).batch["response_mask"]
        weights = mask.float()
        log_probs = (torch.randn(rows, length).mul_(0.1).sub_(1.0) * weights).requires_grad_()
        old = (log_probs.detach() + 0.1 * torch.randn(rows, length)) * weights
        rollout = (old + 0.01 * torch.randn(rows, length)) * weights
        advantages = torch.randn(rows, length) * weights
        denominators = denominators_from(denominators_of(mask))

        def by_hand(log_probs=log_probs, old=old, advantages=advantages, weights=weights) -> None:
            log_probs.grad = None
            ratio = (log_probs - old).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-(surrogate * weights).sum() / weights.sum()).backward()

        def ours(
            log_probs=log_probs,
            old=old,
            advantages=advantages,
            mask=mask,
            denominators=denominators,
            rollout=rollout,
        ) -> None:
            log_probs.grad = None
            inputs = LossInputs(log_probs, advantages, mask, old, rollout_log_probs=rollout)
            actor_loss(inputs, options, denominators).loss.backward()

        name = f"PPO loss and metrics, forward and backward, {rows} x {length}"
        results.append(row(name, repeats, ours, by_hand))
    return results


def batching_rows(repeats: int) -> list[Row]:
    lengths = np.random.default_rng(0).integers(1, 4096, 2048)
    bound = -(-int(lengths.sum()) // 8192)
    packs = len(pack_sequences(lengths, 8192))
    return [
        row("balance 2048 onto 16, equal counts", repeats, lambda: balance_partitions(lengths, 16, True)),
        row("balance 2048 onto 16", repeats, lambda: balance_partitions(lengths, 16)),
        row(f"pack 2048 into {packs} (lower bound {bound})", repeats, lambda: pack_sequences(lengths, 8192)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    # A process that has trained holds freed memory; without this, the first large buffers pay for page faults.
    torch.empty(7_500_000)
    table = Table(
        "what", "ms", "by hand", "ratio", title="one core, CPU milliseconds, 1024 x 1024 where nothing else is said"
    )
    for name, *numbers in advantage_rows(repeats) + loss_rows(repeats) + batching_rows(repeats):
        table.add_row(name, *("" if number is None else f"{number:.2f}" for number in numbers))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
