"""The checkpoint manager: what is found again, what is pruned, what a damaged folder does."""

from __future__ import annotations

import fcntl
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from roll.checkpoint import Checkpoint, CheckpointDamagedError, CheckpointManager
from roll.checkpoint.folders import atomic_file, atomic_folder, sweep, verify_folder
from roll.config.run import CheckpointConfig


def write(manager: CheckpointManager, step: int, payload: bytes = b"weights") -> Path:
    with manager.writing(step) as folder:
        (folder / "actor_train").mkdir()
        (folder / "actor_train" / "shard-0.bin").write_bytes(payload + str(step).encode())
        (folder / "pipeline").mkdir()
        (folder / "pipeline" / "state.json").write_text(json.dumps({"step": step}))
    return manager.root / f"checkpoint-{step}"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_written_checkpoint_is_found_with_its_roles(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "new" / "root")
    assert manager.latest() is None
    path = write(manager, 3)
    found = manager.latest()
    assert found == Checkpoint(path, 3)
    assert (found.role("actor_train") / "shard-0.bin").read_bytes() == b"weights3"
    with pytest.raises(FileNotFoundError, match="role 'critic'; it holds actor_train, pipeline"):
        found.role("critic")
    assert names(path) == ["actor_train", "manifest.json", "pipeline"]


def test_nothing_is_visible_before_the_block_ends(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with manager.writing(1) as folder:
        (folder / "file").write_text("x")
        assert manager.latest() is None
        assert not (tmp_path / "checkpoint-1").exists()
        # Another process that starts meanwhile leaves the folder being written alone.
        CheckpointManager(tmp_path)
        assert folder.exists()
    assert manager.latest() == Checkpoint(tmp_path / "checkpoint-1", 1)


def test_a_lock_that_is_swept_before_it_is_held_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts between the two would otherwise remove the folder that is being written."""
    sweeps = iter([True])
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and next(sweeps, False):
            sweep(tmp_path)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic_folder(tmp_path / "final") as folder:
        (folder / "file").write_text("x")
        sweep(tmp_path)
    assert names(tmp_path) == ["final"]


def test_a_lock_is_swept_away_while_no_writer_can_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".final.x.lock").touch()
    unlink = Path.unlink

    def unlink_held(path: Path, missing_ok: bool = False) -> None:
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_held)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "made" / "file"
    for text in ("old", "new"):
        with atomic_file(final) as part:
            part.write_text(text)
            assert not final.exists() if text == "old" else final.read_text() == "old"
    with pytest.raises(OSError, match="full"), atomic_file(final) as part:
        part.write_text("torn")
        raise OSError("full")
    assert final.read_text() == "new" and names(final.parent) == ["file"]


def test_block_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    write(manager, 1, b"old")
    with pytest.raises(RuntimeError, match="out of memory"), manager.writing(1) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError("out of memory")
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "actor_train" / "shard-0.bin").read_bytes() == b"old1"
    with pytest.raises(ValueError, match="nothing was written"), manager.writing(2):
        pass
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks available")))
    with pytest.raises(OSError, match="no locks available"), atomic_folder(tmp_path / "final"):
        raise AssertionError("nothing may be written without a lock")
    assert names(tmp_path) == ["checkpoint-1"]


def test_replacement_cut_short_is_undone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = write(manager, 1)
    # What a kill between the two renames of a replacement leaves.
    path.rename(tmp_path / ".checkpoint-1.replaced")
    assert CheckpointManager(tmp_path).latest() == Checkpoint(path, 1)
    # A kill after both: the old one is still there under its hidden name.
    (tmp_path / ".checkpoint-1.replaced").mkdir()
    CheckpointManager(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("actor_train/shard-0.bin", lambda held: held[:-1], "has 8 bytes instead of 9"),
        ("actor_train/shard-0.bin", lambda held: b"W" + held[1:], "contents of actor_train/shard-0.bin have changed"),
        ("actor_train/shard-0.bin", None, "actor_train/shard-0.bin is missing"),
        ("manifest.json", None, "never finished"),
        ("manifest.json", lambda held: held[:40], "not a readable manifest"),
        (
            "manifest.json",
            lambda held: held.replace(b"pipeline/state.json", b"../other/model.bin"),
            "'../other/model.bin' is no file of this folder",
        ),
        ("manifest.json", lambda held: json.dumps(json.loads(held) | {"format": 99}).encode(), "format 99"),
    ],
)
def test_damaged_checkpoint_is_skipped_with_the_reason(
    tmp_path: Path, file: str, change: Callable[[bytes], bytes] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    write(manager, 9)
    newest = write(manager, 10)
    if change is None:
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(change((newest / file).read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert manager.latest() == Checkpoint(tmp_path / "checkpoint-9", 9)
    assert reason in caplog.text
    with pytest.raises(CheckpointDamagedError, match=re.escape(reason)):
        manager.resolve(str(newest))


def test_pruning_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (1, 2, 10):
        write(manager, step)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-2"]
    # A damaged one does not push a whole one out, and is not silently deleted either.
    (tmp_path / "checkpoint-10" / "actor_train" / "shard-0.bin").unlink()
    write(manager, 11)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11", "checkpoint-2"]
    everything = CheckpointManager(tmp_path / "all", max_to_keep=0)
    for step in range(5):
        write(everything, step)
    assert len(names(tmp_path / "all")) == 5


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_config\.output_dir"):
        CheckpointManager(tmp_path, config=CheckpointConfig(str(tmp_path / "x" / "..")))


def test_resolve(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    assert manager.resolve(True) is None
    first = write(manager, 5)
    second = write(manager, 20)
    assert manager.resolve(False) is None
    assert manager.resolve(True) == Checkpoint(second, 20)
    assert manager.resolve(str(first)) == Checkpoint(first, 5)
    assert CheckpointManager(tmp_path / "other").resolve(str(tmp_path / "run")) == Checkpoint(second, 20)
    with pytest.raises(FileNotFoundError, match=r"resume_from_checkpoint: .*nowhere is not a folder; name one such as"):
        manager.resolve(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no whole checkpoint"):
        manager.resolve(str(tmp_path / "empty"))


def test_going_on_from_an_older_one_sets_the_later_ones_aside(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, config=CheckpointConfig(str(tmp_path / "store"), async_upload=False))
    for step in (10, 20, 30):
        write(manager, step)
    manager.supersede_after(10)
    assert manager.latest() == Checkpoint(tmp_path / "checkpoint-10", 10)
    assert (tmp_path / "superseded-checkpoint-20").is_dir() and (tmp_path / "store/superseded-checkpoint-30").is_dir()
    write(manager, 15)
    assert manager.resolve(True) == Checkpoint(tmp_path / "checkpoint-15", 15)


@pytest.mark.parametrize("async_upload", [False, True])
@pytest.mark.parametrize("keep_local_file", [False, True])
def test_upload(tmp_path: Path, async_upload: bool, keep_local_file: bool) -> None:
    local, store = tmp_path / "local", tmp_path / "store"
    config = CheckpointConfig(str(store), async_upload=async_upload, keep_local_file=keep_local_file)
    manager = CheckpointManager(local, 1, config)
    for step in (1, 2, 3):
        write(manager, step)
    manager.close()
    assert names(store) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert names(local) == (["checkpoint-3"] if keep_local_file else [])
    for step in (1, 2, 3):
        assert verify_folder(store / f"checkpoint-{step}").step == step
    expected = local if keep_local_file else store
    assert CheckpointManager(local, config=CheckpointConfig(str(store))).latest() == Checkpoint(
        expected / "checkpoint-3", 3
    )
