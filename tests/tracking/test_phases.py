"""Seconds and peak memory of phases."""

from __future__ import annotations

import logging
import mmap
import time
from pathlib import Path

import pytest

from roll.pipelines.run_context import PhaseTimer
from roll.tracking.run_record import TimelineLog


def test_seconds_add_up_and_start_anew() -> None:
    timer = PhaseTimer()
    with timer.phase("outer"):
        time.sleep(0.02)
        for _ in range(2):
            with timer.phase("inner"):
                time.sleep(0.01)
    metrics = timer.pop()
    assert set(metrics) == {"time/outer", "time/inner"}
    assert metrics["time/inner"] >= 0.02
    assert metrics["time/outer"] >= metrics["time/inner"] + 0.02
    assert timer.pop() == {}
    with pytest.raises(RuntimeError), timer.phase("outer"), timer.phase("inner"):  # counts as well
        raise RuntimeError
    with timer.phase("next"):
        pass
    assert set(timer.pop()) == {"time/outer", "time/inner", "time/next"}


def test_peak_memory_belongs_to_all_open_phases() -> None:
    readings = iter(
        [
            99,  # before any phase
            10,  # outer's first stretch
            50,  # inner's, so outer's too
            20,  # outer's last stretch
            5,  # between the phases
            7,  # inner's second
        ]
    )
    timer = PhaseTimer(lambda: {"actor_train": next(readings)})
    outer, inner = timer.phase("outer"), timer.phase("inner")
    with outer, inner:
        pass
    with timer.phase("inner"):
        pass
    metrics = timer.pop()
    assert {name: value for name, value in metrics.items() if name.startswith("memory/")} == {
        "memory/outer/actor_train": 50.0,
        "memory/inner/actor_train": 50.0,
    }
    assert next(readings, None) is None


def test_the_wait_for_a_busy_worker_counts() -> None:
    """It answers when it has done what was begun before the phase."""

    def busy() -> dict[str, float]:
        time.sleep(0.02)
        return {}

    timer = PhaseTimer(busy)
    with timer.phase("train"):
        pass
    assert timer.pop()["time/train"] >= 0.02


def test_a_full_disk_costs_lines_of_the_record_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``/dev/full`` is the kernel's full disk."""
    timeline = TimelineLog(tmp_path / "timeline.jsonl", resumed=False)
    (tmp_path / "timeline.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="roll"):
        for step in range(2000):
            timeline.append(step, 0.0, 1.0, [("step_train", 0.0, 1.0)])
        timeline.close()
    (record,) = caplog.records
    assert f"{tmp_path}/timeline.jsonl: " in record.getMessage()


def test_real_peak_of_this_process() -> None:
    from roll.platforms import CPU

    def peak() -> dict[str, float]:
        bytes_ = CPU.memory_stats()["peak"]
        CPU.reset_peak_memory()
        return {"driver": float(bytes_)}

    timer = PhaseTimer(peak)
    with timer.phase("big"), mmap.mmap(-1, 64 << 20) as block:  # the heap may have had as much since before
        block.write(b"x" * (64 << 20))
    with timer.phase("small"):
        pass
    metrics = timer.pop()
    assert metrics["memory/big/driver"] - metrics["memory/small/driver"] > 50 << 20
