"""A worker's log: one file a worker, everything in it, readable when the worker can no longer answer."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

from roll.config.reading.masking import masked_text

LOG_DIR_ENV = "ROLL_LOG_DIR"
"""The folder of worker logs; without it they lie in Ray's session folder and go with it."""

STACK_SIGNAL = signal.SIGUSR2
"""On this signal a worker writes the Python stacks of its threads to its log, even when stuck in a C call."""

STACK_HEADER = "Current thread"


def open_worker_log(worker_name: str, log_dir: Path | None) -> Path | None:
    """Send the process's standard output and error to ``<log_dir>/<worker_name>.log`` and set logging up.

    The file descriptors themselves are redirected, so that what C++ libraries and crash handlers write is in it too.
    Returns the file, or None where the streams stay where Ray put them.
    """
    path = None
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / f"{worker_name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(
        _MaskingFormatter(f"%(asctime)s %(levelname)s [{worker_name}] %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    return path


class _MaskingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked_text(super().format(record))


def tail(path: Path, lines: int = 20, begin: int = 0) -> list[str]:
    """The last ``lines`` lines of the file behind byte ``begin``; empty when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [masked_text(line) for line in [line for line in text.splitlines() if line.strip()][-lines:]]
