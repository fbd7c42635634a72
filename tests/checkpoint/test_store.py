"""Copies of checkpoints in object storage, the way back, and the best checkpoint."""

from __future__ import annotations

import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from roll.checkpoint import CheckpointManager
from roll.checkpoint.folders import MANIFEST_NAME, Checkpoint
from roll.checkpoint.manager import probable_checkpoint
from roll.checkpoint.store import ObjectStore, store_problem
from roll.config.reading.errors import ConfigError
from roll.config.run import CheckpointConfig
from roll.preflight import check_resumption
from tests.config.good import changed, load, mistakes
from tests.support.checkpoints import PLAIN, bucket, write_checkpoint  # noqa: F401  the fixture


def write(manager: CheckpointManager, step: int) -> Path:
    with manager.writing(step) as folder:
        for role in ("actor_train", "pipeline"):
            (folder / role / "deep").mkdir(parents=True)
            (folder / role / "deep" / "weights").write_text(f"{role} {step}")
    return manager.root / f"checkpoint-{step}"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"


@pytest.mark.parametrize("async_upload", [True, False])
def test_a_run_goes_on_elsewhere_from_what_was_copied(url: str, tmp_path: Path, async_upload: bool) -> None:
    config = CheckpointConfig(url, keep_local_file=False, async_upload=async_upload, keep_best_metric="val/acc")
    here = CheckpointManager(tmp_path / "here", config=config)
    for step in (2, 4):
        write(here, step)
        here.measured(step, {"val/acc": 0.5})
    here.close()
    assert not list((tmp_path / "here").glob("checkpoint-*")), "copied whole, so it is not kept"
    assert not (tmp_path / "here/best").is_symlink()
    assert sorted(ObjectStore(url).names()) == ["checkpoint-2", "checkpoint-4"]
    for place, wanted in ((True, 4), (url, 4), (f"{url}/checkpoint-2", 2)):
        there = tmp_path / f"there {wanted}"
        found = CheckpointManager(there, config=CheckpointConfig(url)).resolve(place)
        assert found == Checkpoint(there / f"checkpoint-{wanted}", wanted)
        assert (found.role("actor_train") / "deep/weights").read_text() == f"actor_train {wanted}"
        seen = probable_checkpoint(place, [tmp_path / "none"], ObjectStore(url), ("weights",))
        assert seen is not None and seen.step == wanted and (seen.path / "pipeline/deep/weights").exists()
    with pytest.raises(FileNotFoundError, match="holds no whole checkpoint"):
        CheckpointManager(tmp_path / "x").resolve(f"{url}/checkpoint-3")


def test_what_was_never_finished_is_no_checkpoint(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(
        tmp_path / "here", config=CheckpointConfig(url, async_upload=False, keep_local_file=False)
    )
    for step in (1, 2, 3, 4):
        write(manager, step)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/checkpoint-3/{MANIFEST_NAME}")
    fs.pipe_file(f"{root}/checkpoint-4/{MANIFEST_NAME}", b"")  # made, and not written to yet
    with fs.open(f"{root}/checkpoint-2/actor_train/deep/weights", "w") as file:
        file.write("changed no 2 ")
    with caplog.at_level(logging.WARNING):
        found = manager.latest()
    assert found == Checkpoint(tmp_path / "here/checkpoint-1", 1)
    assert "skipped a damaged checkpoint" in caplog.text and "checkpoint-2" in caplog.text
    manager.supersede_after(1)
    assert sorted(ObjectStore(url).names()) == ["checkpoint-1", "superseded-checkpoint-2"]


def test_a_url_means_what_is_there_whatever_the_run_has_of_that_number(url: str, tmp_path: Path) -> None:
    """Another run's checkpoint is set aside, a damaged one is fetched again."""
    write(CheckpointManager(tmp_path / "there", config=CheckpointConfig(url, async_upload=False)), 2)
    manager = CheckpointManager(tmp_path / "here", config=CheckpointConfig(url, async_upload=False))
    with CheckpointManager(tmp_path / "here").writing(2) as folder:
        (folder / "weights").write_text("of another run")
    weights = tmp_path / "here/checkpoint-2/actor_train/deep/weights"
    for place, torn in ((f"{url}/checkpoint-2", False), (f"{url}/checkpoint-2", False), (True, True), (url, True)):
        if torn:
            weights.write_text("torn")
        assert manager.resolve(place) == Checkpoint(tmp_path / "here/checkpoint-2", 2)
        assert weights.read_text() == "actor_train 2"
        assert (tmp_path / "here/superseded-checkpoint-2/weights").read_text() == "of another run"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_store_that_does_not_answer_leaves_the_local_checkpoint(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    config = CheckpointConfig(f"{scheme}{tmp_path}/file/run", keep_local_file=False)
    manager = CheckpointManager(tmp_path / "here", config=config)
    path = write(manager, 1)
    with pytest.raises(OSError, match=f"{scheme}.*file"):
        manager.close()
    assert "could not be copied" in caplog.text
    assert path.is_dir() and (scheme or manager.latest() == Checkpoint(path, 1))


def test_roll_check_looks_into_the_store(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    output = {"output_dir": str(tmp_path / "out"), "checkpoint_config": {"output_dir": url}}
    config = output | {"resume_from_checkpoint": True}
    check_resumption(load(tmp_path, changed(config)))
    of_the_store = {"resume_from_checkpoint": f"{url}/checkpoint-5"}
    refused = mistakes(tmp_path, changed(output | of_the_store), check_files=True)
    assert "resume_from_checkpoint" not in {problem.key for problem in refused}, "it is no local folder"
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        check_resumption(load(tmp_path, changed(output | of_the_store)))
    ObjectStore(url).put(write_checkpoint(tmp_path / "other", {"actor_train": PLAIN}))
    check_resumption(load(tmp_path, changed(config)))
    ObjectStore(url).put(write_checkpoint(tmp_path / "other", {"sft_train": PLAIN}, step=5))
    with pytest.raises(ConfigError, match="holds nothing of actor_train"):
        check_resumption(load(tmp_path, changed(config)))
    for place, words in {"nowhere://x": "no kind of storage", "s3://x": "s3fs"}.items():
        if store_problem(place) is not None:
            with pytest.raises(ConfigError, match=rf"checkpoint_config\.output_dir.*{words}"):
                check_resumption(load(tmp_path, changed(config | {"checkpoint_config": {"output_dir": place}})))


def best(root: Path, mode: Any = "max") -> CheckpointManager:
    return CheckpointManager(root, 1, CheckpointConfig(keep_best_metric="val/acc", keep_best_mode=mode))


@pytest.mark.parametrize(("mode", "kept"), [("max", 4), ("min", 2)])
def test_the_best_checkpoint_is_kept(tmp_path: Path, mode: str, kept: int) -> None:
    manager = best(tmp_path, mode)
    for step, value in ((2, 0.3), (4, 0.9), (6, 0.5), (8, 0.9)):
        write(manager, step)
        manager.measured(step, {"val/acc": value, "loss": 1.0})
        manager.measured(step + 1, {"loss": 1.0})
        manager = best(tmp_path, mode) if step == 6 else manager  # resumed
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{kept}", "checkpoint-8"]
    assert (tmp_path / "best").resolve().name == f"checkpoint-{kept}"
    assert CheckpointManager.find(tmp_path / "best").step == kept
    manager.supersede_after(2)
    assert json.loads((tmp_path / "best.json").read_text())["values"].keys() == {"2"}
    assert (tmp_path / "best").exists() == (mode == "min"), "no link to what has been superseded"


def test_a_metric_that_never_comes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = best(tmp_path)
    write(manager, 1)
    manager.measured(1, {"val/accuracy": 0.5, "loss": 1.0})
    with caplog.at_level(logging.WARNING):
        manager.close()
    assert "val/acc was never logged; logged were loss, val/accuracy" in caplog.text
    assert not (tmp_path / "best").exists()


@pytest.mark.long
def test_s3(bucket, tmp_path):  # noqa: F811
    url, options = bucket
    here = CheckpointManager(
        tmp_path / "here", config=CheckpointConfig(url, storage_options=options, keep_local_file=False)
    )
    path = write(here, 2)
    (tmp_path / "large").mkdir()
    with here.writing(3) as folder:
        (folder / "weights").write_bytes(os.urandom(12 << 20))  # several parts
    here.close()
    assert not path.exists()
    there = CheckpointManager(tmp_path / "there", config=CheckpointConfig(url, storage_options=options))
    found = there.latest()
    assert found == Checkpoint(tmp_path / "there/checkpoint-3", 3)
    there.supersede_after(2)
    assert sorted(ObjectStore(url, options).names()) == ["checkpoint-2", "superseded-checkpoint-3"]
