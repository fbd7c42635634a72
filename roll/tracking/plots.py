"""The run as one picture: reward, accuracy, response length, KL, entropy, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.pipelines import Panel
from roll.tracking.console import TOTALS, phase_label
from roll.tracking.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#64748b", "#dc2626", "#0891b2", "#ca8a04")
_INK, _GRID = "#1e293b", "#e2e8f0"
_MAX_LEGEND = 6


def plot_run(metrics_path: Path, image_path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels that have data, and the time per phase of each step, into a PNG.

    Args:
        metrics_path: the run's ``metrics.jsonl``.
        image_path: the PNG to write; its folder is made if need be.
        title: shown above all.
        panels: what to draw; panels without data are left out.

    Raises:
        FileNotFoundError: there is no ``metrics_path``.
    """
    # Matplotlib costs half a second, and only the end of a run needs it. The figure is made without pyplot, which would
    # choose a backend for the whole process and keep the figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_path)
    drawn = [(panel, series) for panel in panels if (series := series_of(panel, rows))]
    phases = _phases(rows)
    count = len(drawn) + bool(phases)
    columns = min(3, max(count, 1))
    height = max(1, math.ceil(count / columns))
    figure = Figure(figsize=(4.6 * columns, 3.2 * height + 0.5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=_INK)
    axes = figure.subplots(height, columns, squeeze=False).flatten().tolist()
    for axis, (panel, series) in zip(axes, drawn, strict=False):
        _draw_series(axis, panel, series)
    if phases:
        _draw_phases(axes[len(drawn)], phases)
    for axis in axes[count:]:
        axis.set_visible(False)
    image_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image_path)


Series = dict[str, tuple[list[int], list[float]]]


def series_of(panel: Panel, rows: Sequence[dict[str, Any]]) -> Series:
    """Steps and values of the metrics that a panel shows, by name."""
    present = dict.fromkeys(name for row in rows for name in row)
    names = [name for key in panel.keys for name in present if _matches(key, name)]
    result: Series = {}
    for name in dict.fromkeys(names):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if panel.zero_is_none and not any(value for _, value in points):
            continue
        result[name] = ([step for step, _ in points], [value for _, value in points])
        if panel.first_only:
            break
    return result


def _matches(key: str, name: str) -> bool:
    parts, name_parts = key.split("/"), name.split("/")
    return len(parts) == len(name_parts) and all(
        part in ("*", name_part) for part, name_part in zip(parts, name_parts, strict=True)
    )


def _phases(rows: Sequence[dict[str, Any]]) -> Series:
    """Seconds of each phase (``time/<phase>``) in every training step; a phase that a step did without counts 0."""
    timed = [row for row in rows if "time/step_total" in row]
    present = dict.fromkeys(name for row in timed for name in row if _matches("time/*", name))
    names = [name for name in present if name not in TOTALS]
    steps = [row["step"] for row in timed]
    return {phase_label(name): (steps, [row.get(name, 0.0) for row in timed]) for name in names}


def _draw_series(axis: Axes, panel: Panel, series: Series) -> None:
    for index, (name, (steps, values)) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        few = len(steps) <= 25
        if panel.smooth and not few:
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            axis.plot(steps, _smoothed(values), color=colour, linewidth=1.8, label=_short(name))
        else:
            marker = "o" if few else None
            axis.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=_short(name))
    _style(axis, panel.title)
    if panel.unit_range:
        axis.set_ylim(-0.02, 1.02)
    if (len(series) > 1 or panel.first_only) and len(series) <= _MAX_LEGEND:
        axis.legend(fontsize=7, frameon=False)


def _draw_phases(axis: Axes, phases: Series) -> None:
    steps = next(iter(phases.values()))[0]
    # The largest at the bottom, where its shape is easiest to read.
    order = sorted(phases, key=lambda name: -sum(phases[name][1]))
    floor = [0.0] * len(steps)
    for index, name in enumerate(order):
        values = phases[name][1]
        axis.bar(steps, values, bottom=floor, width=1.0, color=_COLOURS[index % len(_COLOURS)], label=name)
        floor = [below + value for below, value in zip(floor, values, strict=True)]
    _style(axis, "Time per step (seconds)")
    axis.set_ylim(0, max(floor, default=0.0) * 1.35 or 1.0)
    axis.legend(fontsize=7, frameon=False, ncols=2, loc="upper right")


def _style(axis: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=10, loc="left", color=_INK)
    axis.set_xlabel("step", fontsize=8, color=_INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.tick_params(labelsize=8, colors=_INK, length=0)
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(_GRID)


def _short(name: str) -> str:
    """``val/sampled/accuracy`` is ``sampled`` in a legend; other metrics keep their names."""
    parts = name.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == "val" else name


def _smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, corrected at the start as in Adam so that 0 does not pull at it; nan is left out."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
        result.append(average / total if total else math.nan)
    return result
