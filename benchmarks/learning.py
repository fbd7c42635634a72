"""What each recipe of ``examples/algorithms`` learns on the tiny task, as the table of ``docs/algorithms.md``.

    python benchmarks/learning.py [--steps 60] [--seeds 0 1 2] [--recipes dapo gspo ...] [--seconds 600] [--jobs 2]

A run is a command of its own (``roll run``) and leaves its result in ``output/learning``; runs that are done are not
repeated, so the script can be stopped and started again, and ``--seconds`` makes it start no further run after that
time.  It ends with the table of all results there are with that number of steps.  With ``--jobs`` several runs go on
side by side, each with one device for all roles and twice the micro-batches: the same optimizer steps.

Accuracy is the share of right answers, 4 sampled to each of 200 held-out problems, before the first step and after the
last; its standard error is 0.01 or less.  Rewards differ between recipes, accuracies do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from rich.console import Console

from roll.config.loader import load_config
from roll.pipelines.rlvr.config import RLVRConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples/algorithms"
NO_RECIPES = ("base_config", "with_reference")
ACCURACY, GREEDY, LENGTH = "val/sampled/accuracy", "val/greedy/accuracy", "val/sampled/response_length"

console = Console(width=140, highlight=False)
_warm_start = Lock()
"""Runs of one seed start from one model, which the first of them makes."""


@dataclass(frozen=True)
class Result:
    """One run."""

    recipe: str
    seed: int
    steps: int
    before: float
    """Sampled accuracy before the first step."""
    after: float
    """After the last."""
    greedy: float
    length: float
    """Mean length of the sampled answers after the last step, in tokens."""
    seconds_per_step: float
    """Median over the steps."""


def recipes() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem not in NO_RECIPES)


def train(
    recipe: str,
    file: Path,
    seed: int,
    steps: int,
    folder: Path,
    overrides: Sequence[str] = (),
    from_example: bool = True,
) -> Result:
    """Run a configuration of the tiny task to its end, or read the result of the run that was made in ``folder``.

    Args:
        from_example: it starts from the example's own warm start, which is made if it is not there.

    Raises:
        CalledProcessError: it failed; its log is in ``folder``.
    """
    done = folder / "result.json"
    if done.exists():
        return Result(**json.loads(done.read_text(encoding="utf-8")))
    with _warm_start:
        if from_example:
            subprocess.run([sys.executable, "examples/tiny/warm_start.py", "--seed", str(seed)], cwd=ROOT, check=True)
    own = [f"seed={seed}", f"max_steps={steps}", f"eval_steps={steps}", "track_with=[jsonl]"]
    own += [f"output_dir={folder}", f"logging_dir={folder}/logs"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "console.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "roll.cli", "run", str(file), *own, *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
    result = read_result(recipe, seed, steps, folder)
    done.write_text(json.dumps(asdict(result)), encoding="utf-8")
    console.print(f"{recipe:22s} seed {seed}: {result.before:.3f} -> {result.after:.3f}")
    return result


def read_result(recipe: str, seed: int, steps: int, folder: Path) -> Result:
    """The result of a finished run from its metrics."""
    lines = (folder / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    validations = [row for row in rows if ACCURACY in row]
    first, last = validations[0], validations[-1]
    seconds = statistics.median(row["time/step_total"] for row in rows if "time/step_total" in row)
    return Result(recipe, seed, steps, first[ACCURACY], last[ACCURACY], last[GREEDY], last[LENGTH], seconds)


def on_one_device(file: Path) -> list[str]:
    """Overrides that put all roles of a recipe on one device, with the optimizer steps of two."""
    config = load_config(RLVRConfig, file, check_files=False).config
    words = ["num_gpus_per_node=1"]
    for role in ("actor_train", "actor_infer", "reference", "critic"):
        section = getattr(config, role)
        if section is not None:
            words.append(f"{role}.device_mapping=[0]")
        if section is not None and role in ("actor_train", "critic"):
            accumulated = 2 * section.training_args.gradient_accumulation_steps
            words.append(f"{role}.training_args.gradient_accumulation_steps={accumulated}")
    return words


def train_missing(arguments: argparse.Namespace) -> None:
    """Every recipe with the first seed, then with the next."""
    began = time.monotonic()

    def train_one(seed: int, recipe: str, overrides: Sequence[str]) -> None:
        if time.monotonic() - began <= arguments.seconds:
            folder = arguments.output / f"{recipe}-seed{seed}-steps{arguments.steps}"
            train(recipe, FOLDER / f"{recipe}.yaml", seed, arguments.steps, folder, overrides)

    chosen = [
        (seed, recipe, on_one_device(FOLDER / f"{recipe}.yaml") if arguments.jobs > 1 else [])
        for seed in arguments.seeds
        for recipe in arguments.recipes or recipes()
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(train_one, *zip(*chosen, strict=True)))


def table(folder: Path, steps: int) -> list[str]:
    """Lines of a Markdown table: means over the seeds, with the range of the accuracy after training."""
    by_recipe: dict[str, list[Result]] = defaultdict(list)
    for file in sorted(folder.glob("*/result.json")):
        result = Result(**json.loads(file.read_text(encoding="utf-8")))
        if result.steps == steps:
            by_recipe[result.recipe].append(result)
    lines = [
        "| recipe | seeds | before | after | greedy after | answer tokens | s / step |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, results in by_recipe.items():
        mean = {
            name: statistics.mean(getattr(r, name) for r in results) for name in asdict(results[0]) if name != "recipe"
        }
        after = [r.after for r in results]
        spread = f" ({min(after):.3f} to {max(after):.3f})" if len(results) > 1 else ""
        cells = [f"`{recipe}`", str(len(results)), f"{mean['before']:.3f}", f"{mean['after']:.3f}{spread}"]
        cells += [f"{mean['greedy']:.3f}", f"{mean['length']:.1f}", f"{mean['seconds_per_step']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", choices=recipes(), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after this time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "output/learning")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    train_missing(arguments)
    for line in table(arguments.output, arguments.steps):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
