"""What a run's beginning and end leave behind; a checkpoint appears when all ranks of all roles have written it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.checkpoint import CheckpointManager
from roll.config.reading.errors import ConfigError
from roll.config.run import RunConfig
from roll.distributed.failures import OutputRefused, needing_room
from roll.pipelines.run_checkpoints import PendingCheckpoint, RunCheckpoints
from roll.pipelines.run_lifetime import sole_writer
from roll.protocol.metrics import Metrics
from roll.workers.model import TrainWorker
from tests.support.disks import largest_file

HOLDER = """
import sys, time
from pathlib import Path
from roll.pipelines.run_lifetime import sole_writer
with sole_writer(Path(sys.argv[1]), Path("run.yaml")):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.long
def test_a_folder_has_one_run_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"output_dir.*process {other.pid} on "),
            sole_writer(tmp_path, Path("run.yaml")),
        ):
            pass
        other.send_signal(signal.SIGKILL)
    for _ in range(2):
        with sole_writer(tmp_path, Path("run.yaml")):
            assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / ".lock").mkdir(parents=True)  # as a folder that is not one's own refuses, root included
    for folder, reason in ((tmp_path / "file" / "run", "Not a directory"), (tmp_path / "run", "Is a directory")):
        with (
            pytest.raises(ConfigError, match=f"output_dir = '{folder}': .*{reason}.*name another folder"),
            sole_writer(folder, Path("run.yaml")),
        ):
            pass


def test_a_full_disk_is_told_from_other_failures() -> None:
    for said in map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)):
        refused = OutputRefused.of(RuntimeError(f"rank 0: SafetensorError: I/O error: {said} (os error)"))
        assert refused is not None and said in str(refused) and "roll export" in str(refused)
    assert OutputRefused.of(RuntimeError("rank 0 was killed by SIGKILL")) is None


class Answer:
    def __init__(self, result: list[bool] | Exception | None) -> None:
        self._result = result

    def done(self) -> bool:
        return self._result is not None

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class LateAnswer(Answer):
    """It comes after the driver has looked for it."""

    def done(self) -> bool:
        return False


class Writers:
    """Answers as a cluster of two ranks would: ``script`` holds what it says each time it is asked, then "done"."""

    def __init__(self, *script: list[bool] | Exception | Answer | None) -> None:
        self.script = list(script)
        self.asked: list[bool] = []

    def call_all(self, method: Any, wait: bool) -> Answer:
        assert method is TrainWorker.checkpoint_saved
        self.asked.append(wait)
        said = self.script.pop(0) if self.script else [True, True]
        return said if isinstance(said, Answer) else Answer(said)


def names(manager: CheckpointManager) -> list[str]:
    return sorted(path.name for path in manager.root.iterdir())


def pending(manager: CheckpointManager, *writers: Any) -> PendingCheckpoint:
    checkpoint = PendingCheckpoint(manager.writing(2), list(writers))
    (checkpoint.path / "weights").write_text("1")
    return checkpoint


def test_it_is_written_when_every_rank_of_every_role_says_so(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    checkpoint = pending(manager, Writers([True, False]), Writers([True, True]))
    assert not checkpoint.is_written()
    assert checkpoint.is_written()
    assert manager.latest() is None
    checkpoint.publish()
    found = manager.latest()
    assert found is not None and found.step == 2 and (found.path / "weights").read_text() == "1"


def test_a_busy_rank_is_not_waited_for(tmp_path: Path) -> None:
    busy, manager = Writers(None), CheckpointManager(tmp_path)
    checkpoint = pending(manager, busy)
    assert not checkpoint.is_written() and not checkpoint.is_written()
    assert busy.asked == [False], "asked once, and not again before it answered"
    checkpoint.publish()
    assert busy.asked == [False, True] and names(manager) == ["checkpoint-2"]


def test_nothing_appears_where_a_rank_could_not_write_or_the_run_ends(tmp_path: Path) -> None:
    """Whether or not a poll has been told of it before."""
    manager = CheckpointManager(tmp_path)
    for failed, polled in ((OSError("disk full"), False), (LateAnswer(OSError("disk full")), True)):
        checkpoint = pending(manager, Writers(failed))
        assert not (polled and checkpoint.is_written())
        with pytest.raises(OSError, match="disk full"):
            checkpoint.publish()
        assert names(manager) == []
    interrupted = pending(manager, Writers(None))
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted.discard()
    assert names(manager) == []


@pytest.mark.parametrize("state", [{"rows": "x" * 9000}, {"rows": np.zeros(9000)}], ids=["json", "safetensors"])
def test_the_drivers_state_without_room_costs_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: dict[str, Any]
) -> None:
    plan: Any = SimpleNamespace(checkpoint_dir=tmp_path, max_steps=4)
    recorded: list[Metrics] = []
    published: list[int] = []
    checkpoints = RunCheckpoints(RunConfig(), plan, recorded.append, published.append)
    with largest_file(4096), caplog.at_level(logging.ERROR), checkpoints.writing(2, state, []):
        pass
    with checkpoints.writing(4, state, []):
        pass
    assert names(checkpoints.manager) == ["checkpoint-4"] and published == [4] and len(recorded) == 1
    assert "the checkpoint after 2 steps is lost" in caplog.text
    assert f"({os.strerror(errno.EFBIG)}; " in caplog.text and f"GB are free in {tmp_path}" in caplog.text
    RunCheckpoints(RunConfig(resume_from_checkpoint=True), plan, recorded.append, published.append).take_up()
    assert "it has done the 4 steps of max_steps: raise that, to train on" in caplog.text


def test_what_a_run_cannot_do_without_ends_it(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))
    error.add_note("3 of 5 steps are done")
    with pytest.raises(OutputRefused, match=r"No space left on device; .* GB are free in .*Make room") as refused:  # noqa: SIM117
        with needing_room(tmp_path / "not" / "yet"):
            raise error
    assert refused.value.__notes__ == ["3 of 5 steps are done"]
    with pytest.raises(OSError, match="No such file"), needing_room(tmp_path):
        (tmp_path / "gone").read_text()
