"""Compare every metric of tiny runs of all algorithms between two commits, bit for bit.

    python -m benchmarks.same_metrics record before.json          # in one checkout
    python -m benchmarks.same_metrics record after.json           # in the other
    python -m benchmarks.same_metrics compare before.json after.json

A restructuring changes no number. Times, memory and rates are left out, and of episodes how the trainer differs from
the engine, whose batches depend on which game answers first. Runs join one Ray, one after another: four minutes in all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_runs
from tests.support.tiny_runs import FinishedRun, TinyWorld, load_changed, make_world, role, training_args, untimed

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny"

TWO_RANKS = {"actor_train.device_mapping": [0, 1], "actor_train.training_args": training_args(4, 2)}
CRITIC = role("fsdp2_train", [0], training_args=training_args(8, 1), infer_batch_size=8)
PPO = {"estimator": "gae", "ppo_epochs": 2, "value_clip": 0.5, "actor_train.training_args": training_args(8, 1)}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.05, "reference": role("fsdp2_infer", [0], infer_batch_size=8)}
PACKED = {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance"}}


def strategy(name: str, **config: Any) -> dict[str, Any]:
    return {"actor_train.strategy_args": {"strategy_name": name, "strategy_config": config}}


def taught(world: TinyWorld, form: str) -> dict[str, Any]:
    teacher = role("fsdp2_infer", [0], infer_batch_size=8) | {"model_args": {"model_name_or_path": str(world.teacher)}}
    teacher["model_args"]["dtype"] = "fp32"
    return {"pipeline": "opd", "is_pure_opd": True, "opd_form": form, "opd_topk": 4, "teacher": teacher}


def labelled(world: TinyWorld) -> dict[str, Any]:
    """KTO on single responses of the pairs, each the chosen or the rejected one."""
    rows = []
    for index, pair in enumerate(map(json.loads, world.preferences.read_text().splitlines())):
        side = ("chosen", "rejected")[index % 2]
        rows.append({"prompt": pair["instruction"], "completion": pair[side], "label": side == "chosen"})
    file = world.folder / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"loss_type": "kto", "actor_train.data_args": {"file_name": str(file)}}


Changes = Callable[[TinyWorld], dict[str, Any]]
RUNS: dict[str, tuple[str, Changes]] = {
    "grpo": ("rlvr", lambda world: KL),
    "ppo": ("rlvr", lambda world: PPO | {"critic": CRITIC, "entropy_loss_coef": 0.01}),
    "dapo": ("rlvr", lambda world: {"loss_agg_mode": "token-mean", "pg_clip_high": 0.28, "ppo_epochs": 2}),
    "token_level_kl": ("rlvr", lambda world: KL | {"add_token_level_kl": True, "init_kl_coef": 0.1}),
    "async": ("rlvr", lambda world: {"async_generation_ratio": 1, "train_infer_correction": "decoupled"}),
    "lora": ("rlvr", lambda world: {"actor_train.model_args": {"lora_target": "all-linear", "dtype": "fp32"}}),
    "packed": ("rlvr", lambda world: TWO_RANKS | {f"actor_train.{key}": value for key, value in PACKED.items()}),
    "zero2": ("rlvr", lambda world: TWO_RANKS | strategy("deepspeed_train", zero_stage=2)),
    "megatron": ("rlvr", lambda world: TWO_RANKS | strategy("megatron_train", tensor_model_parallel_size=2)),
    "opd": ("rlvr", lambda world: taught(world, "advantage")),
    "opd_topk": ("rlvr", lambda world: taught(world, "topk")),
    "agentic": ("agentic", lambda world: {"max_steps": 2}),
    "sft": ("sft", lambda world: {}),
    "dpo": ("dpo", lambda world: {}),
    "ipo_two_ranks": ("dpo", lambda world: TWO_RANKS | {"loss_type": "ipo"}),
    "kto": ("dpo", labelled),
    "rm": ("rm", lambda world: {}),
    "distill": ("distill", lambda world: {}),
}


def record(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The metrics of every step of the runs, by name."""
    sys.path.insert(0, str(EXAMPLE))
    modules = {name: importlib.import_module(name) for name in ("prepare", "tiny_model", "word_problems")}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # the server and the runs are one user on one host
        command = [sys.executable, "-m", "tests.support.serve_ray", str(address)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE)
        while not address.exists():
            time.sleep(0.05)
        os.environ["RAY_ADDRESS"] = address.read_text()
        world = make_world(modules, Path(folder) / "world")
        for name in names:
            pipeline, changes = RUNS[name]
            output = Path(folder) / name
            settings = getattr(tiny_runs, f"{pipeline}_settings")(world, output)
            loaded = load_changed(settings, changes(world))
            loaded.pipeline.run(loaded)
            found[name] = [untimed(row) for row in FinishedRun(output).steps]
        server.communicate(timeout=60)
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each metric that differs."""
    lines = [f"{name}: missing on one side" for name in sorted(before.keys() ^ after.keys())]
    for name in before.keys() & after.keys():
        if len(before[name]) != len(after[name]):
            lines.append(f"{name}: {len(before[name])} steps and {len(after[name])}")
        for step, (old, new) in enumerate(zip(before[name], after[name], strict=False)):
            lines += [
                f"{name}, step {step}: {key} {old.get(key)} -> {new.get(key)}"
                for key in sorted(old.keys() | new.keys())
                if not ((name == "agentic" and "train_infer" in key) or key.endswith("seconds"))
                and json.dumps(old.get(key)) != json.dumps(new.get(key))
            ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    arguments = parser.parse_args()
    if arguments.command == "record":
        arguments.file.write_text(json.dumps(record(arguments.only), indent=1))
        return 0
    lines = compare(*(json.loads(file.read_text()) for file in arguments.files))
    sys.stdout.write("".join(f"{line}\n" for line in lines) or "no metric differs\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
