"""The checkpoints of a run: ``<root>/checkpoint-<step>/``, each holding one folder per role and the pipeline's state.

A checkpoint is whole or absent. It is written into a hidden sibling folder, flushed, given a manifest (sizes and hashes
of all files) and renamed; one that does not match its manifest is skipped, with the reason in the log. Where
the run names a metric, one of them is the best.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from roll.checkpoint.folders import (
    CHECKPOINT_NAME,
    MANIFEST_NAME,
    SUPERSEDED,
    Checkpoint,
    CheckpointDamagedError,
    atomic_file,
    atomic_folder,
    checkpoints_in,
    flush_folder,
    latest_of,
    remove_folder,
    step_of,
    supersede,
    sweep,
    verify_folder,
    write_manifest,
)
from roll.checkpoint.store import ObjectStore, is_url, newest_at
from roll.config.run import CheckpointConfig

logger = logging.getLogger(__name__)

BEST_LINK, _BEST_RECORD = "best", "best.json"


class BestCheckpoint:
    """The best checkpoint by a metric: it is never pruned, and the link ``best`` leads to it.

    Values by step are kept in ``best.json`` next to the checkpoints, so that a resumed run knows them. The value logged
    at step n was measured with the weights after n steps: those of ``checkpoint-n``.

    Args:
        root: the folder of the checkpoints.
        config: names the metric.
    """

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self.metric, self.mode = str(config.keep_best_metric), config.keep_best_mode
        self._record = root / _BEST_RECORD
        self._values: dict[int, float] = self._read()
        self._seen: set[str] = set()
        self._linked: str | None = None

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics logged at ``step``."""
        value = metrics.get(self.metric)
        if value is None:
            # Only for the warning at the end, which a metric that was logged once makes needless.
            if not self._values:
                self._seen.update(metrics)
        elif math.isfinite(value):
            self._values[step] = value
            self._write()

    def best_of(self, steps: Collection[int]) -> int | None:
        """The step with the best value, the earliest of equal ones; None where none of them has been measured."""
        measured = [step for step in sorted(steps) if step in self._values]
        sign = 1.0 if self.mode == "max" else -1.0
        return max(measured, key=lambda step: (sign * self._values[step], -step), default=None)

    def link(self, root: Path, name: str) -> None:
        """Let ``root/best`` lead to the checkpoint ``name``."""
        link, new = root / BEST_LINK, root / f".{BEST_LINK}.new"
        if self._linked == name and link.is_symlink():
            return
        # Made beside it and renamed over it: a reader finds the old link or the new one, never none.
        new.unlink(missing_ok=True)
        new.symlink_to(name)
        new.replace(link)
        self._linked = name
        step = int(name.rpartition("-")[2])
        logger.info("best checkpoint so far: %s (%s %g)", root / name, self.metric, self._values[step])

    def forget_after(self, step: int) -> None:
        """Drop the values of later steps, which belong to a branch that the run has left."""
        self._values = {at: value for at, value in self._values.items() if at <= step}
        self._write()

    def check_measured(self) -> None:
        """Warn if the metric was never logged."""
        if not self._values and self._seen:
            logger.warning(
                "checkpoint_config.keep_best_metric: %s was never logged; logged were %s",
                self.metric,
                ", ".join(sorted(self._seen)),
            )

    def _read(self) -> dict[int, float]:
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            is_same = (record["metric"], record["mode"]) == (self.metric, self.mode)
            return {int(step): float(value) for step, value in record["values"].items()} if is_same else {}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is not readable (%r): the best checkpoint is looked for anew", self._record, error)
            return {}

    def _write(self) -> None:
        record = {"metric": self.metric, "mode": self.mode, "values": self._values}
        with atomic_file(self._record) as new:
            new.write_text(json.dumps(record) + "\n", encoding="utf-8")


class CheckpointManager:
    """Writes, finds, prunes and uploads the checkpoints under ``root``.

    Args:
        root: the folder of the run's checkpoints; on several hosts it must be a disk that all of them share.
        max_to_keep: whole checkpoints kept under ``root``, the newest ones; 0 keeps all (YAML ``max_ckpt_to_keep``).
        config: where copies go, which are never pruned, and which checkpoint is best (YAML ``checkpoint_config``).

    Raises:
        ValueError: copies go to ``root`` itself.
    """

    def __init__(self, root: str | Path, max_to_keep: int = 0, config: CheckpointConfig | None = None) -> None:
        self.root = Path(root)
        config = config or CheckpointConfig()
        place = config.output_dir
        self.upload_dir = Path(place) if place is not None and not is_url(place) else None
        self.store = ObjectStore(place, config.storage_options) if place and is_url(place) else None
        self.best = BestCheckpoint(self.root, config) if config.keep_best_metric else None
        if self.upload_dir is not None and self.upload_dir.resolve() == self.root.resolve():
            raise ValueError(
                f"checkpoint_config.output_dir: {self.upload_dir} is where the run writes its checkpoints anyway; "
                "name another folder, or drop the key"
            )
        self._max_to_keep = max_to_keep
        self._removes_local = place is not None and not config.keep_local_file
        self._background = ThreadPoolExecutor(1, "checkpoint-upload") if place and config.async_upload else None
        self._pending: set[int] = set()
        self._upload_errors: list[OSError | CheckpointDamagedError] = []
        self._lock = Lock()
        self._folders = [self.root] if self.upload_dir is None else [self.root, self.upload_dir]
        for folder in self._folders:
            sweep(folder)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a hidden folder to write into; when the block ends well it becomes ``checkpoint-<step>``.

        Any process may write there. All of them must be done when the block ends. If the block raises, nothing remains.
        Older checkpoints are pruned only after this one is whole.
        """
        final = self.root / f"checkpoint-{step}"
        with atomic_folder(final) as folder:
            yield folder
            manifest = write_manifest(folder, step)
        size = sum(entry.size for entry in manifest.files.values())
        logger.info("checkpoint %s: %d files, %.1f MB", final, len(manifest.files), size / 1e6)
        if self.upload_dir is not None or self.store is not None:
            with self._lock:
                # Before the upload is submitted: _prune() must not remove a checkpoint that is still to be copied.
                self._pending.add(step)
            if self._background is None:
                self._upload(step)
            else:
                self._background.submit(self._upload, step)
        self._prune()

    def latest(self) -> Checkpoint | None:
        """The whole checkpoint with the highest step, in ``root`` or the upload folder; None if there is none.

        Checks contents, so it reads every byte of the one that it returns. Damaged ones are skipped and logged. One
        that is in object storage only is fetched into ``root``. Raises ``OSError``: the store does not answer.
        """
        found = latest_of(self._folders)
        if self.store is not None:
            for name in self.store.later_than(found.step if found else None):
                try:
                    return Checkpoint(self.store.fetch(name, self.root), step_of(name))
                except CheckpointDamagedError as error:
                    logger.warning("skipped a damaged checkpoint in %s: %s", self.store, error)
        return found

    def resolve(self, resume_from_checkpoint: bool | str) -> Checkpoint | None:
        """Resolve the YAML key of this name: False nothing, True :meth:`latest`, a path that checkpoint.

        The path may be a checkpoint, or a folder of checkpoints whose latest one is meant. None: a new run. Raises
        ``FileNotFoundError``: the path is not there, or no checkpoint is in it; ``CheckpointDamagedError``: the path is
        a checkpoint that is torn; nothing else is used in its place.
        """
        if resume_from_checkpoint is False:
            return None
        if resume_from_checkpoint is True:
            found = self.latest()
            if found is None:
                logger.info("resume_from_checkpoint: no checkpoint under %s yet, so the run starts anew", self.root)
            return found
        if is_url(resume_from_checkpoint):
            store, name = newest_at(resume_from_checkpoint, None if self.store is None else self.store.options)
            return Checkpoint(store.fetch(name, self.root), step_of(name))
        try:
            return self.find(Path(resume_from_checkpoint).expanduser())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"resume_from_checkpoint: {error}; name one such as {self.root / 'checkpoint-100'}, or write true for "
                "the latest"
            ) from error

    @staticmethod
    def find(path: Path, contents: bool = True) -> Checkpoint:
        """A whole checkpoint, or the latest one in a folder of them; reads every byte of it if ``contents``. Raises
        ``FileNotFoundError``: the path is not there, or no checkpoint is in it; ``CheckpointDamagedError``: the path is
        a checkpoint that is torn."""
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder")
        if CHECKPOINT_NAME.fullmatch(path.name) or (path / MANIFEST_NAME).exists():
            return Checkpoint(path, verify_folder(path, contents).step)
        found = latest_of([path], contents)
        if found is None:
            raise FileNotFoundError(f"{path} holds no whole checkpoint-<step> folder")
        return found

    def supersede_after(self, step: int) -> None:
        """Rename checkpoints later than ``step`` to ``superseded-checkpoint-<n>``.

        A run that continues from an older checkpoint calls this first; its own next resumption would otherwise find the
        later checkpoints of the branch that it has left.
        """
        for checkpoint in [one for folder in self._folders for one in checkpoints_in(folder) if one.step > step]:
            superseded = supersede(checkpoint.path)
            logger.warning("resuming from step %d: %s is now %s", step, checkpoint.path, superseded.name)
        if self.store is not None:
            for name in self.store.later_than(step):
                self.store.rename(name, f"{SUPERSEDED}{name}")
                logger.warning("resuming from step %d: %s/%s is set aside", step, self.store, name)
        if self.best is not None:
            self.best.forget_after(step)
            self._mark_best()

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of the weights after ``step`` steps, which may make checkpoint ``step`` the best one."""
        if self.best is not None:
            self.best.measured(step, metrics)
            self._mark_best()

    def close(self) -> None:
        """Wait for uploads in flight, and prune what had to be kept for them. Raises ``OSError,
        CheckpointDamagedError``: the error of the first upload that failed. It was logged when it happened; the
        checkpoint itself is whole under ``root``."""
        if self._background is not None:
            self._background.shutdown(wait=True)
        self._prune()
        if self.best is not None:
            self.best.check_measured()
        if self._upload_errors:
            raise self._upload_errors[0]

    def _upload(self, step: int) -> None:
        """Upload one checkpoint; an error is kept for :meth:`close`, since training can continue without the copy."""
        source, place = self.root / f"checkpoint-{step}", self.upload_dir or self.store
        try:
            if self.store is not None:
                self.store.put(source)
            else:
                assert self.upload_dir is not None
                with atomic_folder(self.upload_dir / source.name) as folder:
                    shutil.copytree(source, folder, dirs_exist_ok=True)
                    verify_folder(folder)
                    flush_folder(folder)
            logger.info("checkpoint %s copied to %s", source, place)
            if self._removes_local:
                remove_folder(source)
        except (OSError, CheckpointDamagedError) as error:
            logger.exception("checkpoint %s could not be copied to %s", source, place)
            self._upload_errors.append(error)
        finally:
            with self._lock:
                self._pending.discard(step)

    def _mark_best(self) -> int | None:
        """Let the link ``best`` lead to the best of the checkpoints that are there; its step."""
        if self.best is None:
            return None
        step = self.best.best_of([checkpoint.step for checkpoint in checkpoints_in(self.root)])
        if step is not None and not self._removes_local:
            self.best.link(self.root, f"checkpoint-{step}")
        # exists() follows the link: one that leads to a removed checkpoint is dropped.
        elif not (link := self.root / BEST_LINK).exists():
            link.unlink(missing_ok=True)
        return step

    def _prune(self) -> None:
        best = self._mark_best()
        if self._max_to_keep == 0:
            return
        with self._lock:
            pending = set(self._pending)
        whole = []
        for checkpoint in sorted(checkpoints_in(self.root), key=lambda checkpoint: -checkpoint.step):
            try:
                if checkpoint.step not in pending:  # else another thread may be about to remove it
                    # Sizes only: reading all checkpoints at every save would cost more than writing one.
                    verify_folder(checkpoint.path, contents=False)
                whole.append(checkpoint)
            except CheckpointDamagedError as error:
                logger.warning("left in place and not counted among those kept: %s", error)
        # The pending ones are skipped, not waited for: close() prunes once more when the uploads are done.
        for checkpoint in whole[self._max_to_keep :]:
            if checkpoint.step not in pending and checkpoint.step != best:
                remove_folder(checkpoint.path)
                logger.info("removed %s (max_ckpt_to_keep: %d)", checkpoint.path, self._max_to_keep)


def probable_checkpoint(
    resume_from_checkpoint: bool | str,
    folders: Sequence[Path],
    store: ObjectStore | None = None,
    file_names: Collection[str] = (),
) -> Checkpoint | None:
    """The checkpoint that :meth:`CheckpointManager.resolve` would probably give, from names and sizes alone.

    Nothing is changed or logged. None: there is none yet, or nothing is to be resumed.

    Args:
        folders: of the run's own checkpoints.
        store: of copies of them.
        file_names: files that are fetched of one in object storage; its other files are not there.

    Raises: as :meth:`CheckpointManager.resolve`.
    """
    if resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        found = latest_of(folders, contents=False)
        later = [] if store is None else store.later_than(found.step if found else None)
        return Checkpoint(store.fetch_some(later[0], file_names), step_of(later[0])) if store and later else found
    if is_url(resume_from_checkpoint):
        of_url, name = newest_at(resume_from_checkpoint, None if store is None else store.options)
        return Checkpoint(of_url.fetch_some(name, file_names), step_of(name))
    try:
        return CheckpointManager.find(Path(resume_from_checkpoint).expanduser(), contents=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; name a checkpoint-<step>, or write true for the latest") from error
