"""``roll doctor``: each finding against a host that breaks its rule, trials that hang or crash, and the exit status."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roll import cli
from roll.config.installation import install_command
from roll.config.strategies.registry import BACKENDS
from roll.distributed.guard import descendants, is_alive, kill_tree
from roll.doctor import command, trials
from roll.doctor.trials import EXIT, Finding, Severity, gravest
from tests.doctor.support import module_of

SECRET = "hf_" + "a1B2" * 8


def only(findings: Iterator[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_a_quick_look_at_this_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = cli.main(["doctor", "--quick", "--json", "--output", str(tmp_path / "not" / "there" / "yet")])
    report = json.loads(capsys.readouterr().out)
    assert {finding["section"] for finding in report["findings"]} == {"backends", "limits"}
    assert status == report["exit_status"] == {"ok": 0, "note": 0, "warning": 1, "error": 2}[report["status"]]
    named = {name for each in report["findings"] for name in each["value"].partition(":")[0].split(", ")}
    assert set(BACKENDS) <= named
    assert not (tmp_path / "not").exists(), "looking leaves nothing behind"
    for finding in report["findings"]:
        assert finding["rule"]
        assert bool(finding["remedy"]) == (finding["severity"] != "ok"), finding


def test_the_exit_status_follows_the_gravest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for severity, status in EXIT.items():
        found = Finding("w", f"token {SECRET}", "r", severity, "do this")
        monkeypatch.setattr(command, "examine", lambda *args, found=found: [Finding("fine", "v", "r"), found])
        assert command.main(["--quick"]) == status
        text = capsys.readouterr().out
        assert ("do this" in text) == (severity > Severity.OK)
        assert SECRET not in text
        assert command.main(["--quick", "--json"]) == status
        assert SECRET not in capsys.readouterr().out
    assert gravest([]) is Severity.OK
    error = "[rank0]: cannot load [/usr/lib/libnccl.so]"
    command.render([Finding("nccl", error, "r", Severity.ERROR, "do this")], "", Console(width=200))
    assert error in capsys.readouterr().out, "brackets are no markup"


def test_a_look_that_fails_is_a_finding_and_a_missing_backend_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda module: module != "deepspeed")
    missing = only(command.backends(), "deepspeed")
    assert (missing.severity, install_command("deepspeed") in missing.remedy) == (Severity.NOTE, True)

    def broken() -> Iterator[Finding]:
        raise OSError("no /proc here")
        yield

    monkeypatch.setattr(command, "backends", broken)
    found = command.examine(tmp_path, 2, quick=True)
    assert only(iter(found), "look").value == "OSError: no /proc here"
    assert "limits" in {finding.section for finding in found}, "the rest is looked at"


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 64 << 20, "total": 64 << 20})
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    (tmp_path / "file").touch()
    found = list(command.limits(tmp_path))
    assert {finding.what: finding.severity for finding in found} == {
        "shared memory": Severity.WARNING,
        "open files": Severity.WARNING,
        "output folder": Severity.ERROR,
    }
    assert "--shm-size" in found[0].remedy
    closed = only(command.limits(Path("/proc/no/such")), "output folder")
    assert closed.severity is Severity.ERROR


FAULTY = """
import os, subprocess, sys, time
from roll.doctor.trials import did
def hang():
    did("began", pid=os.getpid())
    time.sleep(600)
def crash():
    os.abort()
def fail():
    raise OSError("no such device")
def leave():
    did("left", pid=subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return module_of(FAULTY, "faulty", monkeypatch, tmp_path)


@pytest.mark.long
def test_a_trial_that_hangs(faulty: Any) -> None:
    (hung,) = trials.trials([(faulty.hang,)], 10.0)
    assert hung.error == "no end within 10 s; it hung after 'began'"
    assert not is_alive(hung.words[0]["pid"])


@pytest.mark.long
def test_trials_that_crash_fail_and_leave_a_process(faulty: Any) -> None:
    """Which holds a trial's output open for ten minutes, and is not waited for."""
    began = time.monotonic()
    crashed, failed, left = trials.trials([(faulty.crash,), (faulty.fail,), (faulty.leave,)], 60.0)
    os.kill(left.words[0]["pid"], signal.SIGKILL)
    assert "status -6" in crashed.error or "Abort" in crashed.error
    assert failed.error.endswith("OSError: no such device")
    assert not left.error and time.monotonic() - began < 300


@pytest.mark.usefixtures("faulty")
def test_an_interrupt_ends_the_trials() -> None:
    """Each is in a session of its own, which Ctrl-C does not reach."""
    code = "import faulty; from roll.doctor import trials; trials.trials([(faulty.hang,)], 600.0)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as asking:
        try:
            give_up = time.monotonic() + 60
            while not (trial := descendants(asking.pid)) or not (
                Path("/proc") / str(trial[0]) / "cmdline"
            ).read_text().count("faulty:hang"):
                assert time.monotonic() < give_up
                time.sleep(0.05)
            asking.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in asking.communicate(timeout=30)[1]
            assert not is_alive(trial[0])
        finally:
            kill_tree(asking.pid)


@pytest.mark.long
@pytest.mark.e2e
def test_everything_is_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a cluster's prologue would: collectives with right sums, and the sandbox."""
    status = cli.main(["doctor", "--json", "--output", str(tmp_path), "--ranks", "3"])
    report = json.loads(capsys.readouterr().out)
    assert status < 2, report
    by_name = {finding["what"]: finding for finding in report["findings"]}
    for name in ("all-reduce", "broadcast", "all-gather", "all-to-all"):
        assert by_name[name]["data"]["bytes_per_second"] > 0
        assert by_name[name]["data"]["ranks"] == 3
    assert by_name["isolation"]["data"]["given"]
    assert "PyTorch version" in report["environment"]


@pytest.mark.long
def test_a_collective_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks never comes: the other's last deed is told, within the deadline."""
    began = trials.trials

    def without_rank_1(commands, deadline, environ=None):  # type: ignore[no-untyped-def]
        return [*began(commands[:1], 15.0, environ), trials.Outcome([], "")]

    monkeypatch.setattr(trials, "trials", without_rank_1)
    (found,) = trials.try_collectives(2)
    assert found.severity is Severity.ERROR
    assert "rank 0: no end within 15 s" in found.value and "hung after 'allocated'" in found.value
