"""The driver's event loop under signals, whose handlers raise in the middle of any task."""

from __future__ import annotations

import asyncio
import gc

import pytest

from roll.distributed import DriverLoop
from roll.distributed.signals import Interrupted


async def _interrupted() -> None:
    await asyncio.sleep(0)
    raise Interrupted(15)  # as the handler does, wherever it finds the main thread


async def _waits_for(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


async def _result(value: int) -> int:
    for _ in range(8):
        await asyncio.sleep(0)
    return value


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_a_signal_inside_a_task_is_raised_once(waiting: int, caplog: pytest.LogCaptureFixture) -> None:
    """What waits for that task ends with it, and what is run after it, to save the run, is not disturbed."""
    driver = DriverLoop()
    try:
        task = driver.spawn(_interrupted())
        for _ in range(waiting):
            task = driver.spawn(_waits_for([task]))
        with pytest.raises(Interrupted):
            driver.run(_result(1))
        assert driver.run(_result(2)) == 2
        assert driver.run(_result(3)) == 3
    finally:
        driver.close()
    assert driver.is_closed
    gc.collect()
    assert not caplog.records, "an ending run is not a place for tracebacks of tasks"


def test_what_is_waited_for_itself_is_interrupted() -> None:
    driver = DriverLoop()
    try:
        task = driver.spawn(_interrupted())
        with pytest.raises(Interrupted):
            driver.run(_waits_for([task]))
        with pytest.raises(Interrupted):
            driver.run(task)
    finally:
        driver.close()
