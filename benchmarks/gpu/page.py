"""Write docs/gpu.md from the results of ``benchmarks.gpu.run``: ``python -m benchmarks.gpu.page > docs/gpu.md``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import STAGES

RESULTS = Path(__file__).parent / "results"

HEAD = """# On a GPU

Generated from `benchmarks/gpu/results` by `python -m benchmarks.gpu.page`. To measure another machine:

<!-- not run: a GPU -->
```bash
make gpu-bundle HOST=packages.txt CHIP=90     # here: dependencies for a host without a network, cut into parts
python -m benchmarks.gpu.unpack build/gpu/parts /opt/site          # there
PYTHONPATH=/opt/site:$PWD GPU_SITE=/opt/site benchmarks/gpu/run.sh
```

`packages.txt` is `pip list --format freeze` of that host: what it has, its torch above all, stays as it is. Stages run
in order of value, for nine minutes (`GPU_SECONDS`), each with a time limit; `result.json` is replaced after each, and
a second call goes on with what is missing. `ROLL_PLATFORM=cpu benchmarks/gpu/run.sh` rehearses the whole without a GPU.

verl's actor is not among the stages: 0.9.1 needs transformers below 5.11 and computes packed rows by flash-attn, of
which the package index has no wheel. [`strict_on_policy`](strict-on-policy.md) is for CPUs; the stage `bisect` says in
which operation engine and trainer part on the device.
"""

STEP = "A training step of Qwen2.5-1.5B's shape, 65,000 tokens packed, bf16 (`benchmarks/train_step.py`)"
TABLES = {
    "train_step": f"{STEP}. The bare loop has all its weights in bf16, fsdp2 float32 master weights:",
    "backends": f"{STEP}, under DeepSpeed and Megatron:",
    "fits": "Peaks of two training steps of Qwen2.5-7B's shape, and what `roll rehearse` says of them "
    "(`benchmarks/rehearsal.py`):",
}
"""What is said of the tables of stages."""


def machine_line(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['gpu']}, {machine['memory_gib']} GiB, driver {machine['driver']}, CUDA {machine['cuda']}; "
        f"{machine['cpus']} cores, Python {machine['python']}; {packages}."
    )


def run_row(title: str, figures: dict[str, Any]) -> str:
    def seconds(phase: str) -> str:
        return f"{figures.get(f'time/{phase}', float('nan')):.2f}"

    greedy = ", ".join(f"{value:.2f}" for value in figures.get("val/greedy/accuracy", ()))
    mean = statistics.mean(figures["actor/train_infer_log_diff_abs_mean"])
    largest = max(figures["actor/train_infer_log_diff_abs_max"])
    phases = " | ".join(seconds(phase) for phase in ("step_total", "step_generate", "step_train", "step_model_update"))
    return f"| {title} | {figures['steps']} | {phases} | {greedy} | {mean:.3f}, {largest:.2f} |"


def page(results: list[dict[str, Any]]) -> str:
    lines = [HEAD]
    for result in results:
        stages = result["stages"]
        lines += [f"## {result['machine']['gpu']}\n", machine_line(result["machine"]) + "\n"]
        if "report" in (tried := stages.get("doctor", {})):
            rows = [each for each in tried["report"]["findings"] if each["section"] not in ("backends", "limits")]
            lines += [
                "What its devices give ([`roll doctor --gpu`](doctor.md#devices)):\n",
                "| tried | found | |",
                "|---|---|---|",
                *(f"| {each['what']} | {each['value']} | {each['severity']} |" for each in rows),
                "",
            ]
        runs = [name for name, figures in stages.items() if "actor/train_infer_log_diff_abs_mean" in figures]
        if runs:
            lines += [
                "Seconds are medians. Greedy accuracy on held-out prompts: before training and after every 10 steps. "
                "The last column is the absolute difference of engine and trainer in log-probs, mean and largest, "
                "both in bf16.\n",
                "| run | steps | s / step | generate | train | weight update | greedy accuracy | difference |",
                "|---|---|---|---|---|---|---|---|",
                *(run_row(STAGES[name].title, stages[name]) for name in runs),
                "",
            ]
        for name, says in TABLES.items():
            if table := stages.get(name, {}).get("table"):
                heads = list(table[0])
                lines += [
                    says + "\n",
                    "| " + " | ".join(["", *heads[1:]]) + " |",
                    "|" + "---|" * len(heads),
                    *("| " + " | ".join(row.values()) + " |" for row in table),
                    "",
                ]
                lines += [f"{stages[name]['note']}\n"] if "note" in stages[name] else []
        lines += ["| stage | seconds | |", "|---|---|---|"]
        for name, figures in stages.items():
            said = figures.get("error", "").strip().splitlines()[-1:] or [figures.get("summary", "")]
            if "tokens_per_s" in figures:
                said = [f"{figures['tokens_per_s']:,} tokens / s"]
            if "step_s" in figures:
                said = [f"{figures['step_s']:.2f} s / step"]
            lines.append(f"| {STAGES[name].title} | {figures['seconds']:.0f} | {said[0]} |")
        missing = [stage.title for name, stage in STAGES.items() if name not in stages]
        if missing:
            lines.append("\nNot run: " + "; ".join(missing) + ".")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]))
