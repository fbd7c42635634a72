"""A rehearsal as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.plan.render import compact
from roll.rehearsal.formulas import size
from roll.rehearsal.recipe import DeviceUse, PhaseUse, Rehearsal
from roll.rehearsal.roofline import merged

ORDER = (
    "weights",
    "parameters",
    "gradients",
    "optimizer states",
    "gathered parameters",
    "buffers of collectives",
    "activations",
    "send buckets",
    "receive bucket",
    "KV cache",
    "workspace",
    "context",
)


def render(report: Rehearsal, console: Console) -> None:
    """Print everything that is known."""
    _line(console, f"{report.name} on {report.hardware.name}", "bold")
    for name, shape in report.shapes.items():
        if shape is not None:
            method = f"; {report.runs[name].method}" if name in report.runs else "; by arithmetic"
            _line(console, f"  {name}: {shape.total / 1e9:.2f}B weights{method}")
    for use in report.devices:
        _render_device(report, use, console)
    for name, number in report.host.items():
        _line(console, f"host memory of a worker, {name}: {size(number)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase", no_wrap=True)
    for heading in ("at least", "TFLOP", "compute", "memory", "network"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by")
    for name, time in report.times.items():
        cells = [f"{time.seconds:.2f} s", f"{report.flops[name] / 1e12:,.0f}"]
        cells += [f"{part:.2f}" for part in (time.compute, time.memory, time.network)]
        table.add_row(name, *cells, time.bound if time.seconds else "")
    console.print(table)
    for flow in merged(list(report.traffic.values())):
        links = [f"{size(flow.within)} within the node"] if flow.within else []
        links += [f"{size(flow.between)} between nodes"] if flow.between else []
        _line(console, f"{flow.name} over {flow.ranks} ranks: {' and '.join(links)} a device and step")
    order = (
        f"{', '.join(report.concurrent)} while the rest goes on" if report.concurrent else "phases one after another"
    )
    _line(console, f"a step takes at least {report.seconds:,.1f} s (samples of full length, {order})")
    for text in verdict(report):
        _line(console, text, "bold green" if report.fits else "bold red")


def _render_device(report: Rehearsal, use: DeviceUse, console: Console) -> None:
    ids = compact(use.ids)
    table = Table(
        title=f"device{'s' if len(use.ids) > 1 else ''} {ids}: {', '.join(use.roles)}",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("phase", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("of it")
    for phase in use.phases:
        by_label: dict[str, float] = {}
        for (role, kind), number in phase.parts.items():
            label = kind if len(use.roles) == 1 or kind == "context" else f"{role} {kind}"
            by_label[label] = by_label.get(label, 0.0) + number
        parts = sorted(by_label.items(), key=lambda item: -item[1])
        mark = " *" if phase is use.peak else ""
        shown = ", ".join(f"{label} {size(number)}" for label, number in parts if number >= 2**20)
        table.add_row(Text(phase.name + mark), Text(size(phase.total)), Text(shown))
    console.print(table)
    capacity = report.hardware.gpu.memory
    _line(console, f"  peak {size(use.peak.total)} of {size(capacity)} in: {use.peak.name}")
    if report.offloads and use.peak_without_offload.total > use.peak.total * 1.001:
        without = use.peak_without_offload
        _line(console, f"  without offload between phases: {size(without.total)} in: {without.name}")


def verdict(report: Rehearsal) -> Iterator[str]:
    """The verdict on its fit, with the sum where it does not fit."""
    yield from report.problems
    capacity = report.hardware.gpu.memory
    for use in report.devices:
        peak = use.peak
        if peak.total > capacity:
            parts = sorted(peak.parts.items(), key=lambda item: -item[1])
            terms = " + ".join(f"{role} {kind} {size(number)}" for (role, kind), number in parts if number >= 2**26)
            yield (
                f"does not fit on devices {compact(use.ids)}: in the phase {peak.name}, {terms} = {size(peak.total)}, "
                f"{size(peak.total - capacity)} more than the {size(capacity)} of {report.hardware.gpu.name}"
            )
    if report.fits:
        yield f"fits: at most {size(report.peak)} of {size(capacity)} ({report.peak / capacity:.0%})"


def to_json(report: Rehearsal) -> dict[str, Any]:
    """Everything in bytes, FLOPs and seconds."""
    return {
        "name": report.name,
        "gpu": report.hardware.gpu.name,
        "network": report.hardware.network,
        "capacity": report.hardware.gpu.memory,
        "fits": report.fits,
        "problems": list(verdict(report)) if not report.fits else [],
        "peak": report.peak,
        "seconds": report.seconds,
        "devices": [
            {
                "ids": list(use.ids),
                "roles": list(use.roles),
                "peak": use.peak.total,
                "peak_phase": use.peak.name,
                "peak_without_offload": use.peak_without_offload.total,
                "phases": [{"name": phase.name, "total": phase.total, "parts": _parts(phase)} for phase in use.phases],
            }
            for use in report.devices
        ],
        "roles": {
            name: {
                "weights": None if shape is None else shape.total,
                "method": report.runs[name].method if name in report.runs else "arithmetic",
                **({"states": {str(k): v for k, v in report.runs[name].states.items()}} if name in report.runs else {}),
            }
            for name, shape in report.shapes.items()
        },
        "phases": {
            name: {"seconds": time.seconds, **asdict(time), "bound": time.bound} for name, time in report.times.items()
        },
        "flops": report.flops,
        "traffic": {
            name: [
                {"collective": one.name, "ranks": one.ranks, "within": one.within, "between": one.between}
                for one in flows
            ]
            for name, flows in report.traffic.items()
        },
        "host": report.host,
    }


def _parts(phase: PhaseUse) -> list[dict[str, Any]]:
    def place(part: tuple[tuple[str, str], float]) -> int:
        kind = part[0][1]
        return ORDER.index(kind) if kind in ORDER else len(ORDER)

    return [
        {"role": role, "kind": kind, "bytes": size} for (role, kind), size in sorted(phase.parts.items(), key=place)
    ]


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
