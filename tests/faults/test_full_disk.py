"""A full disk, and a rank that is slower than its peers: the run goes on, and says so."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from PIL import Image

from roll.distributed.failures import OutputRefused, needing_room
from roll.methods.distill import TeacherCache
from roll.pipelines.batches import BatchRecorder, RecordedRollouts
from roll.pipelines.files import write_images
from roll.pipelines.run_context import stragglers
from roll.protocol import DataProto
from roll.protocol.images import EncodedImage
from roll.report.page import diagnosis
from roll.tracking import METRICS_NAME, read_metrics
from roll.tracking.records import CompositeTracker, JsonlTracker
from tests.pipelines.conftest import Run
from tests.support.disks import largest_file
from tests.support.tiny_runs import TinyWorld, load_changed, sft_settings, training_args


def test_a_line_without_room_is_lost_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``/dev/full`` is the kernel's full disk."""
    journal = JsonlTracker(tmp_path)
    tracker, file = CompositeTracker([journal]), tmp_path / METRICS_NAME
    tracker.log({"loss": 0.0}, 0)
    lines = journal._files[METRICS_NAME]
    ours = lines._file
    with open("/dev/full", "wb", buffering=0) as full, caplog.at_level(logging.ERROR, logger="roll"):
        lines._file = full
        tracker.log({"loss": 1.0}, 1)
        tracker.log({"loss": 2.0}, 2)
    with file.open("ab") as torn:
        torn.write(b'{"step": 2, "lo')  # what there was room for
    lines._file = ours
    tracker.log({"loss": 3.0}, 3)
    tracker.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(file)] == [(0, 0.0), (3, 3.0)]
    (said,) = [record.message for record in caplog.records if "could not write" in record.message]
    assert "JsonlTracker could not write step 1, which is lost; the run goes on" in said


def test_the_rank_that_is_twice_as_slow() -> None:
    assert stragglers([1.0, 1.1, 2.3, 0.9]) == [2]
    assert stragglers([1.0, 2.0]) == [1]
    assert stragglers([0.16, 0.9]) == [], "too short to say"


def cache_of_a_teacher(folder: Path) -> None:
    cache = TeacherCache(str(folder / "cache"), {"teacher": "big"})
    rows = [
        (bytes([number]) * 16, {name: torch.rand(2000) for name in ("log_probs", "ids", "tail")}) for number in range(4)
    ]
    for number in (0, 1):
        cache.put(rows[number : number + 1])
        cache.flush()
    cache.put(rows[2:])
    for key, wanted in (rows[0], *rows[2:]):  # the step that has them goes on
        assert torch.equal(cache.get(key)["tail"], wanted["tail"])
    assert rows[0][0] in cache and rows[2][0] not in cache, "the next epoch asks the teacher again"
    assert list((folder / "cache").iterdir()) == []


def recorded_batch(folder: Path) -> None:
    recorder = BatchRecorder(folder, "rlvr", 1, "stop")
    recorder.hold(1, batch_of_zeros(), {})
    recorder.end_step(1, {})


def recorded_rollout(folder: Path) -> None:
    config: Any = SimpleNamespace(
        rollout_mock=SimpleNamespace(enable=True, mode="dump", dump_dir=str(folder / "rollouts"))
    )
    RecordedRollouts(config, folder).write(1, batch_of_zeros())


def images_of_samples(folder: Path) -> None:
    pixels, file = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8), io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    write_images(folder / "images", [EncodedImage.of(file.getvalue())])
    assert list((folder / "images").iterdir()) == []


def batch_of_zeros() -> DataProto:
    return DataProto.from_dict({"input_ids": torch.zeros(4, 2000)})


@pytest.mark.parametrize("write", [cache_of_a_teacher, recorded_batch, recorded_rollout, images_of_samples])
def test_what_is_no_result_ends_no_run(write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged once, with its path; no part of a file remains."""
    with largest_file(4096), caplog.at_level(logging.ERROR, logger="roll"):
        write(tmp_path)
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage() and "File too large" in record.getMessage()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.matrix
@pytest.mark.e2e
def test_a_rank_that_is_held_up_is_named_by_the_diagnosis(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process is stopped most of the time; its peer waits for it, so that their calls take equally long."""
    finished = run(
        {
            "max_steps": 7,
            "memory_steps": 1,
            "actor_train.worker_cls": "tests.faults.dying_workers.StutteringActor",
            "actor_train.device_mapping": [0, 1],
            "actor_train.training_args": training_args(8, 1),
        }
    )
    names = [f"time/step_train/actor_train/rank_{rank}" for rank in (0, 1)]
    own, late = (finished.values(name)[1:] for name in names)
    assert sum(late) > 2 * sum(own)
    assert diagnosis([str(finished.output)]) == 1
    shown = capsys.readouterr().out
    assert "Rank 1 of actor_train is slower than the others" in shown, shown


@pytest.mark.long
@pytest.mark.e2e
def test_a_checkpoint_without_room_is_lost_and_no_step(run: Run) -> None:
    changes = {
        "sft_train.worker_cls": "tests.faults.dying_workers.FullDiskSft",
        "sft_train.device_mapping": [0, 1],
        "sft_train.training_args": training_args(4, 1),
        "save_steps": 2,
    }
    finished = run(changes, "sft")
    assert [row["step"] for row in finished.steps] == list(range(6))
    names = sorted(os.listdir(finished.output / "checkpoints"))
    assert names == ["checkpoint-2", "checkpoint-6"], "the second had no room"
    log = (finished.logs / "run.log").read_text()
    assert "the disk is full: the checkpoint after 4 steps is lost, and the run goes on without it" in log
    assert sum(row.get("system/lost_checkpoints", 0) for row in finished.steps) == 1


def test_a_run_without_room_for_its_first_file_says_which_before_ray_starts(world: TinyWorld, tmp_path: Path) -> None:
    loaded = load_changed(sft_settings(world, tmp_path / "out"), {})
    refused = pytest.raises(OutputRefused, match=r"File too large; .* GB are free in .*\n.*/out/config\.yaml'")
    with largest_file(1000), refused, needing_room(loaded.plan.output_dir):
        loaded.pipeline.run(loaded)
    assert not ray.is_initialized()
