"""A run on the console: log files, progress line and bar, and the final table."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from roll.config.pipelines import Headline
from roll.config.reading.masking import MaskingFormatter

STEP_LOGGER = "roll.steps"  # its records are the one line a step; on a terminal the progress bar shows them instead
ENDING_LOGGER = "roll.ending"
"""Its records say why a run ended early; on the console the command line says it, last of all."""
LOG_NAME = "run.log"

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the moment: a progress bar redirects it to draw itself below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(log_dir: Path, *, interactive: bool | None = None) -> Path:
    """Send records of the package to ``log_dir/run.log`` (appended to) and to standard error; return the file's path.

    Called again, it replaces what the last call set up. The root logger is left alone, so other libraries' records go
    where they went.

    Args:
        log_dir: made if need be.
        interactive: True keeps the step lines off the console, for a progress bar is there; None: if standard error is
            a terminal.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / LOG_NAME
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(MaskingFormatter(_FORMAT))
    console = _ConsoleHandler()
    console.setFormatter(MaskingFormatter(_CONSOLE_FORMAT, datefmt="%H:%M:%S"))
    if interactive is None:
        interactive = sys.stderr.isatty()
    hidden = (ENDING_LOGGER, STEP_LOGGER) if interactive else (ENDING_LOGGER,)
    console.addFilter(lambda record: record.name not in hidden)
    package = logging.getLogger("roll")
    for handler in list(package.handlers):
        package.removeHandler(handler)
        # What a full disk refused of an earlier run's log is refused again when it is closed, and lost.
        with suppress(OSError):
            handler.close()
    package.setLevel(logging.INFO)
    package.propagate = False
    package.addHandler(file)
    package.addHandler(console)
    return path


TOTALS = frozenset({"time/step_total", "time/val_step_total"})
"""Durations that include phases counted by themselves, or run concurrently with them: no phase of the step."""


logger = logging.getLogger(STEP_LOGGER)

_ETA_WINDOW = 20
"""Updates whose mean duration of a step gives the time left: recent ones, since responses grow in training."""


class ProgressReporter:
    """A context manager; :meth:`update` is called after every step, or after every few.

    Args:
        total_steps: steps of the whole run.
        headlines: the numbers shown; those that a step does not have are left out.
        first_step: steps done before (a resumed run).
        console: where the bar is drawn; None: standard error. Without a terminal there is no bar, only the log lines.
    """

    def __init__(
        self, total_steps: int, headlines: Sequence[Headline], *, first_step: int = 0, console: Console | None = None
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
        numbers = [
            f"{headline.label} {headline.format.format(metrics[headline.key])}"
            for headline in self._headlines
            if headline.key in metrics
        ]
        phases = [
            f"{name.removeprefix('time/').removeprefix('step_')} {seconds:.2f}s"
            for name, seconds in metrics.items()
            if name.startswith("time/") and name.count("/") == 1 and name not in TOTALS
        ]
        if phases:
            numbers.append(f"({', '.join(phases)})")
        logger.info("step %d/%d  %s", self._done, self._total, "  ".join((*numbers, pace)))
        if self._bar is not None:
            self._bar.show(self._done, pace, "  ".join(numbers))

    def seconds_left(self) -> float:
        """Expected time of the steps to come; 0 before the first step."""
        return sum(self._durations) / max(1, len(self._durations)) * max(self._total - self._done, 0)


class _Bar(Live):
    """Two lines that stay at the bottom of the terminal: the bar with the time left, and the numbers of the last step,
    which alone fill a terminal of usual width."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), console=console
        )
        self._task = self._progress.add_task("", total=total, completed=done)
        super().__init__(self._progress, console=console, refresh_per_second=4)

    def show(self, done: int, pace: str, numbers: str) -> None:
        self._progress.update(self._task, completed=done, description=pace)
        self.update(Group(self._progress, Text(numbers)))


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


INTERVAL_ENDS = ("_low", "_high")


@dataclass(frozen=True)
class RunSummary:
    """The end of a run."""

    title: str  # the experiment's name
    before: Mapping[str, float]  # validation metrics by name, from before the first step
    after: Mapping[str, float]  # and from after the last
    seconds: float  # wall-clock time of the run
    steps: int  # training steps done
    files: Mapping[str, Path] = field(default_factory=dict)  # what the run wrote, by what it is ("TensorBoard", "plot")

    def show(self, console: Console | None = None) -> None:
        """Write the table (its title alone if nothing was validated), then the files, one a line, to ``console``; None:
        standard output."""
        console = console or Console()
        console.print(self.table() if self.before or self.after else Text(self.heading()))
        width = max((len(kind) for kind in self.files), default=0)
        for kind, path in self.files.items():
            # Text, not markup: a path may hold square brackets. Not wrapped: it is there to be copied.
            console.print(Text(f"{kind:<{width}}  {path}"), soft_wrap=True)

    def heading(self) -> str:
        """Pipeline and duration."""
        return f"{self.title}: {self.steps} steps in {format_seconds(self.seconds)}"

    def table(self) -> Table:
        """Every metric that ``before`` or ``after`` has, with its interval of 95% where there is one, and the change.

        Left out is what another row says: a reward, ``pass@1``, ``maj@1`` and ``best@1`` that equal the accuracy, and
        ``best@k`` that equals ``pass@k``, as of rewards of 0 and 1.
        """
        table = Table(title=Text(self.heading()), title_justify="left")
        for column in ("validation", "before", "after", "change"):
            table.add_column(column, justify="left" if column == "validation" else "right")
        for name in dict.fromkeys((*self.before, *self.after)):
            if name.endswith(INTERVAL_ENDS) or self._repeats(name):
                continue
            before, after = self.before.get(name), self.after.get(name)
            change = f"{after - before:+.3f}" if before is not None and after is not None else ""
            table.add_row(name, _number(self.before, name), _number(self.after, name), change)
        return table

    def _repeats(self, name: str) -> bool:
        """The metric equals that of a row that is shown."""
        head, _, metric = name.rpartition("/")
        shown = [f"{head}/{metric.replace('best@', 'pass@')}"] if metric.startswith("best@") else []
        if metric == "reward" or metric.endswith("@1") or head.endswith("/reward"):
            shown.append(f"{head.removesuffix('/reward')}/accuracy")
        sides = [values for values in (self.before, self.after) if name in values]
        return any(all(values.get(other) == values[name] for values in sides) for other in shown)


def _number(values: Mapping[str, float], name: str) -> str:
    if name not in values:
        return ""
    ends = [values.get(name + end) for end in INTERVAL_ENDS]
    interval = "" if None in ends else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
    return f"{values[name]:.3f}{interval}"
