"""The folder of a private Ray's sockets and logs: one a run, gone with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "roll-ray-"
_LOCK_FILE = "driver.lock"
_LONGEST_BASE = 24
"""Ray's socket names under the folder take up to 80 of the 107 bytes that a Unix socket's path may have."""


@contextlib.contextmanager
def session_dir() -> Iterator[Path]:
    """A fresh folder, removed at the end; folders that killed runs left behind are removed first.

    The driver holds a lock on a file in its folder, so a folder whose lock is free belongs to nobody.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= _LONGEST_BASE else "/tmp"
    remove_abandoned(Path(base))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        with (folder / _LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(base: Path) -> None:
    """Remove this user's session folders under ``base`` whose driver is gone."""
    for lock_file in base.glob(f"{PREFIX}*/{_LOCK_FILE}"):
        with contextlib.suppress(OSError):  # in use, another user's, or removed meanwhile
            if lock_file.stat().st_uid != os.getuid():
                continue
            with lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
