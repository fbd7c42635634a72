"""The tiny task with every generation engine, colocated with the trainer and apart from it, with adapters and without.

    python -m benchmarks.learning_by_engine [--only "vllm apart"] [--steps 60] [--into docs/engines.md]

The recipe is that of ``examples/tiny`` on a model with two heads of size 32, which all engines can compute on a CPU.
Colocated, two engines, or one of two ranks, share two devices with two training ranks; apart, one engine generates on a
device of its own, synchronously or one step ahead with samples that outlive a weight update.  As in ``learning.py``,
runs that are done are not repeated, and the table shows all of that number of steps; ``--into`` writes it between the
page's marks, where the rows of runs that were made elsewhere stay: not every engine goes into every environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.learning import ROOT, Result, console, train

TINY = ROOT / "examples/tiny"
MODULES = {"hf_infer": "roll", "vllm": "vllm", "sglang": "sglang"}
"""Engines, and what must be installed for each."""
LAYOUTS = {
    "colocated": [],
    "apart": [
        "actor_train.device_mapping=[0]",
        "actor_train.training_args.per_device_train_batch_size=256",
        "actor_infer.device_mapping=[1]",
    ],
}
LAYOUTS["apart, async"] = [
    *LAYOUTS["apart"],
    "async_generation_ratio=1",
    "partial_rollout=true",
    "train_infer_correction=decoupled",
]
CUT = "colocated, two ranks"
LAYOUTS[CUT] = [
    "++actor_infer.strategy_args.strategy_config.tensor_parallel_size=2",
    "++actor_infer.num_gpus_per_worker=2",
]
WEIGHTS = {
    "all": ("rlvr_config.yaml", []),
    "LoRA, merged": ("rlvr_lora.yaml", []),
    "LoRA, adapter": ("rlvr_lora.yaml", ["weight_sync.lora=adapter"]),
}
DIFFERENCE, BYTES = "actor/train_infer_log_diff_abs_mean", "model_update/bytes"
BEGIN, END = "<!-- learning by engine -->", "<!-- end of learning by engine -->"


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    engine: str
    layout: str
    weights: str
    """What is trained, and how it is sent."""

    @property
    def title(self) -> str:
        return f"{self.engine} {self.layout} {self.weights}"

    @property
    def key(self) -> str:
        """The beginning of its row."""
        return f"| `{self.engine}` | {self.layout} | {self.weights} |"

    @property
    def config(self) -> Path:
        return TINY / WEIGHTS[self.weights][0]

    def overrides(self, artifacts: Path, seed: int) -> list[str]:
        words = [f"pretrain={model_folder(artifacts, seed)}"]
        words += [f"actor_infer.strategy_args.strategy_name={self.engine}"]
        words += [f"actor_train.data_args.file_name=[{artifacts}/data/train.jsonl]"]
        words += [f"validation.data_args.file_name=[{artifacts}/data/val.jsonl]"]
        words += [*LAYOUTS[self.layout], *WEIGHTS[self.weights][1]]
        if self.weights == "all" and self.layout.startswith("apart"):
            words += ["reference.device_mapping=[0]", "reference.infer_batch_size=256"]
        return words

    def folder(self, arguments: argparse.Namespace, seed: int) -> Path:
        words = f"{self.title} seed{seed} steps{arguments.steps}"
        return arguments.output / words.replace(",", "").replace(" ", "_")


def runs() -> list[Run]:
    """Of all engines."""
    layouts = {engine: [layout for layout in LAYOUTS if layout != CUT or engine != "hf_infer"] for engine in MODULES}
    return [Run(engine, layout, weights) for engine in MODULES for weights in WEIGHTS for layout in layouts[engine]]


def model_folder(artifacts: Path, seed: int) -> Path:
    return artifacts / f"seed{seed}/warm_start/model"


def warm_start(artifacts: Path, seed: int) -> None:
    """The example's data, and its warm start for a model with heads of size 32, where they are not there."""
    model = model_folder(artifacts, seed)
    if not model.is_dir():
        script = (
            "import sys, prepare, tiny_model; tiny_model.HEADS = 2; "
            "prepare.prepare(prepare.Path(sys.argv[1]), [int(sys.argv[2])])"
        )
        subprocess.run([sys.executable, "-c", script, str(artifacts), str(seed)], cwd=TINY, check=True)
        words = [f"seed={seed}", f"pretrain={artifacts}/seed{seed}/init", f"output_dir={model.parent}"]
        words.append(f"sft_train.data_args.file_name={artifacts}/data/sft.jsonl")
        command = [sys.executable, "-m", "roll.cli", "run", str(TINY / "sft_config.yaml"), *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def train_missing(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    possible = [run for run in runs() if find_spec(MODULES[run.engine]) is not None]
    for seed in arguments.seeds:
        for run in possible:
            if arguments.only in run.title and time.monotonic() - began <= arguments.seconds:
                artifacts, folder = arguments.output / "artifacts", run.folder(arguments, seed)
                warm_start(artifacts, seed)
                overrides = run.overrides(artifacts, seed)
                train(run.title, run.config, seed, arguments.steps, folder, overrides, from_example=False)


def mean_of(metric: str, folder: Path) -> float:
    """Of the steps of a run; the first update of the weights, which brings all of them, is left out."""
    lines = (folder / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [row[metric] for row in map(json.loads, lines) if metric in row]
    return statistics.mean(values[1:])


def row(run: Run, folder: Path) -> str:
    """A line of Markdown; empty: the run has not been made."""
    if not (folder / "result.json").exists():
        return ""
    numbers = asdict(Result(**json.loads((folder / "result.json").read_text(encoding="utf-8"))))
    accuracies = [f"{numbers[name]:.3f}" for name in ("before", "after", "greedy")]
    difference, size = mean_of(DIFFERENCE, folder), mean_of(BYTES, folder)
    return f"{run.key} {' | '.join([*accuracies, f'{difference:.1e}', f'{size / 1e3:.0f}'])} |"


def table(arguments: argparse.Namespace, known: Sequence[str] = ()) -> Iterator[str]:
    """Lines of Markdown, the first seed alone; a run that has not been made here has its line in ``known``, if any."""
    names = ["engine", "devices", "trained, sent", "sampled accuracy before", "after", "greedy after"]
    names += ["mean log-prob difference", "kB an update"]
    yield f"| {' | '.join(names)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in runs():
        here = row(run, run.folder(arguments, arguments.seeds[0]))
        yield from [here] if here else [line for line in known if line.startswith(run.key)]


def put_into(page: Path, arguments: argparse.Namespace) -> None:
    """Write the table between the marks of ``page``, over the one that stands there."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    there, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no marks {BEGIN} and {END}")
    lines = "\n".join(table(arguments, there.splitlines()))
    page.write_text(f"{before}{begin}\n{lines}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose title contains this")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after this time")
    parser.add_argument("--output", type=Path, default=ROOT / "output/learning_by_engine")
    parser.add_argument("--into", type=Path, help="a page with marks that gets the table")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    train_missing(arguments)
    for line in table(arguments):
        console.print(line, soft_wrap=True)
    if arguments.into is not None:
        put_into(arguments.into, arguments)


if __name__ == "__main__":
    main()
