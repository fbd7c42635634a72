"""Wall time of synchronous and asynchronous agentic runs on slow environments, on real engines and a real trainer.

    python -m benchmarks.async_agents [--steps 40] [--median 0.4] [--output output/async_agents]

Each contestant is a whole run (``roll run`` with the recipe of the tiny lake) on the same two devices.  Every step of
an environment takes a log-normal time more (sigma 1: one in a hundred takes ten times the median), drawn from the
episode's seed.  Runs that are done are not repeated.  The figure is the median step after the first quarter, against
the faster synchronous run; the share of the games that are won, over the last quarter of the steps, says what older
samples cost in learning.

Environments wait without a core, so that the figures hold on a machine whose cores are shared, but for the time that
generation and training take from each other where there are fewer idle cores than devices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from roll.environments.frozen_lake import FrozenLake

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "examples/tiny_agentic/lake_config.yaml"
SIGMA = 1.0


class SlowLake:
    """The frozen lake, each of whose steps takes a log-normal time.

    Args:
        median: of that time, in seconds.
        options: those of :class:`FrozenLake`.
    """

    instant: ClassVar[bool] = True  # its coroutines wait on the event loop, and compute next to nothing

    def __init__(self, median: float = 0.4, **options: Any) -> None:
        self._median, self._lake = median, FrozenLake(**options)

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self._rng = random.Random(f"latency/{seed}")
        return self._lake.reset(seed)

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(self._median * self._rng.lognormvariate(0, SIGMA))
        return self._lake.step(action)


@dataclass(frozen=True)
class Contestant:
    """A run, by what it changes of the recipe."""

    name: str
    overrides: tuple[str, ...] = ()


APART = (
    "actor_train.device_mapping=[0]",
    "actor_train.training_args.per_device_train_batch_size=128",
    "actor_infer.device_mapping=[1]",
    "actor_infer.strategy_args.strategy_config.max_num_seqs=512",
)
CONTESTANTS = (
    Contestant("synchronous, both devices for everything"),
    Contestant("synchronous, one device each", APART),
    *(
        Contestant(
            f"asynchronous, ratio {ratio}",
            (*APART, f"async_generation_ratio={ratio}", "train_infer_correction=decoupled"),
        )
        for ratio in (1, 2, 4)
    ),
)


def run(contestant: Contestant, steps: int, median: float, folder: Path) -> list[dict[str, float]]:
    """The metrics of every step; of the run made before, if there is one."""
    metrics = folder / "logs/metrics.jsonl"
    done = metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) >= steps
    if not done:
        words = [
            f"max_steps={steps}",
            "eval_steps=0",
            "track_with=[jsonl]",
            f"custom_envs.lake.env_type=benchmarks.async_agents.{SlowLake.__name__}",
            f"custom_envs.lake.env_config.median={median}",
            f"output_dir={folder}",
            f"logging_dir={folder}/logs",
            *contestant.overrides,
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "roll.cli", "run", RECIPE, *words]
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--median", type=float, default=0.4, help="seconds of an environment's step")
    parser.add_argument("--output", type=Path, default=ROOT / "output/async_agents")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CONTESTANTS)))
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "examples/tiny_agentic/warm_start.py", "lake"], cwd=ROOT, check=True)
    table = Table("rollout", "s a step", "times synchronous", "waiting for episodes, s", "version lag", "won")
    steps = {}
    for index in arguments.only:
        rows = run(CONTESTANTS[index], arguments.steps, arguments.median, arguments.output / str(index))
        steps[index] = rows[len(rows) // 4 :]
    seconds = {index: statistics.median(row["time/step_total"] for row in rows) for index, rows in steps.items()}
    synchronous = min((seconds[index] for index in seconds if index < 2), default=math.nan)
    for index, rows in steps.items():
        table.add_row(
            CONTESTANTS[index].name,
            f"{seconds[index]:.2f}",
            f"{synchronous / seconds[index]:.2f}",
            f"{statistics.median(row['time/step_generate'] for row in rows):.2f}",
            f"{statistics.median(row.get('scheduler/version_lag/mean', 0.0) for row in rows):.2f}",
            f"{statistics.fmean(row['env/lake/success'] for row in rows[-(len(rows) // 3) :]):.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
