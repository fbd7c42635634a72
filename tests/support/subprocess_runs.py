"""Runs in a process of their own, to be interrupted, and a look at what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from roll.distributed.guard import MARK_ENV, command_of, descendants, run_processes
from roll.tracking import METRICS_NAME

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


@dataclass
class Driver:
    """A started ``roll run``."""

    process: subprocess.Popen[str]
    output: Path

    def wait_for(self, look: Callable[[], T], seconds: float = 240) -> T:
        """Result of ``look`` as soon as it is true."""
        give_up = time.monotonic() + seconds
        while not (found := look()):
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended too early: {self.process.communicate()[1]}")
            assert time.monotonic() < give_up, "it did not happen in time"
            time.sleep(0.02)
        return found

    def finish(self, seconds: float) -> tuple[int, str]:
        """Exit status, and what was written to standard error, of a run that ends by itself in so many seconds."""
        try:
            _, errors = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode, errors

    def steps_done(self) -> int:
        file = self.output / "logs" / METRICS_NAME
        return file.read_text().count("system/global_step") if file.exists() else 0

    def last(self, metric: str) -> float | None:
        """A metric's newest value; None before there is one."""
        file = self.output / "logs" / METRICS_NAME
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be half written
        return json.loads(lines[-1]).get(metric) if lines else None

    def is_in_log(self, worker: str, text: str) -> bool:
        """True where a worker has logged this."""
        file = self.output / "logs" / "workers" / f"{worker}.log"
        return file.exists() and text in file.read_text()

    def worker_pid(self, name: str) -> int:
        """The process that writes the worker's log, not what it has forked; 0 where there is none."""
        log = (self.output / "logs" / "workers" / f"{name}.log").resolve()
        writers = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if Path(os.readlink(entry / "fd" / "1")) == log:
                    writers.add(int(entry.name))
            except OSError:  # gone meanwhile, or somebody else's
                continue
        forked = {child for pid in writers for child in descendants(pid)}
        return next(iter(writers - forked), 0)

    def mark(self, worker: str) -> str:
        """Mark of the run's processes, read from a worker's environment."""
        entries = Path(f"/proc/{self.worker_pid(worker)}/environ").read_bytes().split(b"\0")
        return next(e.split(b"=", 1)[1].decode() for e in entries if e.startswith(MARK_ENV.encode()))

    def daemon(self, name: str, mark: str) -> tuple[int, Path]:
        """A daemon of the run's Ray (``raylet``, ``gcs_server``), and Ray's folder."""
        pid = next(pid for pid in run_processes(mark) if f"/{name}" in command_of(pid).split(" ")[0])
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        log_dir = next(word for word in words if word.startswith("--log_dir=")).removeprefix("--log_dir=")
        return pid, Path(log_dir).parents[1]


Start = Callable[[Path, Path], Driver]


@contextmanager
def starter() -> Iterator[Start]:
    """Gives ``start(config, output)``: ``roll run CONFIG`` with a Ray of its own, in a session of its own.

    What still runs at the end of the block, since something went wrong, does not burden the tests after it.
    """
    drivers = []

    def start(config: Path, output: Path) -> Driver:
        drivers.append(_start(config, output))
        return drivers[-1]

    try:
        yield start
    finally:
        for driver in drivers:
            with driver.process:
                driver.process.kill()


def _start(config: Path, output: Path) -> Driver:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "ROLL_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "roll.cli", "run", str(config)],
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Driver(process, output)


def left_of(mark: str, folder: Path | None = None) -> list[str]:
    """The commands of processes of a run that are still there; with the folder of its Ray, Ray's helpers as well."""
    return [command_of(pid) for pid in run_processes(mark, folder)]
