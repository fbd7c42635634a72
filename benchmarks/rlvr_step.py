"""Cost of a training step of a GRPO recipe, compared with TRL's GRPOTrainer and, for the tiny one, a bare loop.

    python benchmarks/rlvr_step.py [--steps 30] [--rounds 3] [--only NAME ...]
    python benchmarks/rlvr_step.py --recipe smollm2 --steps 4 --rounds 1

Every contestant is a command of its own; all use the same model (the tiny example's warm start), data, reward, batch
shape (32 prompts x 8 samples, at most 36 tokens), loss and optimizer.  The first steps are left out as warm-up; from
there to the last step the harness measures wall time and the CPU time of the whole process tree (for the pipeline:
driver, workers and all of Ray's own processes).  Contestants take turns for ``--rounds`` rounds; figures are medians;
memory is the largest sum of the tree's proportional set sizes, looked at once a second.

``smollm2`` is the recipe of ``examples/smollm2`` (8 prompts x 8 samples, at most 48 tokens, bf16 over float32 weights),
which ``prepare.py`` there makes ready.  It keeps the activations of 32 samples at a time; TRL computes those of all 64
again (``gradient_checkpointing``, its default).  ``smollm2_sft`` and ``smollm2_dpo`` are the recipes of given rows (16
answers or 8 pairs a step), compared with TRL's SFTTrainer and DPOTrainer.

Needs the warm start (``make run`` makes it) and, for TRL, ``pip install trl==1.16.0``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from roll.models.gguf_reading import dequantised_path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/tiny/artifacts/seed0/warm_start/model"
TRAIN = ROOT / "examples/tiny/artifacts/data/train.jsonl"
MARKER = "STEP-DONE "


@dataclass(frozen=True)
class Recipe:
    config: Path
    model: Path
    train: Path
    samples: int
    """Of a step."""
    warm_up: int
    """Steps that are left out."""


SMOLLM2 = ROOT / "examples/smollm2"
SMOLLM2_MODEL = SMOLLM2 / "artifacts/SmolLM2-135M-Instruct.gguf"
RECIPES = {
    "tiny": Recipe(ROOT / "examples/tiny", MODEL, TRAIN, 256, 5),
    "smollm2": Recipe(SMOLLM2, SMOLLM2_MODEL, SMOLLM2 / "artifacts/instructions_train.jsonl", 64, 1),
    "smollm2_sft": Recipe(SMOLLM2, SMOLLM2_MODEL, SMOLLM2 / "artifacts/sums_train.jsonl", 16, 2),
    "smollm2_dpo": Recipe(SMOLLM2, SMOLLM2_MODEL, SMOLLM2 / "artifacts/instructions_train.jsonl", 16, 2),
}


@dataclass
class Contestant:
    name: str
    command: list[str]
    metrics_file: Path | None = None
    """A jsonl file with one line a step; None: markers on standard error."""
    runs: list[tuple[float, float, float]] = field(default_factory=list)
    """(wall seconds, CPU seconds) a step, and the largest memory in bytes."""


def contestants(name: str, steps: int, folder: Path, model: Path, extra: list[str]) -> list[Contestant]:
    scripts, recipe = ROOT / "benchmarks/rlvr", RECIPES[name]
    own = [str(recipe.train), "--steps", str(steps)]

    def bare(title: str, *options: str) -> Contestant:
        return Contestant(title, [sys.executable, str(scripts / "bare_loop.py"), str(model), *own, *options])

    def trl(threads: int) -> Contestant:
        words = [dequantised_path(str(model)), *own, "--threads", str(threads), "--recipe", name]
        trainer = {"smollm2_sft": "SFTTrainer", "smollm2_dpo": "DPOTrainer"}.get(name, "GRPOTrainer")
        command = [sys.executable, str(scripts / "trl_recipes.py"), *words]
        return Contestant(f"TRL {trainer}, {threads} thread{'s'[: threads - 1]}", command)

    def roll(title: str, *overrides: str, pipeline: str = "rlvr", config: str = "rlvr_config") -> Contestant:
        output = folder / title.replace(" ", "-").replace(",", "")
        command = [
            *(sys.executable, str(ROOT / f"examples/start_{pipeline}_pipeline.py")),
            *("--config_path", str(recipe.config), "--config_name", config),
            *(f"max_steps={steps}", f"output_dir={output}", f"pretrain={model}", "eval_steps=0", "track_with=[jsonl]"),
            *(["use_kl_loss=false"] if pipeline == "rlvr" else []),
            *overrides,
            *extra,
        ]
        return Contestant(title, command, output / "logs/metrics.jsonl")

    has_trl = find_spec("trl") is not None
    if name == "smollm2":
        return [
            roll("roll"),
            roll("roll, strict_on_policy", "strict_on_policy=true"),
            roll("roll, LoRA", config="rlvr_lora"),
            roll("roll, asynchronous", config="async_config"),
            *([trl(2)] if has_trl else []),
        ]
    if name in ("smollm2_sft", "smollm2_dpo"):
        pipeline = name.removeprefix("smollm2_")
        role = {"sft": "sft_train", "dpo": "actor_train"}[pipeline]
        overrides = ("logging_steps=1", f"{role}.training_args.save_hf_model=false")
        ours = roll("roll", *overrides, pipeline=pipeline, config=f"{pipeline}_config")
        return [ours, *([trl(2)] if has_trl else [])]
    one_device = [
        "num_gpus_per_node=1",
        "actor_train.device_mapping=[0]",
        "actor_infer.device_mapping=[0]",
        "actor_train.training_args.per_device_train_batch_size=256",
    ]
    return [
        roll("roll, 2 devices"),
        roll("roll, 1 device", *one_device),
        roll("roll, 1 device, prompts not shared", *one_device, "actor_train.use_prefix_sharing=false"),
        bare("bare loop, 1 thread"),
        bare("bare loop, 1 thread, old log-probs recomputed", "--recompute"),
        bare("bare loop, 2 threads", "--threads", "2"),
        *([trl(1), trl(2)] if has_trl else []),
    ]


def measure(contestant: Contestant, steps: int, warm_up: int) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds) a step, between the end of the warm-up steps and the end of the last step, and the
    largest memory in bytes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    if contestant.metrics_file is not None:
        contestant.metrics_file.unlink(missing_ok=True)
    process = subprocess.Popen(
        contestant.command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    sizes = [0]
    threading.Thread(target=_watch_memory, args=(process, sizes), daemon=True).start()
    log: list[str] = []
    points: dict[int, tuple[float, float]] = {}
    source = _from_stderr(process, log) if contestant.metrics_file is None else _from_file(process, contestant, log)
    for step in source:
        if step in (warm_up, steps):
            points[step] = (time.perf_counter(), tree_cpu_seconds(process.pid))
    process.wait()
    if process.returncode or len(points) < 2:
        raise SystemExit(f"{contestant.name} failed:\n" + "".join(log[-30:]))
    (wall_0, cpu_0), (wall_1, cpu_1) = points[warm_up], points[steps]
    return (wall_1 - wall_0) / (steps - warm_up), (cpu_1 - cpu_0) / (steps - warm_up), max(sizes)


def _watch_memory(process: subprocess.Popen[str], sizes: list[int]) -> None:
    while process.poll() is None:
        total = 0
        for one in tree_of(process.pid):
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().pss
        sizes.append(total)
        time.sleep(1)


def _from_stderr(process: subprocess.Popen[str], log: list[str]) -> Iterator[int]:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if line.startswith(MARKER):
            yield json.loads(line[len(MARKER) :])["step"]


def _from_file(process: subprocess.Popen[str], contestant: Contestant, log: list[str]) -> Iterator[int]:
    """Steps as they appear in the metrics file; looked at every 5 ms."""
    assert process.stderr is not None and contestant.metrics_file is not None
    threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
    seen = 0
    while process.poll() is None:
        if contestant.metrics_file.exists():
            lines = contestant.metrics_file.read_text().splitlines()
            done = sum("time/step_total" in line for line in lines)
            yield from range(seen + 1, done + 1)
            seen = done
        time.sleep(0.005)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty where it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and all its descendants, dead ones that were waited for included."""
    total = 0.0
    for process in tree_of(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="contestants whose names contain one of these")
    parser.add_argument("--recipe", choices=RECIPES, default="tiny")
    parser.add_argument("--model", type=Path, help="another model folder with the same tokenizer")
    arguments, extra = parser.parse_known_args()
    recipe = RECIPES[arguments.recipe]
    model = (arguments.model or recipe.model).absolute()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [
            contestant
            for contestant in contestants(arguments.recipe, arguments.steps, Path(folder), model, extra)
            if not arguments.only or any(part in contestant.name for part in arguments.only)
        ]
        for _ in range(arguments.rounds):
            for contestant in chosen:
                contestant.runs.append(measure(contestant, arguments.steps, recipe.warm_up))
                wall, cpu, _ = contestant.runs[-1]
                print(f"{contestant.name}: {wall:.3f} s, {cpu:.3f} CPU-s", file=sys.stderr, flush=True)
    print("| | wall s / step | CPU-s / step | samples / s | samples / CPU-s | GB |")
    print("|---|---|---|---|---|---|")
    for contestant in chosen:
        wall, cpu, memory = (statistics.median(values) for values in zip(*contestant.runs, strict=True))
        rates = f"{recipe.samples / wall:.4g} | {recipe.samples / cpu:.4g}"
        print(f"| {contestant.name} | {wall:.3f} | {cpu:.3f} | {rates} | {memory / 1e9:.1f} |")


if __name__ == "__main__":
    main()
