"""Making sure that nothing of a run outlives it, and ending what does not answer.

Processes of a run carry a mark in their environment. Some of Ray's helpers overwrite the memory that holds it when they
give themselves a title; they are known by that title and the files that they have open in the folder of the run's Ray.

Needs the standard library only: the run's guard (``guard.py``) starts in no time.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

MARK_ENV = "ROLL_RUN_MARK"
"""Set, to a value of its own for every run, in the environment that Ray, workers and their children inherit."""

_PROC = Path("/proc")
_RAY_TITLE = "ray::"
_HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def run_processes(mark: str, folder: Path | None = None) -> list[int]:
    """Process ids, this process excepted, that were started with ``ROLL_RUN_MARK=mark`` or are Ray's and have a file in
    ``folder`` open; those that have ended and wait for their parent are not among them. Empty where there is no
    ``/proc``."""
    wanted = f"{MARK_ENV}={mark}".encode()
    found = []
    for entry in _PROC.glob("[0-9]*"):
        pid = int(entry.name)
        try:
            of_run = wanted in (entry / "environ").read_bytes().split(b"\0")
            if not of_run and folder is not None and command_of(pid).startswith(_RAY_TITLE):
                of_run = _has_open(entry, folder)
            if of_run and pid != os.getpid() and is_alive(pid):
                found.append(pid)
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def _has_open(entry: Path, folder: Path) -> bool:
    inside = f"{folder}/"
    with os.scandir(entry / "fd") as links:
        for link in links:
            try:
                if os.readlink(link.path).startswith(inside):
                    return True
            except OSError:  # closed meanwhile
                continue
    return False


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet fetched by its parent does not."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:  # grows while it is read
        found += children.get(each, [])
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started; stopped ones as well."""
    kill([pid, *descendants(pid)])


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:
            logger.debug("process %d: %s", pid, error)


def command_of(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return " ".join(word.decode(errors="replace") for word in words[:3]).strip()


def end_run(mark: str, folder: Path | None = None, patience: float = 2.0) -> None:
    """Wait up to ``patience`` seconds for the run's processes to end by themselves, then kill those that are left.

    Ray's helpers are killed at once: they would look for the lost head for minutes.
    """
    give_up = time.monotonic() + patience
    while (left := run_processes(mark, folder)) and time.monotonic() < give_up:
        kill(pid for pid in left if command_of(pid).startswith(_HELPERS))
        time.sleep(0.05)
    _end(left)
    while left and run_processes(mark, folder) and time.monotonic() < give_up + patience:
        time.sleep(0.05)


def _end(pids: Collection[int]) -> None:
    for pid in pids:
        logger.info("process %d (%s) was slow to end: killed", pid, command_of(pid))
    kill(pids)
