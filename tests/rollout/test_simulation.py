"""The scheduling simulator of ``benchmarks``, on which the schedulers' figures rest."""

from __future__ import annotations

import pytest

from benchmarks.async_simulation import MODES, TASKS, TRAIN_RATE, Figures, Simulation, Task

LONG_TAIL = TASKS["rlvr"]
SYNCHRONOUS, ONE_OFF, PARTIAL, _, FAR_AHEAD, MORE_PROMPTS, IN_TURNS, *_ = MODES


def figures(mode, task: Task = LONG_TAIL, share: float = 0.5, steps: int = 12) -> Figures:
    return Simulation(mode, task, devices=4, samples=32, training_share=share).run(steps)


def test_equal_lengths_take_the_time_that_is_computed_by_hand() -> None:
    task = Task(median=1_000, sigma=0.0)
    generated = 1_000 * (0.010 + 0.00005 * 8)  # 32 samples on 4 engines
    trained = 32 * (1_000 + 512) / (4 * TRAIN_RATE)
    measured = figures(SYNCHRONOUS, task)
    assert measured.step_seconds == pytest.approx(2.0 + generated + 0.5 + trained, rel=1e-3)
    assert measured.idle == pytest.approx(2.5 / measured.step_seconds, rel=1e-2), "weights on the way, and rewards"


def test_asynchrony_helps_where_lengths_differ() -> None:
    synchronous, one_off, partial, far = map(figures, (SYNCHRONOUS, ONE_OFF, PARTIAL, FAR_AHEAD))
    assert synchronous.version_lag == 0
    assert one_off.version_lag == 1, "samples are finished before the weights change"
    assert 0 < partial.version_lag < 1
    assert far.step_seconds < partial.step_seconds < one_off.step_seconds
    assert far.step_seconds < 0.5 * synchronous.step_seconds
    turns = figures(IN_TURNS)
    assert turns.step_seconds < 0.8 * synchronous.step_seconds, "on shared devices nobody waits for the longest"
    assert turns.idle < synchronous.idle and 0 < turns.version_lag < 1
    assert max(one_off.stale, partial.stale, far.stale, turns.stale) == 0
