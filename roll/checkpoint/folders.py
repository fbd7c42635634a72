"""Files and folders that appear whole or not at all; a folder has a manifest of its files, with size and hash, so that
a torn copy is noticed.

A writer first takes the lock ``.NAME.RANDOM.lock``, then writes into ``.NAME.RANDOM.partial``, which is renamed at the
end. One that dies leaves a hidden folder whose lock is free; :func:`sweep` finds and removes it. The lock is the
kernel's (``flock``), so a killed process cannot keep it, and a folder that another living run is writing is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
PIPELINE_FOLDER = "pipeline"
"""Folder of a checkpoint with the state of its pipeline, as :mod:`roll.checkpoint.state` writes one."""
STATE_NAME = "state.json"
SUPERSEDED = "superseded-"
"""Prefix of the names of checkpoints of a branch that the run has left."""
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
_FORMAT = 1
# hashlib releases the interpreter lock, so threads hash several files at once; more than a few only fight for the disk.
_HASH_THREADS = min(8, os.cpu_count() or 1)
_LOCK_SUFFIX, _PARTIAL_SUFFIX, _REPLACED_SUFFIX = ".lock", ".partial", ".replaced"


class CheckpointDamagedError(ValueError):
    """A checkpoint folder that is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a manifest: ``size`` in bytes, ``blake2b`` (16 bytes, hexadecimal) of its contents."""

    size: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a finished folder; ``files`` maps POSIX paths relative to the folder to their entries."""

    step: int
    created: str
    files: dict[str, FileEntry]


def write_manifest(folder: Path, step: int) -> Manifest:
    """Write the manifest of ``folder`` and flush every file in it to disk. Raises ``ValueError``: the folder holds no
    file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST_NAME]
    if not paths:
        raise ValueError(f"nothing was written to the checkpoint folder {folder}")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes = list(pool.map(_hash_file, paths))
    files = {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, digest)
        for path, digest in zip(paths, hashes, strict=True)
    }
    manifest = Manifest(step, datetime.now(UTC).isoformat(timespec="seconds"), files)
    content = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1, sort_keys=True)
    (folder / MANIFEST_NAME).write_text(content + "\n", encoding="utf-8")
    flush_folder(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of ``folder``. Raises ``CheckpointDamagedError``: it is missing or unreadable, or was written
    by a later version of this package."""
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise CheckpointDamagedError(f"{path}: format {content['format']} is not the one known here ({_FORMAT})")
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        # A manifest may come from a store that others write to: nothing outside of the folder is read or replaced.
        outside = next((name for name in files if Path(name).is_absolute() or ".." in Path(name).parts), None)
        if outside is not None:
            raise CheckpointDamagedError(f"{path}: {outside!r} is no file of this folder")
        return Manifest(int(content["step"]), content["created"], files)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder}: no {MANIFEST_NAME}, so it was never finished") from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"{path}: not a readable manifest ({error!r})") from error


def verify_folder(folder: Path, contents: bool = True) -> Manifest:
    """Compare ``folder`` with its manifest: names and sizes, and the hashes too if ``contents``.

    Files that the manifest does not name are allowed (a note that the user left there, say). Raises
    ``CheckpointDamagedError``: names the first file that is missing, truncated or changed.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointDamagedError(f"{folder}: {name} is missing")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointDamagedError(f"{folder}: {name} has {size} bytes instead of {entry.size}")
    if contents:
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            hashes = pool.map(_hash_file, [folder / name for name in manifest.files])
            for (name, entry), digest in zip(manifest.files.items(), hashes, strict=True):
                if digest != entry.blake2b:
                    raise CheckpointDamagedError(f"{folder}: the contents of {name} have changed since it was written")
    return manifest


def supersede(path: Path) -> Path:
    """Rename a checkpoint so that no run finds it; one that has the new name is replaced. Return its new path."""
    superseded = path.with_name(f"{SUPERSEDED}{path.name}")
    if superseded.exists():
        shutil.rmtree(superseded)
    return path.rename(superseded)


def flush_folder(folder: Path) -> None:
    """Make everything in ``folder`` survive a power cut, what other processes of this host have written included."""
    for directory, _, names in os.walk(folder):
        for name in names:
            flush_path(Path(directory, name))
        flush_path(Path(directory))


def flush_path(path: Path) -> None:
    """Flush a file's contents, or a directory's entries (new names, renames)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write to; on success it takes the place of ``final``, in one step.

    A reader finds the former file or the new one, also after a kill. If the block raises, the hidden file is removed
    and ``final`` is as it was. One writer at a time.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.part")
    try:
        yield partial
        partial.replace(final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a hidden sibling of ``final`` to write into; on success it becomes ``final``, replacing an earlier one.

    If the block raises, the hidden folder is removed and ``final`` is as it was.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    descriptor, lock = _new_lock(final)
    partial = lock.with_suffix(_PARTIAL_SUFFIX)
    try:
        partial.mkdir()
        yield partial
        replaced = final.with_name(f".{final.name}{_REPLACED_SUFFIX}")
        # A folder cannot be renamed over one that is not empty. A kill between the renames is undone by sweep().
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        # The rename itself is an entry of the parent: without this a power cut may undo it after the step has been
        # reported.
        flush_path(final.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _new_lock(final: Path) -> tuple[int, Path]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=_LOCK_SUFFIX, dir=final.parent)
        lock = Path(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        if lock.exists():
            return descriptor, lock
        os.close(descriptor)  # another process swept the file away before it was locked


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that a kill midway leaves nothing that looks like it: hidden first, then deleted."""
    hidden = folder.with_name(f".{folder.name}.removed{_PARTIAL_SUFFIX}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def sweep(parent: Path) -> None:
    """Remove what killed writers left in ``parent``; put back a folder whose replacement was interrupted."""
    for replaced in sorted(parent.glob(f".*{_REPLACED_SUFFIX}")):
        original = parent / replaced.name.removeprefix(".").removesuffix(_REPLACED_SUFFIX)
        if original.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(original)
            logger.warning("put back %s: the run that was replacing it was killed", original)
    for partial in sorted(parent.glob(f".*{_PARTIAL_SUFFIX}")):
        # Free: its writer is dead, since the kernel holds the lock for as long as the process lives.
        if not _is_locked(partial.with_suffix(_LOCK_SUFFIX)):
            shutil.rmtree(partial, ignore_errors=True)
            logger.warning("removed %s: left by a run that was killed", partial)
    for lock in sorted(parent.glob(f".*{_LOCK_SUFFIX}")):
        _is_locked(lock, remove=True)


def _is_locked(lock: Path, remove: bool = False) -> bool:
    """True if a writer holds it; with ``remove`` the file of any other goes, before a new writer can hold it."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            lock.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk: ``path`` is its folder, ``step`` the number in its name."""

    path: Path
    step: int

    def role(self, name: str) -> Path:
        """The folder that the role ``name`` (``actor_train``, ``critic``, ...) wrote. Raises ``FileNotFoundError``: the
        checkpoint was written by a run without this role."""
        folder = self.path / name
        if not folder.is_dir():
            roles = sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())
            raise FileNotFoundError(f"{self.path} holds nothing for role {name!r}; it holds {', '.join(roles)}")
        return folder


def step_of(name: str) -> int:
    match = CHECKPOINT_NAME.fullmatch(name)
    assert match is not None, name
    return int(match.group(1))


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Folders of this name in ``folder``, whole or not."""
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if entry.is_dir() and CHECKPOINT_NAME.fullmatch(entry.name)]
    return [Checkpoint(entry, step_of(entry.name)) for entry in found]


def latest_of(folders: Sequence[Path], contents: bool = True) -> Checkpoint | None:
    """The whole checkpoint with the highest step; damaged ones are skipped and, if ``contents`` are read, logged."""
    candidates = [candidate for folder in folders for candidate in checkpoints_in(folder)]
    # The sort is stable: at equal steps the copy in the first folder stays in front.
    for candidate in sorted(candidates, key=lambda candidate: -candidate.step):
        try:
            verify_folder(candidate.path, contents)
        except CheckpointDamagedError as error:
            if contents:
                logger.warning("skipped a damaged checkpoint: %s", error)
        else:
            return candidate
    return None
