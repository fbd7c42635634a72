"""Reaction of a process to the signals that ask it to end; without Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from roll.distributed.calls import DriverLoop
from roll.distributed.signals import SAME_SECONDS, EndingSignals, Interrupted


@pytest.fixture
def ending() -> Iterator[EndingSignals]:
    signals = EndingSignals()
    with signals.handled():
        yield signals


def get(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # where handlers run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_one_is_an_exception(ending: EndingSignals, number: signal.Signals) -> None:
    told: list[signal.Signals] = []
    ending.on_first = told.append
    with pytest.raises(Interrupted, match=f"ended by {number.name}") as interruption:
        get(number)
    assert interruption.value.code == 128 + number
    assert told == [number]
    get(number)  # at the same moment, as from `timeout`: the same request


def test_what_must_not_be_torn_apart_is_done_first(ending: EndingSignals) -> None:
    done = []
    with pytest.raises(Interrupted), ending.holding():
        with ending.holding():
            get(signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert ending.received == signal.SIGTERM


def test_what_may_be_abandoned_within_is(ending: EndingSignals) -> None:
    with ending.holding(then_raise=False):
        with pytest.raises(Interrupted), ending.interruptible():
            get(signal.SIGHUP)
            pytest.fail("it goes on")
        with pytest.raises(Interrupted), ending.interruptible():
            pytest.fail("it begins")


def test_another_thread_may_end_the_main_one(ending: EndingSignals) -> None:
    """By an exception that Ray's calls let through, which means the one that was given."""
    cause = RuntimeError("the house is on fire")
    with pytest.raises(SystemExit) as raised:
        threading.Timer(0.05, ending.raise_in_main, [cause]).start()
        time.sleep(5)
    assert ending.meant(raised.value) is cause
    other = ValueError("of the run's own")
    assert ending.meant(other) is other


CHILD = """
import os, signal, sys, time
from roll.distributed.signals import ending
with ending.handled():
    ending.on_second = lambda words: os.write(1, words.encode())
    with ending.holding():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep({pause})
print("to its end")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "status", "output"),
    [("", 129, "SIGHUP again: ended at once"), ("trap '' HUP; ", 0, "to its end")],
    ids=["twice", "nohup"],
)
def test_the_second_one_ends_the_process_and_ignored_ones_stay_ignored(before: str, status: int, output: str) -> None:
    script = CHILD.format(pause=2 * SAME_SECONDS)
    done = subprocess.run(
        ["bash", "-c", f'{before}exec "$0" -c "$1"', sys.executable, script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (status, output), done.stderr


async def until_cancelled(ends: list[str], number: signal.Signals | None = None) -> None:
    try:
        await asyncio.sleep(0.01)
        if number is not None:
            get(number)  # while a coroutine computes
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)
        ends.append("cancelled")
        raise


@pytest.mark.long
@pytest.mark.parametrize("by_a_coroutine", [False, True])
def test_a_driver_that_waits_is_interrupted_and_leaves_nothing_pending(
    ending: EndingSignals, by_a_coroutine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []
    driver = DriverLoop()
    if not by_a_coroutine:  # the loop has nothing to do but wait
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    try:
        for _ in range(3):
            driver.spawn(until_cancelled(ends))
        with pytest.raises(Interrupted):
            driver.run(until_cancelled(ends, signal.SIGTERM if by_a_coroutine else None))
    finally:
        driver.close()
    assert ends == ["cancelled"] * (3 if by_a_coroutine else 4), "the interrupted coroutine has ended by the signal"
    assert DriverLoop.of_this_thread() is None
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_an_error_from_another_thread_ends_the_wait_of_a_driver(ending: EndingSignals) -> None:
    """As when a daemon of Ray dies."""
    driver, lost = DriverLoop(), LookupError("a daemon has ended")
    threading.Timer(0.1, ending.raise_in_main, [lost]).start()
    try:
        with pytest.raises(SystemExit) as raised:
            driver.run(asyncio.Event().wait())
        assert ending.meant(raised.value) is lost
    finally:
        driver.close()


def test_one_that_another_node_has_got_is_taken_over(ending: EndingSignals) -> None:
    """The process's own, which may come later, is the same request and does not end it at once."""
    thread = threading.Thread(target=ending.take_over, args=[signal.SIGTERM])
    with pytest.raises(Interrupted, match="ended by SIGTERM"), ending.holding():
        thread.start()
        thread.join()
        time.sleep(SAME_SECONDS + 0.1)
        assert ending.received == signal.SIGTERM
        get(signal.SIGTERM)
    ending.take_over(signal.SIGTERM)  # of a third node: nothing more
    assert ending.received == signal.SIGTERM


async def interrupted() -> None:
    await asyncio.sleep(0)
    raise Interrupted(15)  # as the handler does, wherever it finds the main thread


async def waits_for(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


async def result_of(value: int) -> int:
    for _ in range(8):
        await asyncio.sleep(0)
    return value


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_a_signal_inside_a_task_is_raised_once(waiting: int, caplog: pytest.LogCaptureFixture) -> None:
    """What waits for that task ends with it, and what is run after it, to save the run, is not disturbed."""
    driver = DriverLoop()
    try:
        task = driver.spawn(interrupted())
        for _ in range(waiting):
            task = driver.spawn(waits_for([task]))
        with pytest.raises(Interrupted):
            driver.run(result_of(1))
        assert driver.run(result_of(2)) == 2
        assert driver.run(result_of(3)) == 3
    finally:
        driver.close()
    assert driver.is_closed
    gc.collect()
    assert not caplog.records, "an ending run is not a place for tracebacks of tasks"


def test_what_is_waited_for_itself_is_interrupted() -> None:
    driver = DriverLoop()
    try:
        task = driver.spawn(interrupted())
        with pytest.raises(Interrupted):
            driver.run(waits_for([task]))
        with pytest.raises(Interrupted):
            driver.run(task)
    finally:
        driver.close()
