"""Processor time of scoring programs in the sandbox, compared with a fresh Python process per program, unprotected.

    python benchmarks/code_sandbox.py [--samples 100]

Processor seconds of all processes involved, so that other work on the machine counts little; wall times next to them.
Each program reads a number and prints its double, or is a function that three asserts call.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from roll.rewards import RewardSample, build_reward

SCRIPT = "print(int(input()) * 2)"
FUNCTION = "def double(n):\n    return n * 2"
STREAMS = {"inputs": ["21"], "outputs": ["42"]}
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0", "assert double(-3) == -6"]
KINDS = (("input and output", SCRIPT, STREAMS), ("three asserts", FUNCTION, ASSERTS))


def processor_seconds() -> float:
    """Of this process and of all that have ended and were waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Processor and wall seconds."""
    before, began = processor_seconds(), time.perf_counter()
    work()
    return processor_seconds() - before, time.perf_counter() - began


def in_sandbox(source: str, cases: object, count: int) -> None:
    reward = build_reward("code_sandbox", {"parallel": 1})
    results = reward([RewardSample("", source, cases)] * count)
    assert all(result.score == 1.0 for result in results), results[0]
    reward.close()


def fresh_python(source: str, cases: object, count: int) -> None:
    for _ in range(count):
        if isinstance(cases, dict):
            command = [sys.executable, "-c", source]
            ended = subprocess.run(command, input=cases["inputs"][0], capture_output=True, text=True, check=True)
            assert ended.stdout.strip() == cases["outputs"][0]
        else:
            assert isinstance(cases, list)
            subprocess.run([sys.executable, "-c", "\n".join([source, *cases])], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=100)
    count = parser.parse_args().samples
    columns = ("", "CPU ms / sample", "samples / s / core", "wall ms / sample", "start, CPU s")
    table = Table(*columns, title=f"{count} programs; load average {os.getloadavg()[0]:.1f}")
    for title, source, cases in KINDS:
        # The start is paid once a worker: the difference of two runs leaves it out.
        short, _ = measured(lambda source=source, cases=cases: in_sandbox(source, cases, 10))
        cpu, wall = measured(lambda source=source, cases=cases: in_sandbox(source, cases, 10 + count))
        each = (cpu - short) / count
        start = f"{short - 10 * each:.2f}"
        table.add_row(f"sandbox, {title}", f"{each * 1e3:.1f}", f"{1 / each:.0f}", f"{wall / count * 1e3:.1f}", start)
        cpu, wall = measured(lambda source=source, cases=cases: fresh_python(source, cases, count))
        each = cpu / count
        table.add_row(f"python -c, {title}", f"{each * 1e3:.1f}", f"{1 / each:.0f}", f"{wall / count * 1e3:.1f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
