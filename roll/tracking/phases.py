"""How long each phase of a step takes, and how much memory it needs at its peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

TOTALS = frozenset({"time/step_total", "time/val_step_total"})
"""Durations that include phases counted by themselves, or run concurrently with them: no phase of the step."""

PeakMemory = Callable[[], Mapping[str, float]]
"""Peak bytes since the last call, by a name such as a role's; a call starts a new measurement."""


class PhaseTimer:
    """Wall-clock seconds per named phase. Phases nest; an outer one's time and memory include the inner ones'.

        timer = PhaseTimer()
        with timer.phase("step_generate"):
            ...
        metrics |= timer.pop()          # {"time/step_generate": 0.87}

    Args:
        peak_memory: called at both ends of every phase if given; its values come out as
            ``memory/<phase>/<name>`` (bytes).
    """

    def __init__(self, peak_memory: PeakMemory | None = None) -> None:
        self._peak_memory = peak_memory
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block; a name used several times before :meth:`pop` is summed. Counts also when the block raises."""
        self._credit_memory()
        self._open.append(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._credit_memory()
            self._open.pop()

    def pop(self) -> dict[str, float]:
        """``time/<phase>`` in seconds and ``memory/<phase>/<name>`` in bytes since the last call; starts anew."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()} | self._bytes
        self._seconds, self._bytes = {}, {}
        return metrics

    def _credit_memory(self) -> None:
        """Read the peak since the last reading: it belongs to every phase open since then."""
        if self._peak_memory is None:
            return
        for name, value in self._peak_memory().items():
            for phase in self._open:
                key = f"memory/{phase}/{name}"
                self._bytes[key] = max(self._bytes.get(key, 0.0), float(value))
