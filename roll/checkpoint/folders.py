"""Folders that appear whole or not at all: written under a hidden name, locked meanwhile, then renamed.

A writer first takes the lock ``.NAME.RANDOM.lock``, then makes ``.NAME.RANDOM.partial``. One that dies leaves a hidden
folder whose lock nobody holds; :func:`sweep` finds and removes it. The lock is the kernel's (``flock``), so a killed
process cannot keep it, and a folder that another living run is writing is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll.checkpoint.manifest import flush_path

logger = logging.getLogger(__name__)

_LOCK_SUFFIX = ".lock"
_PARTIAL_SUFFIX = ".partial"
_REPLACED_SUFFIX = ".replaced"


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write into; on success it becomes ``final``, replacing what stood there.

    If the block raises, the hidden folder is removed and ``final`` is as it was.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    descriptor, lock_name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=_LOCK_SUFFIX, dir=final.parent)
    lock = Path(lock_name)
    partial = lock.with_suffix(_PARTIAL_SUFFIX)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        partial.mkdir()
        yield partial
        _replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that a kill midway leaves nothing that looks like it: hidden first, then deleted."""
    hidden = folder.with_name(f".{folder.name}.removed{_PARTIAL_SUFFIX}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def sweep(parent: Path) -> None:
    """Remove what killed writers left in ``parent``; put back a folder whose replacement was cut short."""
    for replaced in sorted(parent.glob(f".*{_REPLACED_SUFFIX}")):
        original = parent / replaced.name.removeprefix(".").removesuffix(_REPLACED_SUFFIX)
        if original.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(original)
            logger.warning("put back %s: the run that was replacing it was killed", original)
    for partial in sorted(parent.glob(f".*{_PARTIAL_SUFFIX}")):
        if not _is_locked(partial.with_suffix(_LOCK_SUFFIX)):
            shutil.rmtree(partial, ignore_errors=True)
            logger.warning("removed %s: left by a run that was killed", partial)
    for lock in sorted(parent.glob(f".*{_LOCK_SUFFIX}")):
        if not _is_locked(lock):
            lock.unlink(missing_ok=True)


def _replace(partial: Path, final: Path) -> None:
    replaced = final.with_name(f".{final.name}{_REPLACED_SUFFIX}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    flush_path(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
