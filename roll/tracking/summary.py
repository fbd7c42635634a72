"""What a run ends with: validation before and after, how long it took, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.tracking.progress import format_seconds

INTERVAL_ENDS = ("_low", "_high")


@dataclass(frozen=True)
class RunSummary:
    """The end of a run.

    Attributes:
        title: the experiment's name.
        before, after: validation metrics by name, from before the first step and after the last.
        seconds: wall-clock time of the run.
        steps: training steps done.
        files: what the run wrote, by what it is ("TensorBoard", "plot").
    """

    title: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    seconds: float
    steps: int
    files: Mapping[str, Path] = field(default_factory=dict)

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
        """What ran, and how long."""
        return f"{self.title}: {self.steps} steps in {format_seconds(self.seconds)}"

    def table(self) -> Table:
        """Every metric that ``before`` or ``after`` has, with its interval of 95% where there is one, and the change.

        ``pass@1``, ``maj@1`` and ``best@1`` are left out where the accuracy says the same.
        """
        table = Table(title=Text(self.heading()), title_justify="left")
        for column in ("validation", "before", "after", "change"):
            table.add_column(column, justify="left" if column == "validation" else "right")
        for name in dict.fromkeys((*self.before, *self.after)):
            if name.endswith(INTERVAL_ENDS) or self._repeats_accuracy(name):
                continue
            before, after = self.before.get(name), self.after.get(name)
            change = f"{after - before:+.3f}" if before is not None and after is not None else ""
            table.add_row(name, _number(self.before, name), _number(self.after, name), change)
        return table

    def _repeats_accuracy(self, name: str) -> bool:
        accuracy = f"{name.rpartition('/')[0]}/accuracy"
        return name.endswith("@1") and all(
            values.get(name) == values.get(accuracy) for values in (self.before, self.after) if name in values
        )


def _number(values: Mapping[str, float], name: str) -> str:
    if name not in values:
        return ""
    ends = [values.get(name + end) for end in INTERVAL_ENDS]
    interval = "" if None in ends else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
    return f"{values[name]:.3f}{interval}"
