"""Copies of checkpoints in object storage, by fsspec: ``s3://bucket/runs``, ``gs://``, ``az://``, ``file://``, ``memory://``.

Object storage has no rename.  A checkpoint is copied file by file, its manifest last: without a manifest there is no
checkpoint.  One that is fetched is compared with its manifest like any other.
"""

from __future__ import annotations

import atexit
import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from roll.checkpoint.folders import (
    CHECKPOINT_NAME,
    MANIFEST_NAME,
    CheckpointDamagedError,
    atomic_folder,
    flush_folder,
    read_manifest,
    step_of,
    supersede,
    verify_folder,
)

logger = logging.getLogger(__name__)


def is_url(place: str | Path) -> bool:
    """True for a URL, which fsspec opens; a plain path is a folder."""
    return "://" in str(place)


def store_problem(url: str) -> str | None:
    """The reason why this host cannot open a store; None: it can."""
    import fsspec  # type: ignore[import-untyped, unused-ignore]

    protocol = url.split("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = ", ".join(sorted(fsspec.available_protocols()))
        return f"{protocol} is no kind of storage that fsspec knows; it knows {known}"
    except ImportError as error:
        return f"{error} (its package is not installed; for s3://: pip install s3fs)"
    return None


class ObjectStore:
    """Checkpoints below one URL. ``options``: of fsspec's file system (``endpoint_url``, ``anon`` ...). Keys come from
    the environment."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self.options = dict(options or {})

    def __str__(self) -> str:
        return self.url

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        with self._errors():
            fs, root = fsspec.core.url_to_fs(self.url, **self.options)
            return fs, str(root).rstrip("/")

    def names(self) -> list[str]:
        """Folders directly below the URL that have a manifest. Raises ``OSError``: the store does not answer."""
        fs, root = self._opened
        with self._errors():
            # fsspec caches listings per process: checkpoints that another process has written would not be seen.
            fs.invalidate_cache()
            if not fs.exists(root):
                return []
            found = []
            for entry in fs.ls(root, detail=True):
                folder = str(entry["name"]).rstrip("/")
                with suppress(FileNotFoundError):
                    # Some stores (HDFS) make a file before its contents, so an empty manifest is none yet.
                    if fs.size(f"{folder}/{MANIFEST_NAME}"):
                        found.append(posixpath.basename(folder))
            return found

    def later_than(self, step: int | None) -> list[str]:
        """Names of the checkpoints after ``step`` (None: of all), the last one first.

        Raises:
            OSError: the store does not answer.
        """
        names = [name for name in self.names() if CHECKPOINT_NAME.fullmatch(name)]
        return sorted((name for name in names if step is None or step_of(name) > step), key=step_of, reverse=True)

    def put(self, folder: Path) -> None:
        """Copy a checkpoint, replacing one of its name. Raises ``OSError``: a file could not be copied; there is no
        checkpoint of this name now; ``CheckpointDamagedError``: it has other sizes there."""
        fs, root = self._opened
        target = f"{root}/{folder.name}"
        files = read_manifest(folder).files
        with self._errors():
            if fs.exists(f"{target}/{MANIFEST_NAME}"):  # else a torn copy would have the manifest of the old one
                fs.rm_file(f"{target}/{MANIFEST_NAME}")
            # The manifest last: names() counts a folder as a checkpoint once it is there.
            for name in (*files, MANIFEST_NAME):
                fs.makedirs(posixpath.dirname(f"{target}/{name}"), exist_ok=True)
                fs.put_file(str(folder / name), f"{target}/{name}")
                size = fs.size(f"{target}/{name}")
                if name in files and size != files[name].size:
                    raise CheckpointDamagedError(f"{target}/{name} has {size} bytes instead of {files[name].size}")

    def fetch(self, name: str, parent: Path) -> Path:
        """Copy a checkpoint into ``parent``, whole or not at all; the same one that is there already is used.

        Another one of its name, from another run say, is renamed to ``superseded-checkpoint-<n>``. Raises ``OSError``:
        the store does not answer, or has no such checkpoint; ``CheckpointDamagedError``: it is not what its manifest
        says.
        """
        final = parent / name
        if final.is_dir():
            stored = read_manifest(self.fetch_some(name, ()))
            try:
                if verify_folder(final).files == stored.files:
                    return final
                logger.warning("%s is not %s/%s: it is now %s", final, self.url, name, supersede(final).name)
            except CheckpointDamagedError as error:
                logger.warning("%s; its copy is used", error)
        logger.info("fetching %s/%s", self.url, name)
        with atomic_folder(final) as folder:
            self._get(name, folder, lambda file: True)
            verify_folder(folder)
            flush_folder(folder)
        return final

    def fetch_some(self, name: str, file_names: Collection[str]) -> Path:
        """The files of a checkpoint that have one of these names, in a temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="roll-checkpoint-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._get(name, folder / name, lambda file: posixpath.basename(file) in file_names)
        return folder / name

    def _get(self, name: str, folder: Path, wanted: Callable[[str], bool]) -> None:
        fs, root = self._opened
        folder.mkdir(parents=True, exist_ok=True)
        with self._errors():
            fs.get_file(f"{root}/{name}/{MANIFEST_NAME}", str(folder / MANIFEST_NAME))
            for file in filter(wanted, read_manifest(folder).files):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{name}/{file}", str(folder / file))

    def rename(self, name: str, new_name: str) -> None:
        """Rename a checkpoint, replacing one that has the new name."""
        fs, root = self._opened
        with self._errors():
            if fs.exists(f"{root}/{new_name}"):
                fs.rm(f"{root}/{new_name}", recursive=True)
            if "file" in fs.protocol:
                fs.mv(f"{root}/{name}", f"{root}/{new_name}", recursive=True)
                return
            # An object store renames no folders. The manifest makes a checkpoint whole: it comes last, goes first.
            files = sorted(fs.find(f"{root}/{name}"), key=lambda file: file == f"{root}/{name}/{MANIFEST_NAME}")
            for file in files:
                fs.copy(file, f"{root}/{new_name}{file.removeprefix(f'{root}/{name}')}")
            for file in reversed(files):
                fs.rm_file(file)
            if fs.exists(f"{root}/{name}"):  # some stores have folders after all
                fs.rm(f"{root}/{name}", recursive=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Whichever client fsspec uses, its errors are an ``OSError`` with the URL."""
        try:
            yield
        except CheckpointDamagedError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error or type(error).__name__}") from error


def newest_at(url: str, options: Mapping[str, Any] | None) -> tuple[ObjectStore, str]:
    """The store and name of a checkpoint at a URL, or of the newest below it. Raises ``FileNotFoundError``: there is
    none; ``OSError``: the store does not answer."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if CHECKPOINT_NAME.fullmatch(name):
        store = ObjectStore(parent, options)
        if name in store.names():
            return store, name
    else:
        store = ObjectStore(url, options)
        if names := store.later_than(None):
            return store, names[0]
    raise FileNotFoundError(f"resume_from_checkpoint: {url} holds no whole checkpoint-<step>")
