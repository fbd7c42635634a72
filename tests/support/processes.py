"""Processes that a test did not start itself, by their ids."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def have_ended(pids: Iterable[int], seconds: float = 30) -> bool:
    """Whether all end within a while: the kernel ends a killed process when it gets to it."""
    give_up, left = time.monotonic() + seconds, list(pids)
    while (left := [pid for pid in left if is_running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not left
