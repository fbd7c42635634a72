"""Time from the command to the end of the first training step of the tiny example, by phase.

    python -m benchmarks.startup                                  # this checkout
    python -m benchmarks.startup --repeats 5 ../before .          # two checkouts, in alternation

Seconds by the clock, which other work on the machine lengthens, and of computing by all processes of the run, which it
hardly does; the median of the repeats each. The warm start must have been made (``examples/tiny/warm_start.py``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PHASES = {
    "plan shown": "rlvr pipeline",
    "training rows read": "rows read",
    "first validation done": "validation after 0 steps",
    "first step done": "step 1/1",
}
"""Words of the run's output at the end of each."""


def cpu_seconds(root: int) -> float:
    """Of a process, its descendants, and those that have ended and were waited for."""
    children, used = defaultdict(list), {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        pid = int(entry.parent.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(map(int, fields[11:15])) / TICKS
    found = [root]
    for pid in found:  # grows while it is read
        found += children[pid]
    return sum(used.get(pid, 0.0) for pid in found)


def run(checkout: Path) -> list[tuple[float, float]]:
    """Seconds by the clock and of computing at the end of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config_name", "rlvr_config", "max_steps=1"]
        began, marks, output = time.perf_counter(), [], []
        with subprocess.Popen(
            [*command, f"output_dir={folder}"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            awaited = iter(PHASES.values())
            words = next(awaited)
            for line in process.stdout:
                output.append(line)
                if words and words in line:
                    marks.append((time.perf_counter() - began, cpu_seconds(process.pid)))
                    words = next(awaited, "")
    if process.returncode or len(marks) < len(PHASES):
        sys.exit(f"the run in {checkout} failed:\n{''.join(output)}")
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs: dict[Path, list[list[tuple[float, float]]]] = defaultdict(list)
    for _ in range(args.repeats):
        for checkout in args.checkouts:
            runs[checkout].append(run(checkout.resolve()))
    for checkout in args.checkouts:
        print(f"{checkout.resolve().name}, {args.repeats} runs\n\n| | seconds | CPU-s |\n|---|---|---|")
        for place, phase in enumerate(PHASES):
            clock, cpu = (statistics.median(marks[place][kind] for marks in runs[checkout]) for kind in (0, 1))
            print(f"| {phase} | {clock:.1f} | {cpu:.1f} |")
        print(flush=True)


if __name__ == "__main__":
    main()
