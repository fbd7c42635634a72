"""kill -9 of a real process at any moment of writing: the newest checkpoint that was announced is found, and whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from roll.checkpoint import CheckpointManager
from roll.checkpoint.folders import verify_folder
from roll.config.run import CheckpointConfig

# Writes checkpoints 1, 2, ... for ever, each of several files that hold their step, and announces each one that is
# whole. Every third is written twice, so that replacing is interrupted, too.
WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from roll.checkpoint import CheckpointManager
    from roll.config.run import CheckpointConfig

    root = Path(sys.argv[1])
    manager = CheckpointManager(root, 2, CheckpointConfig(str(root / "store")))
    found = manager.latest()
    step = found.step if found else 0
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            with manager.writing(step) as folder:
                for rank in range(4):
                    (folder / f"rank-{rank}").mkdir()
                    (folder / f"rank-{rank}" / "shard").write_bytes(str(step).encode() * 20_000)
            print(step, flush=True)
    """
)


def run_and_kill(root: Path, seconds: float) -> int:
    """Start the writer, kill it ``seconds`` after its first checkpoint; return the last step it announced."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        announced = [process.stdout.readline()]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        announced += process.stdout.read().splitlines()
        assert process.wait() == -signal.SIGKILL
    return int(announced[-1])


def test_killed_at_any_moment(tmp_path: Path) -> None:
    last = 0
    # Fractions of the time that one checkpoint takes, so that the kills fall all over the writing.
    for kill in range(12):
        announced = run_and_kill(tmp_path, seconds=0.011 * kill)
        assert announced > last, "the writer did not go on from where the last one was killed"
        found = CheckpointManager(tmp_path, 2, CheckpointConfig(str(tmp_path / "store"))).latest()
        assert found is not None
        # One more than announced is possible: killed between the renaming and the announcement.
        assert found.step in (announced, announced + 1)
        for rank in range(4):
            assert (found.role(f"rank-{rank}") / "shard").read_bytes() == str(found.step).encode() * 20_000
        for checkpoint in tmp_path.glob("**/checkpoint-*"):
            verify_folder(checkpoint)  # no torn folder under a whole one's name, half-pruned ones included
        hidden = [path for folder in (tmp_path, tmp_path / "store") for path in folder.glob(".*")]
        assert not hidden, "leftovers of the killed writer were not swept away"
        last = found.step


def test_killed_while_a_file_is_half_written(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with manager.writing(1) as folder:
        (folder / "shard").write_bytes(b"one")
    code = textwrap.dedent(
        f"""
        import os, signal
        from roll.checkpoint import CheckpointManager
        with CheckpointManager({str(tmp_path)!r}).writing(2) as folder:
            with open(folder / "shard", "wb") as file:
                file.write(b"t")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".checkpoint-2.*")], "the test did not leave a half-written folder"
    found = CheckpointManager(tmp_path).latest()
    assert found is not None and found.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
