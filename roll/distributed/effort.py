"""Time that a process needs for its own part of work in which ranks wait for each other.

By the wall clock all of them are equally slow. Processor time tells them apart where one computes more than the others.
Where one is slowed down it says nothing: whose processor others use, who is throttled by a container's quota or stopped
(SIGSTOP, a frozen container, a paused virtual machine) computes as much as its peers. So three times are added up: that
of the processor, that of waiting for one (Linux counts it by thread, in ``/proc/<pid>/schedstat``), and that in which
even a thread with nothing to do did not wake up. Waiting for a peer is none of them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

BEAT_SECONDS = 0.05
_TASKS = Path("/proc/self/task")


class Effort:
    """Seconds of this process; a thread of its own notices when the process is stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays = _run_queue_seconds()
        self._stalled = self._held_up = 0.0
        self._beat_at = time.monotonic(), time.process_time()
        threading.Thread(target=self._beat, daemon=True, name="effort").start()

    def seconds(self) -> float:
        """Processor time of all threads, and what held the process up besides."""
        with self._lock:
            delays = _run_queue_seconds()
            # Threads that wait for processors at the same time wait once.
            waited = max((own - self._delays.get(task, 0.0) for task, own in delays.items()), default=0.0)
            self._delays = delays
            self._note_beat()
            self._held_up += max(waited, self._stalled)
            self._stalled = 0.0
            return time.process_time() + self._held_up

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                self._note_beat()

    def _note_beat(self) -> None:
        before, worked_before = self._beat_at
        now, worked = self._beat_at = time.monotonic(), time.process_time()
        # A call that keeps Python's lock keeps the thread from waking up too, but computes.
        lost = now - before - BEAT_SECONDS - (worked - worked_before)
        if lost > BEAT_SECONDS:
            self._stalled += lost


def _run_queue_seconds() -> dict[str, float]:
    """Seconds that each thread was runnable without a processor; empty where the kernel does not count them."""
    found = {}
    for entry in _TASKS.glob("*/schedstat"):
        try:
            found[entry.parent.name] = int(entry.read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended, or the kernel counts nothing
            continue
    return found
