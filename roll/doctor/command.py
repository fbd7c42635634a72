"""``roll doctor [--json] [--quick | --gpu] [--output DIR] [--ranks N]``.

Versions, devices and drivers are what PyTorch's ``torch.utils.collect_env`` says of them, a cluster's nodes those of
``ray status``. The exit status is 0 when everything is in order, 1 when runs work with warnings, 2 when they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll import __version__
from roll.config.model_files import is_installed
from roll.config.reading.masking import masked
from roll.config.run import RunConfig
from roll.config.strategies.registry import BACKENDS
from roll.doctor import devices, trials
from roll.doctor.trials import EXIT, Finding, Severity, gravest, judge
from roll.platforms import PLATFORM_ENV, current_platform

GIBIBYTE = 1 << 30
LEAST_SHM, LEAST_FILES = 256 << 20, 1024
LEAST_DISK, COMFORTABLE_DISK = 100 << 20, 5 * GIBIBYTE


def main(argv: Sequence[str]) -> int:
    """The exit status follows the gravest finding."""
    options = build_parser().parse_args(list(argv))
    if options.gpu:
        here = current_platform()
        if not (PLATFORM_ENV in os.environ if here.name == "cpu" else here.device_count()):
            sys.stderr.write(
                f"roll doctor --gpu: PyTorch {metadata.version('torch')} finds no GPU: nvidia-smi must list one, and "
                f"PyTorch be built for it; {PLATFORM_ENV}=cpu tries the same on the CPU\n"
            )
            return EXIT[Severity.ERROR]
    began = time.perf_counter()
    findings = examine(Path(options.output), options.ranks, options.quick, options.gpu)
    seconds = round(time.perf_counter() - began, 1)
    environment = ""
    if not options.quick:  # versions, devices and drivers, as a report of a fault to PyTorch has them
        from torch.utils.collect_env import get_pretty_env_info

        environment = str(get_pretty_env_info())
    if options.json:
        listed = [asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings]
        status = {"status": gravest(findings).name.lower(), "exit_status": EXIT[gravest(findings)]}
        report = {"roll": __version__, **status, "seconds": seconds, "findings": listed, "environment": environment}
        sys.stdout.write(json.dumps(masked(report), indent=1) + "\n")
    else:
        render(findings, environment, Console(emoji=False))
    return EXIT[gravest(findings)]


def examine(output: Path, ranks: int, quick: bool, gpu: bool = False) -> list[Finding]:
    """Every finding, in the order of the report.

    Args:
        output: the folder that a run would write to.
        ranks: of the trial of collectives.
        quick: nothing is tried, only looked at.
        gpu: the devices are tried, not the sandbox.
    """
    looks: dict[str, Callable[[], Iterable[Finding]]] = {"backends": backends, "limits": partial(limits, output)}
    if gpu:
        looks |= {"memory": devices.try_memory, "arithmetic": devices.try_arithmetic}
    if not quick:
        here = current_platform()
        ranks = here.device_count() if gpu and here.name != "cpu" else ranks
        looks["collectives"] = partial(trials.try_collectives, ranks)
        looks |= {"run": trials.try_run} if gpu else {"sandbox": trials.try_sandbox}
    findings: list[Finding] = []
    for section, look in looks.items():
        try:
            findings.extend(replace(finding, section=section) for finding in look())
        except Exception as error:  # the rest of the report is still worth having
            value, remedy = f"{type(error).__name__}: {error}", "an error of roll doctor: report it"
            findings.append(Finding("look", value, "can be looked at", Severity.ERROR, remedy, section=section))
    return findings


def backends() -> Iterator[Finding]:
    """Every strategy and engine: installed or not, in which version, and how to install it."""
    brought = metadata.packages_distributions()
    for backend in BACKENDS.rows:
        package, names = backend.package, ", ".join(backend.names)
        if package is None:
            yield Finding(backend.name, f"{names}: ready", "comes with the base install")
            continue
        distribution = next(iter(brought.get(package.module.partition(".")[0], ())), None)
        version = "" if distribution is None else f", {metadata.version(distribution)}"
        there = is_installed(package.module)
        value = f"{names}: ready{version}" if there else f"{names}: not installed"
        remedy = f"{package.install}; or leave it, if no recipe uses it"
        yield judge(backend.name, value, f"needs the package {package.module}", there, remedy, Severity.NOTE)


def limits(output: Path) -> Iterator[Finding]:
    """Shared memory, open files, and the disk of the output folder."""
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.exists() else 0
    rule = f"{LEAST_SHM >> 20} MiB free in /dev/shm, for the batches between processes"
    remedy = (
        "batches go through files, which is slower: --shm-size=1g for docker run, shm_size: 1gb in a compose file, "
        "an emptyDir with medium: Memory at /dev/shm under Kubernetes"
    )
    yield judge("shared memory", f"{free / GIBIBYTE:.2f} GiB free", rule, free >= LEAST_SHM, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rule, remedy = f"{LEAST_FILES} or more; 65536 with hundreds of workers", "ulimit -n 65536 before the start"
    yield judge("open files", f"{soft} (at most {hard})", rule, soft >= LEAST_FILES, remedy)
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    room = f"{COMFORTABLE_DISK // GIBIBYTE} GiB"
    rule = f"can be written, with {room} free: a checkpoint takes 12 to 16 bytes a parameter"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".roll-doctor-") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "give the user of the run the right to write there, or name another folder by --output and output_dir"
        yield Finding("output folder", f"{folder}: {error.strerror}", rule, Severity.ERROR, remedy)
        return
    value, remedy = f"{folder}: {free / GIBIBYTE:.1f} GiB free", "free some of it, or name another disk by output_dir"
    severity = Severity.WARNING if free >= LEAST_DISK else Severity.ERROR
    yield judge("output folder", value, rule, free >= COMFORTABLE_DISK, remedy, severity)


def render(findings: Sequence[Finding], environment: str, console: Console) -> None:
    """PyTorch's report, a table of all findings, then the rule and the remedy of each that is not in order."""
    if environment:
        console.print(f"{masked(environment)}\n", markup=False, highlight=False, soft_wrap=True)
    table = Table("", "checked", "found", "", box=None, pad_edge=False)
    for finding in findings:
        # Text, since messages of errors hold brackets, which Rich would take for markup.
        cells = (finding.section, finding.what, str(masked(finding.value)), finding.severity.name.lower())
        table.add_row(*map(Text, cells))
    console.print(table)
    for finding in sorted(findings, key=lambda finding: -finding.severity):
        if finding.severity > Severity.OK:
            text = f"\n{finding.severity.name.lower()}: {finding.section}: {finding.what}\n  rule: {finding.rule}"
            console.print(f"{text}\n  remedy: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)
    ends = {Severity.WARNING: "runs work here, with the warnings above", Severity.ERROR: "runs do not work here"}
    console.print(f"\n{ends.get(gravest(findings), 'runs work here')}", highlight=False)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll doctor",
        description="See whether runs work on this host, and why not. Exit status: 0 in order, 1 warnings, 2 errors.",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON, for a cluster's prologue")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="look only: no report of PyTorch, collectives or sandbox")
    depth.add_argument(
        "--gpu",
        action="store_true",
        help="try the devices in place of the sandbox: memory, arithmetic, collectives, two steps of a run; "
        "ROLL_PLATFORM=cpu tries what a CPU has",
    )
    parser.add_argument(
        "--output", default=RunConfig.output_dir, help="folder that a run would write to (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, choices=range(1, 17), metavar="N", help="ranks that try collectives (2)"
    )
    return parser
