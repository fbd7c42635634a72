"""The report at the end of a run, by the run itself or by the guard of one that ended hard."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from roll.config.pipelines import Panel
from roll.config.reading.errors import ConfigError
from roll.report.page import write_page
from roll.report.run_files import REPORT_NAME, read_run
from roll.tracking.plots import plot_run

logger = logging.getLogger(__name__)


def write_report(output_dir: Path) -> None:
    """``report.html`` in the folder of the run; what prevents it is logged, and the run's end does not fail of it."""
    try:
        write_page([read_run(output_dir)], output_dir / REPORT_NAME)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        logger.warning("the report could not be written: %s: %s", type(error).__name__, error)


def ending_command(
    metrics_path: Path, image_path: Path, title: str, panels: Sequence[Panel], output_dir: Path | None
) -> list[str]:
    """The command that draws what :func:`plot_run` does and writes the report, for a process that has nothing of this
    one. ``output_dir``: None for no report."""
    files = [str(path.resolve()) for path in (metrics_path, image_path)]
    drawn = [title, json.dumps([asdict(panel) for panel in panels])]
    report = [] if output_dir is None else [str(output_dir.resolve())]
    return [sys.executable, "-m", "roll.report.at_end", *files, *drawn, *report]


def main(words: Sequence[str]) -> None:
    """Do what :func:`ending_command` says; both parts are tried."""
    metrics, image, title, panels, *output = words
    try:
        plot_run(Path(metrics), Path(image), title, [Panel(**panel) for panel in json.loads(panels)])
    finally:
        for folder in output:
            write_report(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
