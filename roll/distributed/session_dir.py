"""The folder of a private Ray's sockets and logs: one a run, gone with it, and closed to other users."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "roll-ray-"
RAY_FOLDER = "s"
"""Inside ours, since Ray opens the folder that it is given to everyone (mode 0777)."""
_LOCK_FILE = "driver.lock"
_LONGEST_BASE = 20
"""Ray's socket names under its folder take up to 67 of the 107 bytes that a Unix socket's path may have."""


@contextlib.contextmanager
def session_dir() -> Iterator[Path]:
    """A fresh folder for Ray, removed at the end; folders that killed runs left behind are removed first.

    The folder lies in one that only this user may enter. The driver holds a lock on a file there, so a folder whose
    lock is free belongs to nobody.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= _LONGEST_BASE else "/tmp"
    remove_abandoned(Path(base))
    closed = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
    try:
        with (closed / _LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = closed / RAY_FOLDER
            folder.mkdir(0o700)
            yield folder
    finally:
        shutil.rmtree(closed, ignore_errors=True)


def remove_abandoned(base: Path) -> None:
    """Remove this user's session folders under ``base`` whose driver is gone."""
    for lock_file in base.glob(f"{PREFIX}*/{_LOCK_FILE}"):
        with contextlib.suppress(OSError):  # in use, another user's, or removed meanwhile
            if lock_file.stat().st_uid != os.getuid():
                continue
            with lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
