"""A process whose children are the ranks of an engine: the end of one is the end of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from roll.strategies.engines.base import RankWatch
from tests.support.processes import have_ended


def begin(count: int = 3) -> tuple[RankWatch, list[int]]:
    """In the process under test: ranks that wait for ever, and their watch."""
    context = get_context("fork")
    ranks = [context.Process(target=signal.pause, daemon=True) for _ in range(count)]
    for rank in ranks:
        rank.start()
    pids = [rank.pid for rank in ranks if rank.pid is not None]
    print(*pids, flush=True)
    return RankWatch(ranks), pids


def wait_for_ever() -> None:
    begin()
    signal.pause()


def fail_for_a_dead_rank() -> None:
    watch, pids = begin()
    with watch.blamed():
        os.kill(pids[1], signal.SIGKILL)
        raise ConnectionError("a neighbour has closed the connection")


def fail_for_another_reason() -> None:
    watch, _ = begin(1)
    with watch.blamed():
        raise ValueError("there is no such tensor")


def start(scenario: str) -> tuple[subprocess.Popen[str], list[int]]:
    code = f"import logging; logging.basicConfig(); from {__name__} import {scenario}; {scenario}()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.long
@pytest.mark.default_rows("fail_for_a_dead_rank")
@pytest.mark.parametrize("scenario", [wait_for_ever, fail_for_a_dead_rank])
def test_the_death_of_a_rank_is_that_of_the_engine(scenario):
    process, pids = start(scenario.__name__)  # type: ignore[attr-defined]
    if scenario is wait_for_ever:
        os.kill(pids[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert output == "", "whoever blames a rank does not come back"
    assert f"rank 1 of the engine (pid {pids[1]}) has died, and the engine ends with it" in errors
    assert "Traceback" not in errors and "rank 0" not in errors
    assert len(pids) == 3 and have_ended(pids)


@pytest.mark.long
def test_an_end_in_good_order_is_no_death():
    process, pids = start(begin.__name__)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "", "")
    assert len(pids) == 3 and have_ended(pids)


@pytest.mark.long
def test_other_errors_are_raised():
    process, _ = start(fail_for_another_reason.__name__)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "ValueError: there is no such tensor" in errors and "has died" not in errors
