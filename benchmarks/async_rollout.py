"""Wall time of synchronous and asynchronous runs on answers of very different length, on real engines.

    python -m benchmarks.async_rollout [--steps 20] [--response 384] [--output output/async_rollout]

Each contestant is a whole run (``roll run`` with the tiny recipe) on two devices, from the untrained model, whose
answers end at random: most are short, a few reach the limit, which is ten times the median.  Learning rate 0 keeps it
so.  Runs that are done are not repeated.  The figure is the median step after the first quarter.

Without idle cores generation and training share what there is, and the table shows little but who waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
STOP_TOKENS = [3 * number + 30 for number in range(7)]
"""Some 1 in 60 of the tokens that an untrained model samples."""


@dataclass(frozen=True)
class Contestant:
    """A run, by what it changes of the recipe."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()


APART = "examples/tiny/async_config.yaml"
CONTESTANTS = (
    Contestant("synchronous, both devices for everything", "examples/tiny/rlvr_config.yaml"),
    Contestant("synchronous, one device each", APART, ("async_generation_ratio=0", "train_infer_correction=null")),
    Contestant("ratio 1, samples finished before updates", APART, ("partial_rollout=false",)),
    Contestant("ratio 1, partial rollout", APART),
    Contestant("ratio 2, partial rollout", APART, ("async_generation_ratio=2",)),
)


def run(contestant: Contestant, steps: int, response: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of every step; of the run made before, if there is one."""
    metrics = folder / "logs/metrics.jsonl"
    done = metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) >= steps
    if not done:
        words = [
            "pretrain=examples/tiny/artifacts/seed0/init",
            "reward_pretrain=examples/tiny/artifacts/seed0/init",
            f"max_steps={steps}",
            "eval_steps=0",
            "validation=null",
            f"response_length={response}",
            "track_with=[jsonl]",
            "actor_train.training_args.learning_rate=1e-12",
            f"actor_infer.generating_args.stop_token_ids={STOP_TOKENS}".replace(" ", ""),
            f"output_dir={folder}",
            f"logging_dir={folder}/logs",
            *contestant.overrides,
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "console.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "roll.cli", "run", contestant.config, *words]
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--response", type=int, default=384, help="length limit in tokens")
    parser.add_argument("--output", type=Path, default=ROOT / "output/async_rollout")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CONTESTANTS)))
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "examples/tiny/prepare.py"], cwd=ROOT, check=True)
    table = Table("rollout", "s a step", "vs synchronous", "waiting for samples, s", "version lag", "mean tokens")
    first = None
    for index in arguments.only:
        contestant = CONTESTANTS[index]
        rows = run(contestant, arguments.steps, arguments.response, arguments.output / str(index))
        rows = rows[len(rows) // 4 :]
        middle = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}
        first = first or middle["time/step_total"]
        table.add_row(
            contestant.name,
            f"{middle['time/step_total']:.2f}",
            f"{first / middle['time/step_total']:.2f}",
            f"{middle['time/step_generate']:.2f}",
            f"{middle.get('scheduler/version_lag/mean', 0.0):.2f}",
            f"{middle['token/response_length/mean']:.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
