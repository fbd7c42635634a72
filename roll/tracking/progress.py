"""How a run is going: a bar on a terminal, a line a step in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from roll.tracking.logs import STEP_LOGGER
from roll.tracking.phases import TOTALS

logger = logging.getLogger(STEP_LOGGER)

_ETA_WINDOW = 20
"""Updates whose mean duration of a step gives the time left: recent ones, since responses grow in training."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number worth a place in the line: metric ``key``, shown after ``label`` as ``format`` says."""

    key: str
    label: str
    format: str = "{:.3f}"


RLVR_HEADLINES = (
    Headline("critic/score/mean", "reward"),
    Headline("val_correct/all/mean", "accuracy"),
    Headline("token/response_length/mean", "length", "{:.1f}"),
    Headline("critic/kl", "kl", "{:.4f}"),
    Headline("system/tps", "tok/s", "{:,.0f}"),
)
SFT_HEADLINES = (
    Headline("sft_train/loss", "loss", "{:.4f}"),
    Headline("val/loss", "validation loss", "{:.4f}"),
    Headline("sft_train/lr", "lr", "{:.2e}"),
    Headline("system/tps", "tok/s", "{:,.0f}"),
)


class ProgressReporter:
    """A context manager; :meth:`update` is called after every step, or after every few.

    Args:
        total_steps: steps of the whole run.
        headlines: the numbers shown; those that a step does not have are left out.
        first_step: steps done before (a resumed run).
        console: where the bar is drawn; None: standard error. Without a terminal there is no bar, only the log lines.
    """

    def __init__(
        self,
        total_steps: int,
        headlines: tuple[Headline, ...] = RLVR_HEADLINES,
        *,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self._total = total_steps
        self._done = first_step
        self._headlines = headlines
        self._durations: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._last = time.perf_counter()
        console = console or Console(file=sys.stderr)
        self._bar = _Bar(console, total_steps, first_step) if console.is_terminal else None

    def __enter__(self) -> Self:
        self._last = time.perf_counter()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, metrics: Mapping[str, float], done: int | None = None) -> None:
        """``done`` steps of the run are done (None: one more), the last with these metrics.

        ``time/<phase>`` are shown as phases.
        """
        now = time.perf_counter()
        done = self._done + 1 if done is None else done
        self._durations.append((now - self._last) / max(done - self._done, 1))
        self._last = now
        self._done = done
        pace = f"{self._durations[-1]:.2f}s a step  {format_seconds(self.seconds_left())} left"
        numbers = self._numbers(metrics)
        logger.info("step %d/%d  %s", self._done, self._total, "  ".join((*numbers, pace)))
        if self._bar is not None:
            self._bar.show(self._done, pace, "  ".join(numbers))

    def seconds_left(self) -> float:
        """Expected time of the steps to come; 0 before the first step."""
        if not self._durations:
            return 0.0
        return sum(self._durations) / len(self._durations) * max(self._total - self._done, 0)

    def _numbers(self, metrics: Mapping[str, float]) -> list[str]:
        parts = [
            f"{headline.label} {headline.format.format(metrics[headline.key])}"
            for headline in self._headlines
            if headline.key in metrics
        ]
        phases = [
            f"{phase_label(name)} {seconds:.2f}s"
            for name, seconds in metrics.items()
            if name.startswith("time/") and name.count("/") == 1 and name not in TOTALS
        ]
        if phases:
            parts.append(f"({', '.join(phases)})")
        return parts


class _Bar:
    """Two lines that stay at the bottom of the terminal: the bar with the time left, and the numbers of the last step.

    Two, because the numbers alone fill a terminal of usual width, and a bar beside them would be squeezed to nothing.
    """

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), console=console
        )
        self._task = self._progress.add_task("", total=total, completed=done)
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def show(self, done: int, pace: str, numbers: str) -> None:
        self._progress.update(self._task, completed=done, description=pace)
        self._live.update(Group(self._progress, Text(numbers)))


def phase_label(metric: str) -> str:
    """``time/step_generate`` is ``generate`` to a reader."""
    return metric.removeprefix("time/").removeprefix("step_")


def format_seconds(seconds: float) -> str:
    """``42s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
