"""The command ``roll report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.report.page import MAX_SAMPLES, write_page
from roll.report.run_files import REPORT_NAME, read_run


def main(words: Sequence[str]) -> int:
    """Write the report of one or more runs.

    Raises:
        ConfigError: a folder that holds no run.
    """
    parser = argparse.ArgumentParser(
        prog="roll report",
        description="Write one HTML file with everything that runs have recorded: curves, timeline, samples, "
        "configuration, diagnosis. It may be asked for while a run goes on.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="output_dir of a run; several lie over another")
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
