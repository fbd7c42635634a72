"""A rehearsal as text and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.plan.render import compact
from roll.rehearsal.formulas import size
from roll.rehearsal.recipe import Rehearsal
from roll.rehearsal.roofline import merged


def render(report: Rehearsal, console: Console) -> None:
    """Print everything that is known."""
    line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    machine = report.hardware
    line(f"{report.name} on {machine.gpu.name}, {machine.network}, {machine.per_node} a node", style="bold")
    for name, shape in report.shapes.items():
        if shape is not None:
            method = f"; {report.runs[name].method}" if name in report.runs else "; by arithmetic"
            line(f"  {name}: {shape.total / 1e9:.2f}B weights{method}")
    for use in report.devices:
        title = f"device{'s' if len(use.ids) > 1 else ''} {compact(use.ids)}: {', '.join(use.roles)}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("phase", no_wrap=True)
        table.add_column("total", justify="right", no_wrap=True)
        table.add_column("of it")
        for phase in use.phases:
            by_label: dict[str, float] = defaultdict(float)
            for (role, kind), number in phase.parts.items():
                by_label[kind if len(use.roles) == 1 or kind == "context" else f"{role} {kind}"] += number
            parts = sorted(by_label.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{label} {size(number)}" for label, number in parts if number >= 2**20)
            mark = " *" if phase is use.peak else ""
            table.add_row(Text(phase.name + mark), Text(size(phase.total)), Text(shown))
        console.print(table)
        line(f"  peak {size(use.peak.total)} of {size(report.hardware.gpu.memory)} in: {use.peak.name}")
        without = use.peak_without_offload
        if report.offloads and without.total > use.peak.total * 1.001:
            line(f"  without offload between phases: {size(without.total)} in: {without.name}")
    for name, number in report.host.items():
        line(f"host memory of a worker, {name}: {size(number)}")
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
        line(f"{flow.name} over {flow.ranks} ranks: {' and '.join(links)} a device and step")
    ahead = ", ".join(report.concurrent)
    order = f"{ahead} while the rest goes on" if ahead else "phases one after another"
    samples = "samples of {} + {} tokens".format(*report.lengths) if report.lengths else "samples of full length"
    takes = "at least" if report.hardware.clock is None else f"{report.cpu_seconds:,.1f} CPU-seconds, about"
    line(f"a step takes {takes} {report.seconds:,.1f} s ({samples}, {order})")
    for text in verdict(report):
        line(text, style="bold green" if report.fits else "bold red")


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
    devices, flows = [], {}
    roles: dict[str, dict[str, Any]] = {}
    for use in report.devices:
        phases = []
        for phase in use.phases:
            parts = [{"role": role, "kind": kind, "bytes": number} for (role, kind), number in phase.parts.items()]
            phases.append({"name": phase.name, "total": phase.total, "parts": parts})
        peaks = {"peak": use.peak.total, "peak_phase": use.peak.name}
        peaks["peak_without_offload"] = use.peak_without_offload.total
        devices.append({"ids": list(use.ids), "roles": list(use.roles), **peaks, "phases": phases})
    for name, shape in report.shapes.items():
        roles[name] = {"weights": None if shape is None else shape.total, "method": "arithmetic"}
        if (run := report.runs.get(name)) is not None:
            roles[name] |= {"method": run.method, "states": {str(kind): held for kind, held in run.states.items()}}
    for name, found in report.traffic.items():
        flows[name] = [{"collective": one.pop("name"), **one} for one in map(asdict, found)]
    times = {
        name: {"seconds": time.seconds, **asdict(time), "bound": time.bound} for name, time in report.times.items()
    }
    return {
        "name": report.name,
        "gpu": report.hardware.gpu.name,
        "network": report.hardware.network,
        "capacity": report.hardware.gpu.memory,
        "fits": report.fits,
        "problems": list(verdict(report)) if not report.fits else [],
        "peak": report.peak,
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "devices": devices,
        "roles": roles,
        "phases": times,
        "flops": report.flops,
        "traffic": flows,
        "host": report.host,
    }
