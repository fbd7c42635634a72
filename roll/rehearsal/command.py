"""``roll rehearse FILE [key=value ...]``: the command, a rehearsal as text and as JSON. Torch-free until it runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.loader import LoadedConfig, load_config
from roll.config.plan.render import compact
from roll.config.reading.compose import add_config_arguments
from roll.distributed.nodes import WORKER_DEFAULTS
from roll.rehearsal.catalog import BETWEEN, DEFAULT_GPU, DEFAULT_NETWORK, GPUS, HOST, WITHIN, hardware
from roll.rehearsal.formulas import size

if TYPE_CHECKING:
    from roll.rehearsal.recipe import Rehearsal

EXIT_DOES_NOT_FIT = 1


def main(words: Sequence[str]) -> int:
    """0: it fits; 1: it does not; mistakes raise ``ConfigError``."""
    arguments = build_parser().parse_intermixed_args(words)
    # "ROLE=FILE", or "FILE" for all roles.
    parts = [text.partition("=") if "=" in text else ("", "=", text) for text in arguments.model_config]
    given = {role: Path(file) for role, _, file in parts}
    loaded: LoadedConfig[Any] = load_config(None, arguments.config, None, arguments.overrides, check_files=False)
    # No accelerator is needed, or touched. On this host's processor, kernels run as workers run them.
    os.environ["ROLL_PLATFORM"] = "cpu"
    os.environ |= {name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ}
    devices = loaded.plan.num_devices_per_node
    if arguments.gpu == HOST:
        from roll.rehearsal.host import this_host

        machine = this_host(devices)
    else:
        machine = hardware(arguments.gpu, arguments.network, devices)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from roll.rehearsal.recipe import rehearse_recipe
    from roll.rehearsal.suggestions import suggest

    say = partial(Console(stderr=True, emoji=False).print, markup=False, highlight=False, soft_wrap=True)
    known: dict[Any, Any] = {}
    report = rehearse_recipe(loaded, machine, given, say, known)
    found = [] if report.fits or arguments.no_suggestions else suggest(loaded, report, given, say, known)
    if arguments.json:
        content = to_json(report) | {"suggestions": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        console = Console(emoji=False, width=max(100, Console().width))
        render(report, console)
        for one in found:
            share = f"{size(one.peak)} of {size(machine.gpu.memory)}"
            text = f"fits with {' '.join(one.overrides)}: at most {share}, a step of at least {one.seconds:,.1f} s"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if not report.fits and not found and not arguments.no_suggestions:
            console.print("no single change that was rehearsed makes it fit", markup=False, highlight=False)
    return 0 if report.fits else EXIT_DOES_NOT_FIT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll rehearse",
        description="Memory, FLOPs, traffic and a lower bound of the time of a recipe's step at its full size, without "
        "weights and without devices. Exit status 1: it does not fit.",
    )
    add_config_arguments(parser, "changes, as of roll run")
    parser.add_argument(
        "--gpu", default=DEFAULT_GPU, help=f"{', '.join(GPUS)}, or {HOST}: this host's processor (default: %(default)s)"
    )
    parser.add_argument(
        "--network",
        default=DEFAULT_NETWORK,
        help=f"one of {', '.join(WITHIN)}, a plus sign and one of {', '.join(BETWEEN)} (default: %(default)s)",
    )
    parser.add_argument(
        "--model-config",
        action="append",
        default=[],
        metavar="[ROLE=]FILE",
        help="the config.json of a model that is neither on this machine nor a known size; of all roles, or of one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, FLOPs and seconds")
    parser.add_argument("--no-suggestions", action="store_true", help="do not look for what would fit")
    return parser


def render(report: Rehearsal, console: Console) -> None:
    """Print everything that is known."""
    from roll.rehearsal.roofline import merged

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
