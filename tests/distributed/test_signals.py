"""What a process does about the signals that ask it to end; without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from roll.distributed.signals import SAME_SECONDS, EndingSignals, Interrupted


@pytest.fixture
def ending() -> Iterator[EndingSignals]:
    signals = EndingSignals()
    with signals.handled():
        yield signals


def get(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # where handlers run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
