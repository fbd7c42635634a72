"""``roll doctor``: each finding against a host that breaks its rule, trials that hang or crash, and the exit status."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from roll import cli
from roll.config.strategies.registry import BACKENDS
from roll.distributed.guard import is_alive
from roll.doctor import command, host, trials
from roll.doctor.findings import EXIT, Finding, Severity, as_json, gravest, render
from roll.preflight import is_installed

SECRET = "hf_" + "a1B2" * 8


def only(findings: Iterator[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_a_quick_look_at_this_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = cli.main(["doctor", "--quick", "--json", "--output", str(tmp_path / "not" / "there" / "yet")])
    report = json.loads(capsys.readouterr().out)
    sections = {finding["section"] for finding in report["findings"]}
    assert sections == {"versions", "backends", "devices", "limits", "clock", "network"}
    assert status == report["exit_status"] == {"ok": 0, "note": 0, "warning": 1, "error": 2}[report["status"]]
    by_name = {finding["what"]: finding for finding in report["findings"]}
    assert by_name["torch"]["value"] == metadata.version("torch")
    assert set(BACKENDS) <= {
        name for each in report["findings"] for name in each["value"].partition(":")[0].split(", ")
    }
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
        assert command.main([]) == status
        text = capsys.readouterr().out
        assert ("do this" in text) == (severity > Severity.OK)
        assert SECRET not in text and SECRET not in json.dumps(as_json([found]))
    assert gravest([]) is Severity.OK


def test_brackets_of_an_error_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    error = "[rank0]: cannot load [/usr/lib/libnccl.so]"
    render([Finding("nccl", error, "r", Severity.ERROR, "do this")], Console(width=200))
    assert error in capsys.readouterr().out


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Iterator[Finding]:
        raise OSError("no /proc here")
        yield

    monkeypatch.setattr(host, "devices", broken)
    found = command.examine(tmp_path, 2, quick=True, say=lambda text: None)
    assert only(iter(found), "look").value == "OSError: no /proc here"
    assert "limits" in {finding.section for finding in found}, "the rest is looked at"


def test_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=999", "no-such-package>=1", "ray>=2", "vllm==0; extra == 'vllm'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    found = list(host.versions())
    torch = only(iter(found), "torch")
    assert (torch.severity, torch.rule, torch.remedy) == (Severity.ERROR, ">=999", "pip install 'torch>=999'")
    assert only(iter(found), "no-such-package").value == "not installed"
    assert only(iter(found), "requirements").value == "1 of 3 met"


def test_backends_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_installed", lambda module: module != "deepspeed")
    found = list(host.backends({"vllm": "ImportError: libcudart.so.13", "fsdp2": "SyntaxError"}))
    missing, broken, base = (only(iter(found), name) for name in ("deepspeed", "vllm", "fsdp2"))
    assert (missing.severity, "pip install 'roll-rl[deepspeed]'" in missing.remedy) == (Severity.NOTE, True)
    assert (broken.severity, "libcudart.so.13" in broken.value) == (Severity.WARNING, True)
    assert base.severity is Severity.ERROR, "without it nothing trains"
    monkeypatch.setattr(host, "version_of_module", lambda module: "0.1")
    assert "the versions that were tried" in only(host.backends({}), "vllm").rule


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 64 << 20, "total": 64 << 20})
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    (tmp_path / "file").touch()
    found = list(host.limits(tmp_path))
    assert {finding.what: finding.severity for finding in found} == {
        "shared memory": Severity.WARNING,
        "open files": Severity.WARNING,
        "output folder": Severity.ERROR,
        "temporary files": Severity.WARNING,
    }
    assert "--shm-size" in found[0].remedy
    closed = only(host.limits(Path("/proc/no/such")), "output folder")
    assert closed.severity is Severity.ERROR


NODE = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "what", "severity", "words"),
    [
        ({}, "nodes", Severity.OK, "alone"),
        ({"RAY_ADDRESS": "10.0.0.4:6379"}, "nodes", Severity.OK, "RAY_ADDRESS=10.0.0.4:6379"),
        ({"WORLD_SIZE": "two"}, "nodes", Severity.ERROR, "WORLD_SIZE = 'two'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.200"}, "address", Severity.ERROR, "no interface"),
        (NODE, "address", Severity.OK, "on lo"),
        ({**NODE, "GLOO_SOCKET_IFNAME": "eth7"}, "address", Severity.WARNING, "on lo"),
        (NODE, "access token", Severity.ERROR, "none"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RAY_AUTH_TOKEN": "x" * 32},
            "access token",
            Severity.OK,
            "set",
        ),
    ],
)
def test_network(
    environ: dict[str, str],
    what: str,
    severity: Severity,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    found = only(host.network(environ), what)
    assert found.severity is severity and words in found.value, found


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_clock_state", lambda: False)
    assert only(host.clock({}), "synchronised").severity is Severity.NOTE
    assert only(host.clock({"WORLD_SIZE": "2"}), "synchronised").severity is Severity.WARNING
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert only(host.clock({}), "time of day").severity is Severity.ERROR


FAULTY = """
import os, sys, time
from roll.doctor.trials import TRIALS, did
def hang():
    did("began", pid=os.getpid())
    time.sleep(600)
def crash():
    os.abort()
def fail():
    raise OSError("no such device")
TRIALS.update(hang=hang, crash=crash, fail=fail)
TRIALS[sys.argv[1]]()
"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trials, "MODULE", "faulty")


@pytest.mark.long
@pytest.mark.usefixtures("faulty")
def test_a_trial_that_hangs() -> None:
    hung = trials.trial("hang", deadline=10.0)
    assert hung.error == "no end within 10 s; it hung after 'began'"
    assert not is_alive(hung.words[0]["pid"])


@pytest.mark.usefixtures("faulty")
def test_trials_that_crash_and_fail() -> None:
    crashed, failed = trials.trials([("crash",), ("fail",)], 60.0)
    assert "status -6" in crashed.error or "Abort" in crashed.error
    assert failed.error.endswith("OSError: no such device")


@pytest.mark.long
@pytest.mark.e2e
def test_everything_is_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a cluster's prologue would: collectives with right sums, Ray, the sandbox, every backend imported."""
    status = cli.main(["doctor", "--json", "--output", str(tmp_path), "--ranks", "3"])
    report = json.loads(capsys.readouterr().out)
    assert status < 2, report
    by_name = {finding["what"]: finding for finding in report["findings"]}
    for name in ("all-reduce", "all-to-all", "broadcast"):
        assert by_name[name]["data"]["bytes_per_second"] > 0
        assert by_name[name]["data"]["ranks"] == 3
    assert by_name["start and stop"]["severity"] == "ok"
    assert by_name["isolation"]["data"]["given"]
    for name in ("fsdp2", "fsdp", "hf_infer", "deepspeed", "megatron"):
        installed = name not in ("deepspeed", "megatron") or is_installed({"megatron": "megatron.core"}.get(name, name))
        assert by_name[name]["severity"] == ("ok" if installed else "note"), by_name[name]


@pytest.mark.long
def test_a_collective_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks never comes: the other's last deed is told, within the deadline."""
    began = trials.trials

    def without_rank_1(commands, deadline, environ=None):  # type: ignore[no-untyped-def]
        return began(commands[:1], 15.0, environ)

    monkeypatch.setattr(trials, "trials", without_rank_1)
    (found,) = trials.try_collectives(2)
    assert found.severity is Severity.ERROR
    assert "rank 0: no end within 15 s" in found.value and "hung after 'copy'" in found.value


@pytest.mark.long
def test_the_python_of_a_trial_is_this_one() -> None:
    assert trials.trial("imports", "json", deadline=60).words == [{"did": "json"}]
    assert "No module named 'no_such_module'" in trials.trial("imports", "no_such_module", deadline=60).error


SMI = """#!/bin/sh
case "$1" in
nvlink) printf '%s' "$LINKS";;
*) echo "5, 16";;
esac
"""


def test_the_nominal_speed_of_links_between_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tool of NVIDIA's driver prints it; without NVLink that of PCI Express, without the tool nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trials.nominal_speed() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    links = "".join(f"\t Link {number}: 26.562 GB/s\n" for number in range(18))
    monkeypatch.setenv("LINKS", f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n{links}")
    assert trials.nominal_speed() == ", nominally 478 GB/s (18 NVLinks)"
    monkeypatch.setenv("LINKS", "")
    assert trials.nominal_speed() == ", nominally 63 GB/s (PCIe 5 x16)"
