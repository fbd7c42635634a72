"""Train SmolLM2-135M-Instruct on instructions that a program verifies, and show what it learnt: ``make run-real``.

Arguments are changes of ``rlvr_config.yaml``, ``key=value``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import prepare  # noqa: E402  found next to this file, whatever script was started

from roll.cli import ready, refuse, run  # noqa: E402
from roll.config.loader import LoadedConfig, load_config  # noqa: E402
from roll.config.reading.errors import ConfigError  # noqa: E402
from roll.tracking.records import METRICS_NAME, read_metrics  # noqa: E402

INTENT = """\
SmolLM2-135M-Instruct learns by GRPO to follow instructions such as "refrain from the use of any commas": 20 steps of
8 prompts x 8 answers, each verified by a program. At the start and every 10 steps it answers 100 other prompts.
About {minutes} minutes on two idle cores, {memory} GB of memory, 2 GB of disk.
"""
MINUTES, MEMORY = 15, 8
SHOWN = 2
"""Prompts whose answers are shown."""


def main(overrides: Sequence[str]) -> int:
    console = Console(emoji=False, highlight=False)
    prepare.prepare()
    console.print(INTENT.format(minutes=MINUTES, memory=MEMORY), markup=False, soft_wrap=True)
    try:
        loaded: LoadedConfig[Any] = ready(partial(load_config, None, FOLDER / "rlvr_config.yaml", None, overrides))
    except ConfigError as error:
        return refuse(error)
    if status := run(loaded):
        return status
    validations = sorted(loaded.plan.dump_dir.glob("validation-*.jsonl"))
    if len(validations) > 1:
        console.print(accuracies(loaded.plan.log_dir / METRICS_NAME))
        changed = answers(validations[0], validations[-1])
        gained = [pair for pair in changed if pair["after"]["score"] > pair["before"]["score"]]
        lost = len(changed) - len(gained)
        console.print(f"followed after training and not before: {len(gained)} prompts; before and not after: {lost}")
        console.print(side_by_side(gained[:SHOWN]))
    model = loaded.plan.output_dir / "model"
    console.print(f"report  {loaded.plan.output_dir / 'report.html'}", markup=False, soft_wrap=True)
    console.print(f"chat    roll chat {model}", markup=False, soft_wrap=True)
    return 0


def accuracies(metrics: Path) -> Table:
    """Share of the validation's prompts whose instruction was followed, by the steps done."""
    table = Table(title="instructions followed", title_justify="left")
    for column in ("after", "sampled", "greedy"):
        table.add_column(column, justify="right")
    for row in read_metrics(metrics):
        if "val/sampled/accuracy" in row:
            numbers = (f"{row[f'val/{way}/accuracy']:.2f}" for way in ("sampled", "greedy"))
            table.add_row(f"{row['step']} steps", *numbers)
    return table


def answers(first: Path, last: Path) -> list[dict[str, dict[str, Any]]]:
    """Rows of prompts whose scores differ between two validations, which sample with the same seeds."""
    pairs = zip(rows(first), rows(last), strict=True)
    return [{"before": one, "after": other} for one, other in pairs if one["score"] != other["score"]]


def rows(file: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def side_by_side(pairs: Sequence[dict[str, dict[str, Any]]]) -> Table:
    """One row a prompt."""
    table = Table("prompt", "before", "after", show_lines=True)
    for pair in pairs:
        question = pair["before"]["prompt"].rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        texts = (pair[time]["response"].removesuffix("<|im_end|>") for time in ("before", "after"))
        table.add_row(Text(question), *map(Text, texts))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
