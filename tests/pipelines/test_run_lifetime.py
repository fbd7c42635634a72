"""What a run's beginning and end leave behind, whatever else happens on the host."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.distributed.failures import OutputRefused
from roll.pipelines.run_lifetime import sole_writer

HOLDER = """
import sys, time
from pathlib import Path
from roll.pipelines.run_lifetime import sole_writer
with sole_writer(Path(sys.argv[1]), Path("run.yaml")):
    print("held", flush=True)
    time.sleep(60)
"""


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_from_other_failures(number: int) -> None:
    refused = OutputRefused.of(RuntimeError(f"rank 0: SafetensorError: I/O error: {os.strerror(number)} (os error)"))
    assert refused is not None and os.strerror(number) in str(refused) and "roll export" in str(refused)
    assert OutputRefused.of(RuntimeError("rank 0 was killed by SIGKILL")) is None
