"""The commands ``roll report`` and ``roll diagnose``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from roll.report.diagnosis import diagnose
from roll.report.page import MAX_SAMPLES, write_page
from roll.report.run_files import REPORT_NAME, read_run


def main(words: Sequence[str]) -> int:
    """The command that ``words`` begin with; its exit status. Raises ``ConfigError``: a folder that holds no run."""
    return {"report": report, "diagnose": diagnosis}[words[0]](words[1:])


def report(words: Sequence[str]) -> int:
    """Write the report of one or more runs. Raises ``ConfigError``: a folder that holds no run."""
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
    """Print what is wrong with a run: 0 where no rule finds anything, 1 where one does. Raises ``ConfigError``: a
    folder that holds no run."""
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
        text = json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)
    else:
        parts = []
        for one in findings:
            seen = [f"  - {line}" for line in one.evidence]
            parts.append("\n".join([f"{one.title}  ({one.cause})", *seen, f"  remedy: {one.remedy}"]))
        text = "\n\n".join(parts) or f"{run.name}: no rule found anything wrong in {len(run.steps)} steps"
    sys.stdout.write(text + "\n")
    return 1 if findings else 0
