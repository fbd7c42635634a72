"""Detection and the CPU platform against what the system itself says."""

from __future__ import annotations

import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll import platforms
from roll.platforms import CPU, PLATFORM_ENV, Platform, current_platform, use_cpu_below

MEBIBYTE = 1 << 20


@pytest.fixture
def fresh_detection():
    current_platform.cache_clear()
    yield
    current_platform.cache_clear()


@pytest.mark.parametrize(
    ("name", "device_type", "backend", "ray_resource"),
    [
        ("cpu", "cpu", "gloo", None),
        ("cuda", "cuda", "nccl", "GPU"),
        ("rocm", "cuda", "nccl", "GPU"),
        ("npu", "npu", "hccl", "NPU"),
    ],
)
def test_platform_can_be_chosen(monkeypatch, fresh_detection, name, device_type, backend, ray_resource):
    monkeypatch.setenv(PLATFORM_ENV, name)
    platform = current_platform()
    assert (platform.name, platform.device_type, platform.collective_backend) == (name, device_type, backend)
    assert backend in platform.process_group_backend
    assert platform.ray_resource == ray_resource
    current_platform.cache_clear()
    monkeypatch.setenv(PLATFORM_ENV, "tpu")
    with pytest.raises(ValueError, match=r"ROLL_PLATFORM='tpu'.*cpu, cuda, rocm, npu"):
        current_platform()


def test_detection_agrees_with_torch(fresh_detection):
    expected = "cpu" if not torch.cuda.is_available() else "rocm" if torch.version.hip else "cuda"
    if not hasattr(torch, "npu"):
        assert current_platform().name == expected


def test_detection_without_devices_imports_no_torch(tmp_path):
    """A machine without device files must not pay for torch; looked at in a process of its own."""
    code = """
import sys, glob
import roll.platforms as detect
glob.glob = lambda pattern: []
assert detect.current_platform().name == 'cpu'
assert 'torch' not in sys.modules and 'ray' not in sys.modules
"""
    environment = {k: v for k, v in os.environ.items() if k != PLATFORM_ENV}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(("devices", "chosen", "expected"), [(2, None, "cpu"), (1, None, "cuda"), (2, "cuda", "cuda")])
def test_an_example_of_two_devices_leaves_a_single_gpu_alone(
    monkeypatch, fresh_detection, caplog, devices, chosen, expected
):
    monkeypatch.setattr(platforms.glob, "glob", lambda pattern: [pattern])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(Platform, "device_count", lambda self: 1)
    monkeypatch.setenv(PLATFORM_ENV, chosen or "")
    if chosen is None:
        monkeypatch.delenv(PLATFORM_ENV)
    use_cpu_below(devices)
    assert current_platform().name == expected
    assert os.environ.get(PLATFORM_ENV) == ("cpu" if expected == "cpu" else chosen), "those that it starts follow"
    assert ("this machine's platform cuda has 1" in caplog.text) == (expected == "cpu")


def test_cpu_device():
    assert CPU.device() == torch.device("cpu")
    assert CPU.device_count() == 1
    assert not CPU.pin_memory
    CPU.set_device(0)
    CPU.synchronize()
    CPU.empty_cache()
    free, total = CPU.free_memory()
    assert CPU.device_name()
    assert 0 < free <= total
    assert total == int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def test_cpu_peak_memory_rises_and_is_reset():
    platform = CPU
    platform.reset_peak_memory()
    before = platform.memory_stats()
    block = mmap.mmap(-1, 64 * MEBIBYTE)  # not the heap: what malloc gives back depends on the process's past
    for page in range(0, 64 * MEBIBYTE, resource.getpagesize()):
        block[page] = 1
    held = platform.memory_stats()
    assert held["used"] - before["used"] > 60 * MEBIBYTE
    block.close()
    freed = platform.memory_stats()
    assert freed["peak"] - freed["used"] > 60 * MEBIBYTE, "the peak stays when memory is given back"
    platform.reset_peak_memory()
    again = platform.memory_stats()
    assert again["peak"] - again["used"] < 16 * MEBIBYTE


@pytest.mark.gpu
def test_accelerator_memory():
    platform = current_platform()
    platform.set_device(0)
    platform.empty_cache()
    platform.reset_peak_memory()
    before = platform.memory_stats()["used"]
    free, total = platform.free_memory()
    assert 0 < free <= total
    block = torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device=platform.device())
    platform.synchronize()
    assert platform.memory_stats()["used"] - before >= 64 * MEBIBYTE
    assert platform.free_memory()[0] <= free - 64 * MEBIBYTE
    del block
    stats = platform.memory_stats()
    assert stats["peak"] - stats["used"] >= 64 * MEBIBYTE
    assert stats["total"] > stats["peak"]


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_cores_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], cores: int
) -> None:
    """A container with two of eight cores sees eight in its affinity mask."""
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    quotas = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    monkeypatch.setattr(platforms, "_CPU_QUOTAS", tuple(tuple(str(tmp_path / name) for name in one) for one in quotas))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert platforms.usable_cores() == cores
