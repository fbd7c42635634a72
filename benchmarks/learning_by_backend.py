"""The tiny task under every training backend: GRPO, and PPO with a critic, with validation accuracy before and after.

    python -m benchmarks.learning_by_backend                              # all of them, 60 steps each
    python -m benchmarks.learning_by_backend --only "PPO megatron" --steps 200 --seeds 1

Every role that trains, and the reference, changes its strategy; data, reward, sampling and optimizer do not.  As in
``learning.py``, runs that are done are not repeated, and the table shows all of that number of steps.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning import ROOT, console, table, train

CONFIGS = {"GRPO": "rlvr_config.yaml", "PPO": "ppo_config.yaml"}
ROLES = {"GRPO": {"actor_train": "train", "reference": "infer"}}
ROLES["PPO"] = ROLES["GRPO"] | {"critic": "train"}


@dataclass(frozen=True)
class Backend:
    name: str
    strategy: str
    """Without ``_train`` or ``_infer``."""
    config: dict[str, Any] = field(default_factory=dict)
    """``strategy_config`` of every role."""
    replicas: int = 2
    """Data-parallel replicas on the two devices; one replica accumulates over two micro-batches."""

    def overrides(self, algorithm: str) -> list[str]:
        words = []
        for role, kind in ROLES[algorithm].items():
            words.append(f"{role}.strategy_args.strategy_name={self.strategy}_{kind}")
            words += [f"++{role}.strategy_args.strategy_config.{key}={value}" for key, value in self.config.items()]
            if kind == "train":
                words.append(f"{role}.training_args.gradient_accumulation_steps={2 // self.replicas}")
        return words


BACKENDS = [
    Backend("fsdp2", "fsdp2"),
    Backend("fsdp", "fsdp"),
    *(Backend(f"deepspeed ZeRO-{stage}", "deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)),
    Backend("megatron TP2", "megatron", {"tensor_model_parallel_size": 2}, replicas=1),
    Backend("megatron PP2", "megatron", {"pipeline_model_parallel_size": 2}, replicas=1),
]


def train_missing(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    for seed in arguments.seeds:
        for algorithm, file in CONFIGS.items():
            for backend in BACKENDS:
                title = f"{algorithm} {backend.name}"
                if arguments.only not in title:
                    continue
                if time.monotonic() - began > arguments.seconds:
                    return
                folder = arguments.output / f"{title} seed{seed} steps{arguments.steps}".replace(" ", "_")
                config = ROOT / "examples/tiny" / file
                train(title, config, seed, arguments.steps, folder, backend.overrides(algorithm))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose title contains this")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after this time")
    parser.add_argument("--output", type=Path, default=ROOT / "output/learning_by_backend")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    train_missing(arguments)
    for line in table(arguments.output, arguments.steps):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
