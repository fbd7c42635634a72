"""Time of the driver per prompt: how much the scheduling of rollout costs when engines and rewards cost nothing.

    python -m benchmarks.rollout_overhead [--prompts 2000] [--group-size 8] [--steps 5] [--engines 8]

All prompts of a step are in flight at a time, on simulated engines that finish a share of them a turn.  The figure is
the processor time of the driver for drawing, routing, the turns, rewards, filters and putting the groups in order.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from benchmarks.simulation.clock import Clock, SimulatedCall
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.rewards.base import RewardResult, RewardSample
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, collected
from roll.rollout.groups import EngineCommand, EngineReport, FinishedGroup, SampleGroup
from roll.rollout.loops import GroupSettings, RolloutContext
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

TOKENS = 64
PROMPT = list(range(256))


class QuickEngines:
    """Engines that finish ``per_turn`` of their requests a turn."""

    def __init__(self, clock: Clock, world_size: int, per_turn: int) -> None:
        self.world_size = world_size
        self._clock = clock
        self._per_turn = per_turn
        self._held: list[dict[str, GenerationRequest]] = [{} for _ in range(world_size)]

    def submit(self, rank: int, method: str, command: EngineCommand, deadline: float | None = None) -> SimulatedCall:
        held = self._held[rank]
        held.update((request.request_id, request) for request in command.add)
        for name in command.abort:
            held.pop(name, None)
        done = [held.pop(name) for name in list(held)[: self._per_turn]]
        return SimulatedCall(self._clock, 0.5, EngineReport(groups=[_finished(request) for request in done]))


class QuickRewards:
    world_size = 2

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._result = RewardResult(1.0)

    def submit(self, rank: int, method: str, samples: Sequence[RewardSample]) -> SimulatedCall:
        return SimulatedCall(self._clock, 0.1, [self._result] * len(samples))


class Several:
    """A loop of a user's own: several turns, with something to wait for between them."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        for _ in range(self._turns):
            finished = await context.generate(prompt.token_ids)
        return await context.compute_rewards(context.group(prompt, finished))


def _finished(request: GenerationRequest) -> FinishedGroup:
    size = request.num_samples
    flat = size * TOKENS
    return FinishedGroup(
        request.request_id,
        np.zeros(flat, dtype=np.int32),
        np.zeros(flat, dtype=np.float32),
        np.full(size, TOKENS),
        ["stop"] * size,
        [""] * size,
        [[(0, 0, TOKENS)]] * size,
    )


def seconds_per_step(prompts: int, group_size: int, engines: int, steps: int, turns: int = 0) -> list[float]:
    """Processor time of each step; ``turns`` of a loop of the user's own, 0: the built-in one."""
    clock, numbers = Clock(), count()
    driver = DriverLoop(clock)
    per_turn = max(1, prompts // engines // 8)
    client = EngineClient(QuickEngines(clock, engines, per_turn), max_running_requests=prompts)
    rewards = RewardClient({"d": QuickRewards(clock)})  # type: ignore[dict-item]
    settings = GroupSettings(group_size, SamplingParams(max_new_tokens=TOKENS), seed=0)
    seconds = []
    try:
        for step in range(steps):
            begun = time.process_time()
            draw = lambda n: [PromptRow(f"p{next(numbers)}", "d", "", PROMPT, "", None, {}) for _ in range(n)]  # noqa: E731
            loop = Several(turns) if turns else None
            flow = GroupFlow(client, rewards, draw, settings, step * prompts, loop)
            groups = driver.run(collected(flow, prompts, 0, float("inf"))).groups
            driver.run(client.drain())
            seconds.append(time.process_time() - begun)
            assert [group.order for group in groups] == list(range(step * prompts, (step + 1) * prompts))
    finally:
        driver.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    gc.freeze()  # as a run does
    for turns in (0, 1, 8):
        steps = seconds_per_step(arguments.prompts, arguments.group_size, arguments.engines, arguments.steps, turns)
        name = f"own loop, {turns} requests each" if turns else "built-in loop"
        sys.stdout.write(f"{name:28} {min(steps) / arguments.prompts * 1e6:8.0f} us a prompt\n")


if __name__ == "__main__":
    main()
