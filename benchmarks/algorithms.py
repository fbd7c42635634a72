"""Time of the algorithms on one core, beside what they are measured against. CPU milliseconds, median of repeats.

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

from roll.algorithms.actor_loss import actor_loss, actor_loss_options
from roll.algorithms.advantages import AdvantageInputs, AdvantageOptions, estimate_advantages
from roll.algorithms.aggregation import denominators_from, denominators_of
from roll.algorithms.loss_types import LossInputs
from roll.algorithms.returns import generalized_advantages
from roll.algorithms.reward_processing import RewardOptions, RewardPostprocessor, token_level_rewards
from roll.models.partitions import balance_partitions, pack_sequences


def cpu_milliseconds(function: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        function()
    samples = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        samples.append(time.process_time() - begin)
    return 1e3 * float(np.median(samples))


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


def advantage_rows(repeats: int) -> list[tuple[str, float, float, str]]:
    rows = length = 1024
    mask, holes = torch.ones(rows, length, dtype=torch.bool), tool_mask(rows, length)
    scores, group_ids = torch.randn(rows), torch.arange(rows) // 8
    rewards, values = torch.randn(2, rows, length).unbind(0)
    normalise = RewardPostprocessor(RewardOptions("group", "group"))
    spread = AdvantageInputs(rewards, mask, group_ids)

    def group_advantages() -> Tensor:
        return spread.spread(normalise(scores, group_ids)[0])

    outcome = token_level_rewards(scores, mask)
    inputs = AdvantageInputs(outcome, mask, group_ids)
    loop = cpu_milliseconds(lambda: token_loop_gae(rewards, values, holes, 1.0, 0.95), max(repeats // 5, 3))
    return [
        ("group advantages, 1024 x 1024", cpu_milliseconds(group_advantages, repeats), 0.5, "goal"),
        (
            "grpo through token rewards",
            cpu_milliseconds(lambda: estimate_advantages(inputs, AdvantageOptions("grpo")), repeats),
            0.0,
            "",
        ),
        (
            "GAE, no holes",
            cpu_milliseconds(lambda: generalized_advantages(rewards, values, mask, 1.0, 0.95), repeats),
            loop,
            "loop over tokens",
        ),
        (
            "GAE, tool output between turns",
            cpu_milliseconds(lambda: generalized_advantages(rewards, values, holes, 1.0, 0.95), repeats),
            10.0,
            "goal",
        ),
    ]


def loss_rows(repeats: int) -> list[tuple[str, float, float, str]]:
    results = []
    options = actor_loss_options({"loss_agg_mode": "token-mean"})
    for rows, length in ((256, 1024), (256, 80)):
        mask = torch.ones(rows, length, dtype=torch.bool)
        weights = mask.float()
        log_probs = torch.randn(rows, length).mul_(0.1).sub_(1.0).requires_grad_()
        old = log_probs.detach() + 0.1 * torch.randn(rows, length)
        advantages = torch.randn(rows, length)
        denominators = denominators_from(denominators_of(mask))

        def by_hand(log_probs=log_probs, old=old, advantages=advantages, weights=weights) -> None:
            log_probs.grad = None
            ratio = (log_probs - old).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-(surrogate * weights).sum() / weights.sum()).backward()

        def ours(log_probs=log_probs, old=old, advantages=advantages, mask=mask, denominators=denominators) -> None:
            log_probs.grad = None
            actor_loss(LossInputs(log_probs, advantages, mask, old), options, denominators).loss.backward()

        name = f"PPO loss with metrics, forward and backward, {rows} x {length}"
        results.append((name, cpu_milliseconds(ours, repeats), cpu_milliseconds(by_hand, repeats), "without metrics"))
    return results


def batching_rows(repeats: int) -> list[tuple[str, float, float, str]]:
    lengths = np.random.default_rng(0).integers(1, 4096, 2048)
    bound = -(-int(lengths.sum()) // 8192)
    packs = len(pack_sequences(lengths, 8192))
    return [
        (
            "balance 2048 onto 16, equal counts",
            cpu_milliseconds(lambda: balance_partitions(lengths, 16, True), repeats),
            4.0,
            "goal",
        ),
        ("balance 2048 onto 16", cpu_milliseconds(lambda: balance_partitions(lengths, 16), repeats), 4.0, "goal"),
        (
            f"pack 2048 into {packs} (lower bound {bound})",
            cpu_milliseconds(lambda: pack_sequences(lengths, 8192), repeats),
            4.0,
            "goal",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    # A process that has trained holds freed memory; without this, the first large buffers pay for page faults.
    torch.empty(7_500_000)
    table = Table("what", "ms", "beside", "", title="one core, CPU milliseconds")
    for name, measured, other, label in advantage_rows(repeats) + loss_rows(repeats) + batching_rows(repeats):
        table.add_row(name, f"{measured:.3f}", f"{other:.3f}" if label else "", label)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
