"""Making sure that nothing of a run outlives it: its processes carry a mark in their environment."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MARK_ENV = "ROLL_RUN_MARK"
"""Set, to a value of its own for every run, in the environment that Ray, workers and their children inherit."""

_PROC = Path("/proc")


def marked_processes(mark: str) -> list[int]:
    """Process ids, this process excepted, that were started with ``ROLL_RUN_MARK=mark``; empty where there is no
    ``/proc``."""
    wanted = f"{MARK_ENV}={mark}".encode()
    found = []
    for entry in _PROC.glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or somebody else's
            continue
        if wanted in environment.split(b"\0") and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return " ".join(word.decode(errors="replace") for word in words[:3])


def end_marked(mark: str, patience: float = 2.0) -> None:
    """Wait up to ``patience`` seconds for the run's processes to end by themselves, then kill those that are left."""
    give_up = time.monotonic() + patience
    while (left := marked_processes(mark)) and time.monotonic() < give_up:
        time.sleep(0.05)
    for pid in left:
        logger.info("process %d (%s) was slow to end: killed", pid, _command(pid))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("process %d ended meanwhile", pid)
    while left and marked_processes(mark) and time.monotonic() < give_up + patience:
        time.sleep(0.05)
