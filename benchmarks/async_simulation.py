"""Step time and idle devices of synchronous and asynchronous rollout, on the project's own schedulers.

Engines, rewards, training and the clock are simulated (``benchmarks/simulation``); which groups are begun when, what a
step waits for and what a weight update interrupts is decided by the code of real runs.  Every contestant has the same
devices and the same work: ``--samples`` samples a device and step, at most ``--most-samples``, in groups of 8.  The
synchronous one uses all devices for generation and then for training; the others divide them, in the way that serves
each best.

    python -m benchmarks.async_simulation [--devices 8,64,512,4096] [--steps 24] [--task rlvr|agentic] [--lengths FILE]

``--lengths`` takes lengths that a run has recorded: the ``train-*.jsonl`` of its ``rollout_dump_dir``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.clock import Clock, SimulatedCall
from benchmarks.simulation.engine import EngineCosts, SimulatedEngines
from roll.config.plan.plan import RunAhead
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.rewards.base import RewardResult, RewardSample
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, collected
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import GroupSettings
from roll.rollout.rewarding import RewardClient
from roll.rollout.scheduling import AsyncScheduler, prompt_codec
from roll.strategies.engines.requests import SamplingParams

GROUP_SIZE = 8
PROMPT_TOKENS = 512
MOST_ENGINES = 256
SYNC_SECONDS = 2.0
REWARD_SECONDS = 0.5
TRAIN_RATE = 8_000.0
"""Tokens that a device trains on in a second, all passes of a step together."""
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices, for training, that the asynchronous contestants try."""
TRIED_UP_TO = 8
"""Devices; on more of them each contestant keeps the share that served it best."""
WARM_UP = 1 / 3
"""Of the steps, that no figure counts."""


@dataclass(frozen=True)
class Task:
    """Distribution of samples: lengths are log-normal, environments hold some up."""

    median: float = 2_000
    sigma: float = 1.0
    longest: int = 16_384
    away_median: float = 0.0
    """Seconds that a sample's environment takes in all; 0: none."""
    away_sigma: float = 0.8
    recorded: tuple[int, ...] = ()

    def draw(self, request_id: str, index: int) -> tuple[int, float]:
        rng = random.Random(f"{request_id}/{index}")
        if self.recorded:
            tokens = rng.choice(self.recorded)
        else:
            tokens = int(self.median * math.exp(rng.gauss(0, self.sigma)))
        away = self.away_median * math.exp(rng.gauss(0, self.away_sigma)) if self.away_median else 0.0
        return max(1, min(self.longest, tokens)), away


TASKS = {"rlvr": Task(), "agentic": Task(median=3_000, sigma=0.7, away_median=60.0)}


@dataclass(frozen=True)
class Mode:
    """A contestant; without a ratio the synchronous one."""

    name: str
    ratio: float | None = None
    partial: bool = True
    additional: float = 0.0
    """Prompts beyond the capacity, as a share of a step's."""
    shared: bool = False
    """All devices generate and then train, as in the synchronous run."""

    @property
    def takes_turns(self) -> bool:
        return self.shared or self.ratio is None


MODES = (
    Mode("synchronous"),
    Mode("one step off", 1.0, partial=False),
    Mode("partial rollout, ratio 1", 1.0),
    Mode("partial rollout, ratio 2", 2.0),
    Mode("partial rollout, ratio 4", 4.0),
    Mode("ratio 2, a quarter more prompts", 2.0, additional=0.25),
    Mode("shared devices, ratio 1", 1.0, shared=True),
    Mode("shared devices, ratio 2", 2.0, shared=True),
    Mode("shared devices, ratio 4", 4.0, shared=True),
)


@dataclass(frozen=True)
class Figures:
    """Of the steps after the warm-up."""

    step_seconds: float
    idle: float
    """Share of device-seconds in which a device had nothing to do."""
    version_lag: float
    """Mean over tokens."""
    stale: float
    """Groups given up, for each one trained on."""
    training_share: float = 1.0


class SimulatedRewards:
    """Reward workers that take a while and like everything."""

    world_size = 1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def submit(self, rank: int, method: Callable[..., Any], samples: Sequence[RewardSample]) -> SimulatedCall:
        return SimulatedCall(self._clock, REWARD_SECONDS, [RewardResult(1.0) for _ in samples])


class Simulation:
    """One contestant on a number of devices, with ``samples`` samples a step."""

    def __init__(self, mode: Mode, task: Task, devices: int, samples: int, training_share: float) -> None:
        self.mode = mode
        self.devices = devices
        self.prompts = max(1, samples // GROUP_SIZE)
        self.training = devices if mode.takes_turns else max(1, round(devices * training_share))
        generating = devices if mode.takes_turns else devices - self.training
        self.num_engines = min(generating, MOST_ENGINES)
        self.per_engine = generating / self.num_engines
        self.clock = Clock()
        costs = EngineCosts()
        # An engine stands for that many of one device each, with its samples spread evenly over them.
        costs = replace(
            costs,
            per_row=costs.per_row / self.per_engine,
            devices=self.per_engine,
            slots=int(costs.slots * self.per_engine),
            prefill_rate=costs.prefill_rate * self.per_engine,
        )
        self.engines = SimulatedEngines(self.num_engines, self.clock, costs, task.draw, PROMPT_TOKENS)
        self.trained_seconds = 0.0

    def run(self, steps: int) -> Figures:
        """Simulate ``steps`` steps."""
        engines = EngineClient(self.engines, max_running_requests=10**9, slice_seconds=0.5)
        rewards = RewardClient({"d": SimulatedRewards(self.clock)})  # type: ignore[dict-item]
        warm_up = int(steps * WARM_UP)
        driver = DriverLoop(self.clock)
        try:
            if self.mode.ratio is None:
                return self._synchronous(driver, engines, rewards, steps, warm_up)
            return self._asynchronous(driver, engines, rewards, steps, warm_up)
        finally:
            driver.close()

    def _synchronous(
        self, driver: DriverLoop, engines: EngineClient, rewards: RewardClient, steps: int, warm_up: int
    ) -> Figures:
        numbers = count()
        settings = GroupSettings(GROUP_SIZE, SamplingParams(max_new_tokens=1), seed=0)
        for step in range(steps):
            if step == warm_up:
                begin = self._mark()
            self.engines.exchange(step, SYNC_SECONDS)
            draw = lambda n: [_row(next(numbers)) for _ in range(n)]  # noqa: E731
            flow = GroupFlow(engines, rewards, draw, settings, step * self.prompts)
            result = driver.run(collected(flow, self.prompts, 0, float("inf")))
            driver.run(engines.drain())
            self.clock.sleep(self._training_seconds(result.groups))
        return self._figures(begin, steps - warm_up, 0.0, 0.0)

    def _asynchronous(
        self, driver: DriverLoop, engines: EngineClient, rewards: RewardClient, steps: int, warm_up: int
    ) -> Figures:
        numbers = count()
        assert self.mode.ratio is not None
        settings = GroupSettings(GROUP_SIZE, SamplingParams(max_new_tokens=1), seed=0)
        flow = GroupFlow(engines, rewards, lambda n: [_row(next(numbers)) for _ in range(n)], settings)
        additional = int(self.prompts * self.mode.additional)
        scheduler = AsyncScheduler(
            flow,
            RunAhead.of(self.mode.ratio, self.prompts, additional),
            prompt_codec(lambda domain, name: _row(int(name))),
            10**6,
            float("inf"),
            in_flight=self.mode.partial,
            takes_turns=self.mode.takes_turns,
        )
        driver.spawn(scheduler.keep_going())
        lag = tokens = 0.0
        for step in range(steps):
            if step == warm_up:
                begin, lag, tokens, stale = self._mark(), 0.0, 0.0, scheduler.ledger.stale
            driver.run(scheduler.pause())
            self.engines.exchange(step, SYNC_SECONDS)
            scheduler.exchanged(step)
            groups = driver.run(scheduler.collect(step))
            samples = [one for group in groups for one in group.members]
            for version, number in (pair for one in samples for pair in one.version_counts()):
                lag += (step - version) * number
                tokens += number
            driver.run(SimulatedCall(self.clock, self._training_seconds(groups)))
        scheduler.check()
        given_up = (scheduler.ledger.stale - stale) / ((steps - warm_up) * self.prompts)
        return self._figures(begin, steps - warm_up, lag / tokens, given_up)

    def _training_seconds(self, groups: Sequence[SampleGroup]) -> float:
        tokens = sum(len(one.response_ids) + PROMPT_TOKENS for group in groups for one in group.members)
        seconds = float(tokens) / (TRAIN_RATE * self.training)
        self.trained_seconds += seconds
        return seconds

    def _mark(self) -> tuple[float, float, float]:
        return self.clock.now, self.engines.busy_seconds, self.trained_seconds

    def _figures(self, begin: tuple[float, float, float], steps: int, lag: float, stale: float) -> Figures:
        seconds, generated, trained = (now - then for now, then in zip(self._mark(), begin, strict=True))
        busy = generated * self.per_engine + trained * self.training
        return Figures(seconds / steps, 1 - busy / (seconds * self.devices), lag, stale, self.training / self.devices)


def best(mode: Mode, task: Task, devices: int, samples: int, steps: int, shares: Sequence[float]) -> Figures:
    """The figures of a contestant with the share of devices for training that makes its steps shortest."""
    runs = [Simulation(mode, task, devices, samples, share).run(steps) for share in shares]
    return min(runs, key=lambda figures: figures.step_seconds)


def _row(number: int) -> PromptRow:
    return PromptRow(f"p{number}", "d", "tag", [0], "", None, {})


def recorded_lengths(file: Path) -> tuple[int, ...]:
    """``response_tokens`` of a file that a run has written to its ``rollout_dump_dir``."""
    return tuple(json.loads(line)["response_tokens"] for line in file.read_text(encoding="utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,64,512,4096")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=16, help="a device and step, but for --most-samples")
    parser.add_argument("--most-samples", type=int, default=4096, help="a step")
    parser.add_argument("--task", choices=TASKS, default="rlvr")
    parser.add_argument("--lengths", type=Path, help="a file of recorded samples")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    if arguments.lengths is not None:
        recorded = recorded_lengths(arguments.lengths)
        task = replace(task, recorded=recorded, longest=max(recorded))
    chosen: dict[str, float] = {}
    table = Table(
        "devices", "samples", "rollout", "s a step", "speed-up", "idle", "version lag", "given up", "for training"
    )
    for devices in map(int, arguments.devices.split(",")):
        samples = min(arguments.most_samples, devices * arguments.samples)
        for mode in MODES:
            shares = (1.0,) if mode.takes_turns else SHARES if devices <= TRIED_UP_TO else (chosen[mode.name],)
            figures = best(mode, task, devices, samples, arguments.steps, shares)
            chosen[mode.name] = figures.training_share
            if mode.ratio is None:
                baseline = figures
            table.add_row(
                f"{devices:,}",
                f"{samples:,}",
                mode.name,
                f"{figures.step_seconds:.1f}",
                f"{baseline.step_seconds / figures.step_seconds:.2f}",
                f"{figures.idle:.0%}",
                f"{figures.version_lag:.2f}",
                f"{figures.stale:.1%}",
                f"{figures.training_share:.0%}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
