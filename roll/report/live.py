"""``roll top``: a run in the terminal while it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from roll.config.pipelines import NAMES, Headline, definition_of
from roll.report.run_files import Run, read_run
from roll.tracking.console import LOG_NAME, TOTALS, format_seconds, phase_label

HISTORY = 40
"""Steps of the small curves."""
PACE_STEPS = 20
"""Steps whose mean duration gives the time left."""
LOG_LINES = 5
_BARS = "▁▂▃▄▅▆▇█"
_TAIL_BYTES = 16384


def watch(path: Path, interval: float, once: bool, console: Console) -> None:
    """Draw the run at ``path`` every ``interval`` seconds until it ends or Ctrl-C; ``once``: one time.

    Raises:
        ConfigError: nothing of a run is there.
    """
    run = read_run(path)
    if once:
        console.print(screen(run))
        return
    with Live(screen(run), console=console, auto_refresh=False) as live:
        while not run.about.get("outcome"):
            time.sleep(interval)
            run = read_run(path)
            live.update(screen(run), refresh=True)


def screen(run: Run) -> RenderableType:
    """Progress, headline metrics, phases with the roles' memory, devices with what ran on them last, and the log."""
    steps = run.steps
    parts: list[RenderableType] = [_progress(run)]
    if steps:
        parts += [_headlines(run), _phases(steps[-1])]
    if run.calls:
        parts.append(_workers(run))
    parts += [
        Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in _last_lines(run.log_dir / LOG_NAME)
    ]
    return Group(*parts)


def _progress(run: Run) -> Text:
    steps, total = run.steps, run.config.get("max_steps")
    done = int(steps[-1]["system/global_step"]) + 1 if steps else 0
    text = Text(f"{run.name}  {run.pipeline}  step {done}" + (f"/{total}" if total else ""), style="bold")
    durations = [row["time/step_total"] for row in steps[-PACE_STEPS:] if "time/step_total" in row]
    if durations:
        pace = sum(durations) / len(durations)
        text.append(f"  {pace:.2f}s a step", style="not bold")
        if total and not run.about.get("outcome"):
            text.append(f"  {format_seconds(pace * max(int(total) - done, 0))} left", style="not bold")
    ended = run.about.get("outcome")
    text.append(f"  {str(ended).splitlines()[0]}" if ended else "", style="green" if ended == "finished" else "red")
    return text


def _headlines(run: Run) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("metric", "last", f"last {HISTORY} steps"):
        table.add_column(column, style="dim" if column != "last" else None)
    for headline in _headlines_of(run):
        values = run.values(headline.key)
        if values:
            table.add_row(headline.key, headline.format.format(values[-1]), sparkline(values[-HISTORY:]))
    return table


def _headlines_of(run: Run) -> Sequence[Headline]:
    """Those of the pipeline; of a pipeline of one's own, the metrics that it draws."""
    if run.pipeline in NAMES:
        return definition_of(run.pipeline).headlines
    return [Headline(key, key) for panel in run.panels for key in panel.keys if "*" not in key]


def _phases(row: dict[str, Any]) -> Table:
    """The last step's seconds by phase, the longest first, and the peak memory of the roles in it."""
    table = Table(box=None, pad_edge=False)
    for column in ("phase", "seconds", "", "peak memory"):
        table.add_column(
            column, justify="right" if column == "seconds" else "left", style="dim" if not column else None
        )
    seconds = {
        name: value
        for name, value in row.items()
        if name.startswith("time/") and name.count("/") == 1 and name not in TOTALS
    }
    whole = max(row.get("time/step_total", 0.0), sum(seconds.values()), 1e-9)
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        prefix = f"memory/{name.removeprefix('time/')}/"
        memory = [
            f"{key.removeprefix(prefix)} {size / 2**30:.2f} GiB" for key, size in row.items() if key.startswith(prefix)
        ]
        table.add_row(phase_label(name), f"{value:.2f}", "█" * round(30 * value / whole), "  ".join(memory))
    return table


def _workers(run: Run) -> Table:
    """Each worker's last call, and the share of the last steps in which it computed."""
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "devices", "host", "last call", "busy"):
        table.add_column(column)
    rows = run.timeline[-PACE_STEPS:]
    for worker in run.calls:
        busy = ""
        if rows:
            begin, end = rows[0]["begin"], rows[-1]["end"]
            inside = sum(max(0.0, min(last, end) - max(first, begin)) for _, first, last in worker.spans)
            busy = f"{min(1.0, inside / max(end - begin, 1e-9)):.0%}"
        devices = ",".join(map(str, worker.devices)) or "-"
        table.add_row(f"{worker.role}-{worker.rank}", devices, worker.host, worker.spans[-1][0], busy)
    return table


def sparkline(values: Sequence[float]) -> str:
    """A line of bars from the smallest to the largest value; a space for one that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, width = min(finite), max(finite) - min(finite)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[round((value - low) / width * (len(_BARS) - 1))] if width else _BARS[0]

    return "".join(map(bar, values))


def _last_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
