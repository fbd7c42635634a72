"""``roll doctor --gpu``: on a CPU, in the processes and by the code of a GPU; and what each rule says of figures."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from roll import cli, platforms
from roll.doctor import command, devices, trials
from roll.doctor.trials import Finding, Outcome, Severity
from roll.platforms import PLATFORM_ENV, Platform, current_platform
from tests.doctor.support import module_of


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    current_platform.cache_clear()
    yield
    current_platform.cache_clear()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("platform", [None, "cuda"])
def test_a_machine_without_a_gpu_is_told(
    platform: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platforms.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(Platform, "device_count", lambda self: 0)
    monkeypatch.delenv(PLATFORM_ENV)
    if platform:
        monkeypatch.setenv(PLATFORM_ENV, platform)
    monkeypatch.setattr(command, "examine", None)
    assert cli.main(["doctor", "--gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "finds no GPU" in line and "ROLL_PLATFORM=cpu" in line


def report_of(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    """What ``roll doctor --gpu --json`` writes; its findings by name."""
    status = cli.main(["doctor", "--gpu", "--json", "--output", str(folder)])
    report = json.loads(capsys.readouterr().out)
    assert status == report["exit_status"]
    return report | {"findings": {finding["what"]: finding for finding in report["findings"]}}


COLLECTIVES = {"all-reduce", "broadcast", "all-gather", "all-to-all"}


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.e2e
def test_all_of_it_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = report_of(capsys, tmp_path)
    found, count = report["findings"], current_platform().device_count()
    assert not [finding for finding in found.values() if finding["severity"] == "error"]
    names = ("memory", "copies", "matrix product", "attention", "cuda_ipc")
    assert {f"device {index}: {name}" for index in range(count) for name in names} <= set(found)
    assert ("peer access" in found) == (count > 1)
    assert found["device 0: matrix product"]["data"]["flops_per_second"] > 1e12
    assert found["two steps"]["data"]["devices"] == min(2, count)
    assert set(found) >= COLLECTIVES
    assert report["seconds"] < 60


FAULTY_DEVICES = """
import torch
import torch.distributed as dist
from roll.doctor import devices, trials
def matrix(index):
    right = torch.matmul
    torch.matmul = lambda one, other: right(one, other) * 2
    devices.matrix(index)
def memory():
    right = devices._rate
    def _rate(target, source, *indices):
        rate = right(target, source, *indices)
        target[1000] += 1
        return rate
    devices._rate = _rate
    devices.memory()
def collectives(*words):
    dist.all_gather_into_tensor = lambda received, own: None
    trials.collectives(*words)
"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return module_of(FAULTY_DEVICES, "faulty_devices", monkeypatch, tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("on_cpu")
def test_wrong_values(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error of its own, and the rest is tried; a trial that hangs: ``test_doctor.py``."""
    for name in ("matrix", "memory"):
        monkeypatch.setattr(devices, name, getattr(faulty, name))
    monkeypatch.setattr(trials, "collectives", faulty.collectives)
    found = {finding.what: finding for finding in (*devices.try_arithmetic(), *devices.try_memory())}
    product = found["device 0: matrix product"]
    assert product.severity is found["copies"].severity is Severity.ERROR
    assert found["device 0: attention"].severity is not Severity.ERROR
    assert "the matrix product is wrong: relative error" in product.value
    assert "device 0: copies by pageable memory bring wrong values" in found["copies"].value
    assert found["device 0: memory"].severity is not Severity.ERROR, "what was looked at before counts"
    (gathered,) = trials.try_collectives(2)
    assert gathered.severity is Severity.ERROR and "all-gather gave wrong values" in gathered.value


@pytest.mark.usefixtures("on_cpu")
def test_a_run_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "from roll.doctor import trials\nfrom pathlib import Path\n"
    text += "def two_steps(folder):\n    trials.recipes_root = lambda: Path('/nowhere')\n    trials.two_steps(folder)\n"
    monkeypatch.setattr(trials, "two_steps", module_of(text, "faulty_run", monkeypatch, tmp_path).two_steps)
    (found,) = trials.try_run()
    assert found.severity is Severity.ERROR and "No module named 'prepare'" in found.value
    assert "max_steps=2" in found.remedy


def is_slow(finding: Finding) -> bool:
    """A warning with a remedy; else in order."""
    assert finding.severity in (Severity.OK, Severity.WARNING)
    assert bool(finding.remedy) == (finding.severity is Severity.WARNING)
    return finding.severity is Severity.WARNING


def test_what_would_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert not is_slow(devices.judge_product(0, "NVIDIA H100 80GB HBM3", 700e12, 8192))
    slow = devices.judge_product(1, "NVIDIA H100 80GB HBM3", 400e12, 8192)
    assert is_slow(slow) and "power cap" in slow.remedy and "989" in slow.rule
    assert not is_slow(devices.judge_product(0, "A device of next year", 1e9, 512))
    fast, narrow, staged = ((9e9, 8e9), (24e9, 25e9)), ((3e9, 2e9), (5e9, 6e9)), ((20e9, 20e9), (15e9, 20e9))
    for (pageable, pinned), expected in ((fast, False), (narrow, True), (staged, True)):
        assert is_slow(devices.judge_copies(0, {"pageable": pageable, "pinned": pinned})) == expected
    assert not is_slow(devices.judge_copies(0, {"pageable": (1e9, 1e9)})), "a host without pinned memory"
    pairs = {(0, 1): (True, 40e9), (1, 0): (True, 39e9)}
    assert not is_slow(devices.judge_pairs(pairs))
    apart = devices.judge_pairs({(0, 1): (True, 40e9), (1, 0): (False, 8e9)})
    assert is_slow(apart) and "1 of 2 pairs" in apart.value and "none from 1 to 0" in apart.value
    assert is_slow(devices.judge_pairs({(0, 1): (True, 2e9)}))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "unset NCCL_P2P_DISABLE" in devices.judge_pairs(pairs).remedy
    for rate, expected in ((1e9, True), (100e9, False)):
        ranks = [Outcome([{"did": "all-reduce", "rate": rate * rank, "bytes": 1 << 28}], "") for rank in (1, 2)]
        (reduced,) = trials._judge_collectives("nccl", 2, ranks)
        assert is_slow(reduced) == expected
        assert reduced.data is not None and reduced.data["bytes_per_second"] == rate, "the slowest rank counts"


def test_who_holds_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As nvidia-smi writes it: other devices and this process are left out. A difference that is no number is wrong."""
    with pytest.raises(RuntimeError, match="wrong"):
        devices._require("it", torch.tensor([math.nan, 1.0]), torch.ones(2))
    own = f"GPU-aa, {os.getpid()}, 500 MiB, python3"
    rows = ["GPU-aa, 12, 900 MiB, python3", own, "GPU-bb, 13, 1 MiB, x", "No apps"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert devices.holders("aa") == ["python3 (pid 12, 900 MiB)"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert devices.holders("aa") == []
