"""Everything behind the figures of the tiny reward model under PPO, from nothing, for several seeds.

    python examples/tiny_rm/proof.py [--seeds 0 1 2] [--plot proof.png]

For each seed: the warm start, the reward model that learns from the verifier's judgements, a PPO run (with a critic)
that is tied to its first policy and one that is not, both rewarded by the reward model alone. Runs that are there
already are not repeated. Prints, over the seeds, what the reward model says (proxy), what the verifier says (gold) and
the verifier's accuracy on the validation problems, and draws proxy and gold over the distance from the first policy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from curve import curve, curve_rows  # noqa: E402

ACCURACY = "val/sampled/accuracy"
RUNS = {
    "tied": ["exp_name=tiny_rm_ppo"],
    "free": [
        "exp_name=tiny_rm_ppo_free",
        "kl_loss_coef=0.001",
        "actor_train.training_args.learning_rate=8e-4",
        "max_steps=60",
    ],
}
"""Overrides of ``ppo_config.yaml`` in each of the two PPO runs."""


def make(output: Path, *command: str) -> None:
    """Run the program unless the model that it leaves is there."""
    if not (output / "model").is_dir():
        subprocess.run([sys.executable, *command], check=True)


def folder(name: str, seed: int) -> Path:
    return Path(f"output/{name}/seed{seed}")


def run_seed(seed: int) -> dict[str, Path]:
    """The folders of the seed's two PPO runs, which are made if they are not there."""
    subprocess.run([sys.executable, str(FOLDER / "prepare.py"), "--seed", str(seed)], check=True)
    make(folder("tiny_rm", seed), "examples/start_rm_pipeline.py", f"seed={seed}")
    found = {}
    for kind, overrides in RUNS.items():
        found[kind] = folder(overrides[0].removeprefix("exp_name="), seed)
        config = ["--config_path", "tiny_rm", "--config_name", "ppo_config"]
        make(found[kind], "examples/start_rlvr_pipeline.py", *config, f"seed={seed}", *overrides)
    return found


def validations(run: Path) -> dict[int, float]:
    """Accuracy by the verifier, by steps done."""
    lines = (run / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row[ACCURACY] for row in map(json.loads, lines) if ACCURACY in row}


def report(runs: list[Path], width: int) -> list[tuple[float, float, float]]:
    """Print means over seeds (with their range); the means of distance, proxy and gold."""
    parts = [curve(curve_rows(run), width) for run in runs]
    found = []
    for lines in zip(*parts, strict=True):
        _, distances, proxies, golds = zip(*lines, strict=True)
        low, high = f"{min(golds):.3f}", f"{max(golds):.3f}"
        found.append((mean(distances), mean(proxies), mean(golds)))
        print("{:5d}  {:8.3f}  {:6.3f}  {:6.3f}  ({} to {})".format(lines[0][0], *found[-1], low, high))
    accuracies = [validations(run) for run in runs]
    for step in sorted(set.intersection(*(set(one) for one in accuracies))):
        values = [one[step] for one in accuracies]
        print(f"validation after {step} steps: {mean(values):.3f}  by seed {', '.join(f'{one:.3f}' for one in values)}")
    return found


def draw(curves: dict[str, list[tuple[float, float, float]]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(9, 3.4), layout="constrained", squeeze=False, sharey=True)
    panel: Any
    for panel, (kind, points) in zip(panels[0], curves.items(), strict=True):
        distances, proxies, golds = zip(*points, strict=True)
        panel.plot(distances, golds, "o-", color="tab:green", label="gold: share right by the verifier")
        panel.plot(distances, proxies, "s--", color="tab:red", label="proxy: reward model, normalised")
        panel.set(title=f"PPO, {kind}", xlabel="distance from the first policy, sqrt(KL)", xlim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=5, help="steps averaged in a line")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    runs = [run_seed(seed) for seed in arguments.seeds]
    curves = {}
    for kind in RUNS:
        print(f"PPO, {kind}, {len(runs)} seeds\nsteps  sqrt(KL)   proxy    gold  (range over seeds)")
        curves[kind] = report([one[kind] for one in runs], arguments.width)
    if arguments.plot is not None:
        draw(curves, arguments.plot)


if __name__ == "__main__":
    main()
