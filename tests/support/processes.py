"""Processes that a test did not start itself, by their ids."""

from __future__ import annotations

import time
from collections.abc import Iterable

from roll.distributed.guard import is_alive


def have_ended(pids: Iterable[int], seconds: float = 30) -> bool:
    """Whether all end within a while: the kernel ends a killed process when it gets to it."""
    give_up, left = time.monotonic() + seconds, list(pids)
    while (left := [pid for pid in left if is_alive(pid)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not left
