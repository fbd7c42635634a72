"""The commands ``roll report``, ``roll diagnose``, ``roll top`` and ``roll trace``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from roll.report.diagnosis import diagnose
from roll.report.evidence import Finding
from roll.report.page import MAX_SAMPLES, write_page
from roll.report.run_files import REPORT_NAME, read_run


def main(words: Sequence[str]) -> int:
    """The command that ``words`` begin with; its exit status.

    Raises:
        ConfigError: a folder that holds no run.
    """
    commands = {"report": report, "diagnose": diagnosis, "top": top, "trace": trace}
    return commands[words[0]](words[1:])


def report(words: Sequence[str]) -> int:
    """Write the report of one or more runs.

    Raises:
        ConfigError: a folder that holds no run.
    """
    parser = argparse.ArgumentParser(
        prog="roll report",
        description="Write one HTML file with everything that runs have recorded: curves, timeline, samples, "
        "configuration, diagnosis. It may be asked for while a run goes on.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="output_dir of a run; several are laid over")
    parser.add_argument("--out", type=Path, help="the file; without it, report.html in the folder of the first run")
    parser.add_argument(
        "--max-samples",
        type=int,
        default=MAX_SAMPLES,
        metavar="N",
        help=f"samples in the file at most, whole steps evenly left out of more (default {MAX_SAMPLES:,})",
    )
    arguments = parser.parse_args(list(words))
    if arguments.max_samples < 1:
        parser.error(f"--max-samples {arguments.max_samples}: must be at least 1")
    runs = [read_run(path) for path in arguments.runs]
    file = arguments.out or runs[0].folder / REPORT_NAME
    count = write_page(runs, file, arguments.max_samples)
    sys.stdout.write(f"{file}  {count:,} samples, {file.stat().st_size / 1e6:.1f} MB\n")
    return 0


def diagnosis(words: Sequence[str]) -> int:
    """Print what is wrong with a run: 0 where no rule finds anything, 1 where one does.

    Raises:
        ConfigError: a folder that holds no run.
    """
    parser = argparse.ArgumentParser(
        prog="roll diagnose",
        description="Name what is wrong with a run, with evidence and remedy, the most probable cause first. "
        "Exit status: 0 nothing found, 1 something found.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, also of one that goes on")
    parser.add_argument("--json", action="store_true", help="a list of findings as JSON")
    arguments = parser.parse_args(list(words))
    run = read_run(arguments.run)
    findings = diagnose(run)
    if arguments.json:
        found = [finding.as_dict() for finding in findings]
        text = json.dumps(found, indent=2, ensure_ascii=False)
    else:
        nothing = f"{run.name}: no rule found anything wrong in {len(run.steps)} steps"
        text = "\n\n".join(map(_as_text, findings)) if findings else nothing
    sys.stdout.write(text + "\n")
    return 1 if findings else 0


def _as_text(finding: Finding) -> str:
    seen = [f"  - {line}" for line in finding.evidence]
    return "\n".join([f"{finding.title}  ({finding.cause})", *seen, f"  remedy: {finding.remedy}"])


def top(words: Sequence[str]) -> int:
    """Show a run in the terminal while it goes on.

    Raises:
        ConfigError: a folder that holds no run.
    """
    from roll.report.live import watch

    parser = argparse.ArgumentParser(
        prog="roll top",
        description="Show a run in the terminal while it goes on: progress, metrics, phases, memory, workers, log.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    arguments = parser.parse_args(list(words))
    if arguments.interval <= 0:
        parser.error(f"--interval {arguments.interval:g}: must be positive")
    with contextlib.suppress(KeyboardInterrupt):
        watch(arguments.run, arguments.interval, arguments.once, Console(emoji=False))
    return 0


def trace(words: Sequence[str]) -> int:
    """Write a run's phases and worker calls as a trace.

    Raises:
        ConfigError: a folder that holds no run.
    """
    from roll.report.traces import otlp, perfetto

    parser = argparse.ArgumentParser(
        prog="roll trace", description="Write a run's steps, phases and worker calls as a trace."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run, also of one that goes on")
    parser.add_argument(
        "--to",
        choices=("perfetto", "otlp"),
        default="perfetto",
        help="perfetto: Chrome's trace events, for ui.perfetto.dev; otlp: OpenTelemetry's JSON (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="the file; without it, trace.json in the folder of the run")
    arguments = parser.parse_args(list(words))
    run = read_run(arguments.run)
    file = arguments.out or run.folder / "trace.json"
    written = otlp(run) if arguments.to == "otlp" else perfetto(run)
    file.write_text(json.dumps(written) + "\n", encoding="utf-8")
    sys.stdout.write(f"{file}\n")
    return 0
