"""``roll doctor [--json] [--quick] [--output DIR] [--ranks N]``.

The exit status is 0 when everything is in order, 1 when runs work with warnings, 2 when they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from roll.config.run import RunConfig
from roll.doctor import host, trials
from roll.doctor.findings import EXIT, Finding, Severity, as_json, gravest, render


def main(argv: Sequence[str]) -> int:
    """The exit status follows the gravest finding."""
    options = build_parser().parse_args(list(argv))
    # Programs and files want the report only.
    say = (lambda text: None) if options.json or not sys.stderr.isatty() else _say
    findings = examine(Path(options.output), options.ranks, options.quick, say)
    if options.json:
        sys.stdout.write(json.dumps(as_json(findings), indent=1) + "\n")
    else:
        render(findings, Console(emoji=False))
    return EXIT[gravest(findings)]


def examine(output: Path, ranks: int, quick: bool, say: Callable[[str], None]) -> list[Finding]:
    """Every finding, in the order of the report.

    Args:
        output: the folder that a run would write to.
        ranks: of the trial of collectives.
        quick: nothing is tried, only looked at.
        say: is given a line before each thing that takes time.
    """
    findings: list[Finding] = []

    def look(section: str, found: Callable[[], Iterable[Finding]]) -> None:
        say(f"{section} ...")
        try:
            findings.extend(replace(finding, section=section) for finding in found())
        except Exception as error:  # the rest of the report is still worth having
            value, remedy = f"{type(error).__name__}: {error}", "an error of roll doctor: report it"
            findings.append(Finding("look", value, "can be looked at", Severity.ERROR, remedy, section=section))

    look("versions", host.versions)
    look("backends", lambda: host.backends({} if quick else trials.try_imports()))
    look("devices", host.devices)
    if not quick:
        look("devices", trials.try_devices)
    look("limits", lambda: host.limits(output))
    look("clock", lambda: host.clock(os.environ))
    look("network", lambda: host.network(os.environ))
    if not quick:
        look("collectives", lambda: trials.try_collectives(ranks))
        look("ray", trials.try_ray)
        look("sandbox", trials.try_sandbox)
    return findings


def _say(text: str) -> None:
    Console(stderr=True, emoji=False).print(text, markup=False, highlight=False, style="dim")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll doctor",
        description="See whether runs work on this host, and why not. Exit status: 0 in order, 1 warnings, 2 errors.",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON, for a cluster's prologue")
    parser.add_argument("--quick", action="store_true", help="look only: no imports, collectives, Ray or sandbox")
    parser.add_argument(
        "--output", default=RunConfig.output_dir, help="folder that a run would write to (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, choices=range(1, 17), metavar="N", help="ranks that try collectives (2)"
    )
    return parser
