"""Accuracy by samples of on-policy distillation and of GRPO on the tiny model, over several seeds: runs, table, plot.

    make run                                             # the warm start and the teacher, once
    python -m benchmarks.distillation_curves --seeds 0 1 2 --plot docs/images/distillation.png

Every run starts from the warm start of seed 0, and the teacher is what GRPO made of it in 200 steps; a seed decides
about problems and samples. The configurations are those of ``examples/tiny`` and ``examples/tiny_distill`` with the
overrides below: both algorithms take one optimizer step on each batch of 256 samples, and both take eight. Runs that
are there already are not repeated; validations are 200 held-out problems, four samples each. With eight steps GRPO has
the rate, of two that were tried, with which it learns faster: 4e-4, not the 1e-3 of distillation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

WARM_START, TEACHER = Path("examples/tiny/artifacts/seed0/warm_start/model"), Path("output/tiny_grpo/seed0/model")
SAMPLES = 256
"""Of a step."""
ACCURACY = "val/sampled/accuracy"
EIGHT = ("ppo_epochs=2", "actor_train.training_args.per_device_train_batch_size=32", "max_steps=20")
"""Two passes over four mini-batches of each batch."""
ONE = ("actor_train.training_args.learning_rate=1.5e-3", "max_steps=40")


@dataclass(frozen=True)
class Contestant:
    label: str
    folder: str
    config: str
    overrides: tuple[str, ...]
    style: str

    def run(self, seed: int, output: Path) -> Path:
        """The folder of the seed's run, which is made if it is not there."""
        folder = output / self.folder / f"seed{seed}"
        if not (folder / "report.html").is_file():
            words = [f"seed={seed}", f"output_dir={folder}", f"pretrain={WARM_START}", "eval_steps=5"]
            words += ["actor_train.training_args.save_hf_model=false", *self.overrides]
            words += [f"teacher.model_args.model_name_or_path={TEACHER}"] if "distill" in self.config else []
            subprocess.run([sys.executable, "-m", "roll.cli", "run", self.config, *words], check=True)
        return folder


OPD, GRPO = "examples/tiny_distill/opd_config.yaml", "examples/tiny/rlvr_config.yaml"
RATE = "actor_train.training_args.learning_rate"
CONTESTANTS = (
    Contestant("distillation, 8 updates a batch", "opd_8", OPD, ("opd_form=topk", *EIGHT, f"{RATE}=1e-3"), "tab:red -"),
    Contestant("distillation, 1 update", "opd_1", OPD, ("opd_form=topk", *ONE), "tab:red --"),
    Contestant("GRPO, 8 updates a batch", "grpo_8", GRPO, (*EIGHT, f"{RATE}=4e-4"), "tab:blue -"),
    Contestant("GRPO, 1 update", "grpo_1", GRPO, ONE, "tab:blue --"),
)


def accuracies(run: Path) -> dict[int, float]:
    """By samples that were used."""
    lines = (run / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {SAMPLES * row["step"]: row[ACCURACY] for row in map(json.loads, lines) if ACCURACY in row}


def draw(curves: dict[Contestant, list[dict[int, float]]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    panel: Any = axis
    for one, runs in curves.items():
        color, line = one.style.split()
        samples = sorted(runs[0])
        by_sample = [[run[count] for run in runs] for count in samples]
        panel.plot(samples, list(map(mean, by_sample)), line, color=color, marker="o", markersize=3, label=one.label)
        panel.fill_between(samples, list(map(min, by_sample)), list(map(max, by_sample)), color=color, alpha=0.15)
    panel.set(xlabel="samples", ylabel="accuracy on held-out problems", ylim=(0.3, 1.0))
    panel.set_title(f"Tiny model, means and ranges of {len(next(iter(curves.values())))} seeds")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[one.folder for one in CONTESTANTS])
    parser.add_argument("--output", type=Path, default=Path("output/distillation_curves"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    for needed in (WARM_START, TEACHER):
        if not needed.is_dir():
            parser.error(f"{needed} is not there: make run makes it")
    curves: dict[Contestant, list[dict[int, float]]] = {}
    for one in CONTESTANTS:
        if one.folder in arguments.only:
            curves[one] = [accuracies(one.run(seed, arguments.output)) for seed in arguments.seeds]
    for one, runs in curves.items():
        print(f"{one.label}, seeds {arguments.seeds}")
        for samples in sorted(runs[0]):
            values = [run[samples] for run in runs]
            print(f"  {samples:6d}  {mean(values):.3f}  ({min(values):.3f} to {max(values):.3f})")
    if arguments.plot is not None:
        draw(curves, arguments.plot)


if __name__ == "__main__":
    main()
