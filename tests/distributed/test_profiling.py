"""PyTorch's profiler around chosen calls."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from roll.distributed.actor import Profiler, Profiling


def test_chosen_calls_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiling = Profiling(str(tmp_path), timeline=True, memory=True)
    for name, value in profiling.environment().items():
        monkeypatch.setenv(name, value)
    profiler = Profiler("rewards/math-0")
    for _ in range(3):
        with profiler.around("compute"):
            torch.ones(64, 64) @ torch.ones(64, 64)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rewards-math-0-compute-1.trace.json.gz",
        "rewards-math-0-compute-1.memory.txt",
    }
    with gzip.open(tmp_path / "rewards-math-0-compute-1.trace.json.gz") as file:
        assert "aten::mm" in {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in (tmp_path / "rewards-math-0-compute-1.memory.txt").read_text()


def test_nothing_is_recorded_unless_the_run_says_so(tmp_path: Path) -> None:
    assert Profiling(str(tmp_path), timeline=False, memory=False).environment() == {}
    with Profiler("actor_train-0").around("update"):
        pass
    assert list(tmp_path.iterdir()) == []
