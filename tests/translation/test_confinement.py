"""A script from anywhere reaches nothing of the user's: files, network, processes. Else it is not run."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.rewards.sandbox.client import Sandbox, Settings
from roll.translation import recording
from roll.translation.recording import REQUIRED, record

RUN = "python3 -m verl.trainer.main_ppo data.train_batch_size=1"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(require=REQUIRED))
    yield box
    box.close()


def recorded(folder: Path, text: str, sandbox: Sandbox) -> recording.Recording:
    file = folder / "run.sh"
    file.write_text(f"{text}\n{RUN}\n", encoding="utf-8")
    return record(file, sandbox=sandbox)


def test_files_stay_as_they_are(tmp_path: Path, sandbox: Sandbox) -> None:
    """Neither by tools nor by redirections nor by programs of absolute paths."""
    kept, own = tmp_path / "kept.txt", Path.home() / ".roll-translate-test"
    kept.write_text("kept", encoding="utf-8")
    python = sys.executable
    text = f"""
        rm -rf {tmp_path}/kept.txt; /bin/rm -rf {tmp_path}/kept.txt
        : > {tmp_path}/kept.txt; echo x >> {tmp_path}/kept.txt
        /bin/chmod 000 {tmp_path}/kept.txt; /bin/mv {tmp_path}/kept.txt {tmp_path}/moved; touch {own}; echo x > {own}
        {python} -c 'open("{tmp_path}/kept.txt", "w")'
        /usr/bin/env python3 -c 'import os; os.unlink("{tmp_path}/kept.txt")'
        rm -rf ../../..; cp {tmp_path}/kept.txt stolen
    """
    recorded(tmp_path, text, sandbox)
    assert kept.read_text(encoding="utf-8") == "kept" and kept.stat().st_mode & 0o400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt", "run.sh"] and not own.exists()


def test_files_cannot_be_read(tmp_path: Path, sandbox: Sandbox) -> None:
    (tmp_path / "key.pem").write_text("key of mine", encoding="utf-8")
    paths = (f"{tmp_path}/key.pem", "/etc/shadow", "/etc/hostname", f"/proc/{os.getpid()}/environ", "/root/.bashrc")
    text = "\n".join(f'read -r found < {path} && {RUN} trainer.experiment_name="found $found"' for path in paths)
    assert [command.words for command in recorded(tmp_path, text, sandbox).commands] == [tuple(RUN.split())]


def test_the_caller_s_environment_is_not_passed_on(
    tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    found = recorded(tmp_path, f"{RUN} trainer.experiment_name=$WANDB_API_KEY; /usr/bin/env; set", sandbox)
    assert "secret-of-mine" not in repr(found)


def test_the_network_cannot_be_reached(tmp_path: Path, sandbox: Sandbox) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    text = f"""
        exec 9<>/dev/tcp/127.0.0.1/{port} && printf 'GET /bash HTTP/1.0\\r\\n\\r\\n' >&9
        /usr/bin/curl -s http://127.0.0.1:{port}/curl; curl -s http://127.0.0.1:{port}/curl
        python3 -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:{port}/python")'
    """
    recorded(tmp_path, text, sandbox)
    server.shutdown()
    server.server_close()
    assert asked == []


def test_processes_are_not_reached_and_none_is_left(tmp_path: Path, sandbox: Sandbox) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    mark = f"roll-left-{os.getpid()}"
    text = f"kill -9 {other.pid}; kill -9 -1 2>/dev/null & disown\n(exec -a {mark} /bin/sleep 600) & disown"
    text += f"\npython3 -c 'import os, signal; os.kill({other.pid}, 9)'"
    recorded(tmp_path, text.replace("kill -9 -1 2>/dev/null & disown\n", ""), sandbox)
    assert other.poll() is None
    other.kill()
    other.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(mark in line for line in command_lines()):
        time.sleep(0.05)
    assert not any(mark in line for line in command_lines())


def command_lines() -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found


@pytest.mark.long_rows("memory", "output")
@pytest.mark.parametrize(
    "text",
    [
        ":(){ :|:& };:",
        "head -c 100000000 /dev/zero > big; cat big big big big > bigger",
        "x=a; while true; do x=$x$x; done",
        "yes() { while :; do echo y; done; }; yes",
    ],
    ids=["fork bomb", "disk", "memory", "output"],
)
def test_greedy_scripts_end(text: str, tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LIMITS", replace(recording.LIMITS, wall=2.0))
    started = time.monotonic()
    recorded(tmp_path, f"({text}) 2>/dev/null", sandbox)
    assert time.monotonic() - started < 30
    assert [command.words[0] for command in recorded(tmp_path, "true", sandbox).commands] == ["python3"]


def test_forged_records_are_words_and_nothing_more(tmp_path: Path, sandbox: Sandbox) -> None:
    text = (
        "printf 'CALL\\0python3\\0/\\0002\\0-m\\0' >&50; printf 'CALL\\0a\\0/\\0999999999\\0' >&50; printf "
        "'\\0\\0\\0' >&50"
    )
    assert len(recorded(tmp_path, text, sandbox).commands) <= 1


@pytest.mark.parametrize(
    "without", [("namespaces", "landlock"), ("seccomp", "namespaces"), ("namespaces", "mounts", "landlock", "uid")]
)
def test_without_isolation_nothing_runs(without: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"{RUN}\n", encoding="utf-8")
    box = Sandbox(Settings(require=REQUIRED, without=without))
    with pytest.raises(
        ConfigError, match=r"is not run: scripts run only where they can be confined.*the command line itself"
    ):
        record(file, sandbox=box)
    box.close()


def test_a_host_without_processes_of_its_own_says_so(tmp_path: Path) -> None:
    """Landlock and seccomp alone keep a script in, but let it start no program."""
    file = tmp_path / "run.sh"
    file.write_text(f"{RUN}\n", encoding="utf-8")
    box = Sandbox(Settings(without=("namespaces", "mounts", "uid")))
    with pytest.raises(ConfigError, match="start no process of its own; give the command line itself"):
        record(file, sandbox=box)
    box.close()
