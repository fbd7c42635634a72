"""Growth of a run's processes over many steps: ``python -m benchmarks.growth --page docs/reliability.md``.

The tiny RLVR run of the tests goes on for 500 steps, with a checkpoint every 50 of which three are kept; the memory,
open files and threads of each of its processes, and the files on disk, are read from ``/proc`` on the way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.chaos import tiny_world
from roll.distributed.guard import command_of, descendants, kill_tree
from tests.support.subprocess_runs import ROOT, Driver
from tests.support.tiny_runs import load_changed, rlvr_settings

BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"
WORKERS = ("actor_train-0", "actor_infer-0", "rewards.digits-0")
DAEMONS = {"raylet": "/raylet", "gcs_server": "/gcs_server"}

Reading = Mapping[str, Sequence[float]]
"""By process: MiB in memory (without what is shared), MiB of shared memory, open files, threads."""


def reading(driver: Driver) -> Reading:
    """The processes of a run as they are now."""
    root = driver.process.pid
    pids = {"driver": root} | {name: driver.worker_pid(name) for name in WORKERS}
    for pid in descendants(root):
        word = command_of(pid).split(" ")[0]
        pids |= {name: pid for name, part in DAEMONS.items() if part in word}
    return {name: _of_process(pid) for name, pid in pids.items()}


def _of_process(pid: int) -> list[float]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    mib = {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem")}
    return [mib["RssAnon"], mib["RssShmem"], len(os.listdir(f"/proc/{pid}/fd")), int(lines["Threads"])]


def measure(steps: int, at: Sequence[int], folder: Path) -> tuple[dict[int, Reading], dict[int, int]]:
    """Readings, and numbers of files in the output folder, after so many steps."""
    world = tiny_world(folder / "world")
    output = folder / "run"
    changes = {"max_steps": steps + 20, "save_steps": 50, "max_ckpt_to_keep": 3}
    load_changed(rlvr_settings(world, output), changes)
    with (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "roll.cli", "run", str(output / "input" / "config.yaml")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
        )
    driver, readings, files = Driver(process, output), {}, {}
    try:
        for step in at:
            while driver.steps_done() < step:
                assert process.poll() is None, (folder / "stderr.txt").read_text()
                time.sleep(0.1)
            readings[step] = reading(driver)
            files[step] = sum(len(names) for _, _, names in os.walk(output))
    finally:
        kill_tree(process.pid)
        process.wait()
    return readings, files


def table(readings: Mapping[int, Reading], files: Mapping[int, int]) -> str:
    """Markdown: a line for each process, a group of columns for each quantity."""
    steps = list(readings)
    names = ("MiB of its own", "MiB shared", "open files", "threads")
    lines = [
        "| process | " + " | ".join(f"{name} after {', '.join(map(str, steps))} steps" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for process in readings[steps[0]]:
        cells = [", ".join(f"{readings[step][process][column]:.0f}" for step in steps) for column in range(len(names))]
        lines.append(f"| {process} | " + " | ".join(cells) + " |")
    counts = ", ".join(f"{files[step]}" for step in steps)
    return "\n".join([*lines, "", f"Files in the output folder after as many steps: {counts}."])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory, files and threads of a run over many steps.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--page", type=Path, help="page whose table is made anew")
    arguments = parser.parse_args(argv)
    at = [arguments.steps // 10, arguments.steps // 2, arguments.steps]
    with tempfile.TemporaryDirectory(prefix="roll-growth-") as folder:
        text = table(*measure(arguments.steps, at, Path(folder)))
    sys.stdout.write(text + "\n")
    if arguments.page is not None:
        page = arguments.page.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        arguments.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
