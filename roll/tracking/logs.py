"""Logging of a run: everything to a file, what a person wants to see to the console."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

from roll.config.masking import masked_text

STEP_LOGGER = "roll.steps"
"""Its records are the one line a step; on a terminal the progress bar shows them instead."""
ENDING_LOGGER = "roll.ending"
"""Its records say why a run ended early; on the console the command line says it, last of all."""
LOG_NAME = "run.log"

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class MaskingFormatter(logging.Formatter):
    """Formats a record, its traceback included, without the secrets in it."""

    def format(self, record: logging.LogRecord) -> str:
        return masked_text(super().format(record))


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the moment: a progress bar redirects it to draw itself below the lines."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignored: the base class sets it once."""


def setup_logging(log_dir: Path, level: int = logging.INFO, *, interactive: bool | None = None) -> Path:
    """Send records of the package to ``log_dir/run.log`` (appended to) and to standard error; return the file's path.

    Called again, it replaces what the last call set up. The root logger is left alone, so other libraries' records go
    where they went.

    Args:
        log_dir: made if need be.
        level: the least level that is written.
        interactive: True keeps the step lines off the console, for a progress bar is there; None: if standard error is
            a terminal.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / LOG_NAME
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(MaskingFormatter(_FORMAT))
    console = _ConsoleHandler()
    console.setFormatter(MaskingFormatter(_CONSOLE_FORMAT, datefmt="%H:%M:%S"))
    if interactive is None:
        interactive = sys.stderr.isatty()
    console.addFilter(lambda record: record.name != ENDING_LOGGER)
    if interactive:
        console.addFilter(lambda record: record.name != STEP_LOGGER)
    package = logging.getLogger("roll")
    for handler in list(package.handlers):
        package.removeHandler(handler)
        handler.close()
    package.setLevel(level)
    package.propagate = False
    package.addHandler(file)
    package.addHandler(console)
    return path
