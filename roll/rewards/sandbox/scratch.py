"""Private folders where no memory disk can be mounted, and their removal whatever a program has made of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterator

_PREFIX = "roll-sandbox-"
_OWNERS_RIGHTS = 0o700
_AT_ONCE = 1000
"""Names of a folder that are read at a time."""


class OutOfBudget(Exception):
    """There is more to remove than was asked for."""


def make_parent() -> str:
    """A folder for private folders: their names cannot be listed, and their owners cannot replace them."""
    path = tempfile.mkdtemp(prefix=_PREFIX)
    os.chmod(path, 0o711)
    return path


def make_folder(parent: str, uid: int | None) -> str:
    path = tempfile.mkdtemp(dir=parent)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def remove_tree(path: str, budget: int | None = None) -> None:
    """Remove a folder of any depth and with any permissions; every process that could still change it must have ended.

    Without recursion and without long paths: each nested folder is moved up to the top before it is emptied.

    Args:
        budget: entries to remove at most; None: all.

    Raises:
        OutOfBudget: some are left.
        OSError: it cannot be removed.
    """
    steps = itertools.count()
    mark = secrets.token_hex(8)

    def step() -> int:
        number = next(steps)
        if budget is not None and number >= budget:
            raise OutOfBudget
        return number

    with contextlib.suppress(FileNotFoundError):
        with opened(path) as top:
            while names := listed(top):
                for name, is_folder in names:
                    step()
                    if not is_folder:
                        os.unlink(name, dir_fd=top)
                        continue
                    with opened(name, top) as folder:
                        while inner := listed(folder):
                            for each, nested in inner:
                                number = step()
                                if nested:
                                    # A folder must be writable to get another parent.
                                    with opened(each, folder):
                                        moved = f"{mark}-{number}"
                                        os.rename(each, moved, src_dir_fd=folder, dst_dir_fd=top)
                                else:
                                    os.unlink(each, dir_fd=folder)
                    os.rmdir(name, dir_fd=top)
        os.rmdir(path)


def listed(folder: int) -> list[tuple[str, bool]]:
    """Some entries of a folder, each with whether it is one itself."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in itertools.islice(entries, _AT_ONCE)]


@contextlib.contextmanager
def opened(path: str, parent: int | None = None) -> Iterator[int]:
    """A folder, opened after its owner has got all rights back. Symbolic links are not followed.

    Raises:
        OSError: it is no folder, or someone else's.
    """
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path, os.O_RDONLY | flags, dir_fd=parent)
    except PermissionError:
        handle = os.open(path, os.O_PATH | flags, dir_fd=parent)
        try:
            # The folder itself, whatever its name leads to by now.
            os.chmod(f"/proc/self/fd/{handle}", _OWNERS_RIGHTS)
        finally:
            os.close(handle)
        folder = os.open(path, os.O_RDONLY | flags, dir_fd=parent)
    try:
        if os.fstat(folder).st_mode & _OWNERS_RIGHTS != _OWNERS_RIGHTS:
            os.fchmod(folder, _OWNERS_RIGHTS)
        yield folder
    finally:
        os.close(folder)
