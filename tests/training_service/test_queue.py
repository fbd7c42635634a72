"""Whose request is next. Each test holds the computing thread until everybody's requests are there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from roll.training_service.queue import Job, Queue, Result, Session, Slices

pytestmark = pytest.mark.asyncio


class Work:
    """A queue with a first request that holds the thread, and the order in which others are computed."""

    def __init__(self) -> None:
        self.queue, self.order, self.may_go = Queue(100), list[str](), threading.Event()

    def add(self, line: str, owner: Session, compute: Callable[[], Result | Slices]) -> Job:
        self.queue.open_line(line, owner, None)
        job = Job(f"{line}:{len(self.order)}:{len(self.queue.jobs)}", compute)
        self.queue.add(line, None, job)
        return job

    def plain(self, line: str, owner: Session) -> Job:
        def compute() -> Result:
            assert self.may_go.wait(60)
            self.order.append(line)
            return {}

        return self.add(line, owner, compute)

    def sliced(self, line: str, owner: Session, number: int) -> Job:
        def compute() -> Slices:
            for index in range(number):
                assert self.may_go.wait(60)
                self.order.append(line)
                if index < number - 1:
                    yield
            return {}

        return self.add(line, owner, compute)

    async def finish(self, *jobs: Job) -> None:
        self.may_go.set()
        await asyncio.gather(*(job.done.wait() for job in jobs))
        await self.queue.close()


async def test_many_requests_of_one_client_delay_another_by_one() -> None:
    work = Work()
    greedy, modest = Session(), Session()
    jobs = [work.plain(f"greedy {index % 4}", greedy) for index in range(20)]
    await asyncio.sleep(0)  # The first is under way.
    jobs.append(work.plain("modest", modest))
    await work.finish(*jobs)
    assert work.order.index("modest") == 1
    assert work.order[2:6] == ["greedy 1", "greedy 2", "greedy 3", "greedy 0"]


async def test_a_long_pass_delays_another_client_by_a_slice() -> None:
    work = Work()
    jobs = [work.sliced("long", Session(), 5)]
    await asyncio.sleep(0)
    jobs.append(work.plain("short", Session()))
    await work.finish(*jobs)
    assert work.order == ["long", "short", "long", "long", "long", "long"]


async def test_time_without_requests_earns_no_credit() -> None:
    work = Work()
    first, second = Session(), Session()
    work.may_go.set()
    await work.plain("first", first).done.wait()
    await asyncio.sleep(0)
    first.used = 1000.0
    await work.plain("first", first).done.wait()
    work.may_go.clear()
    jobs = [work.plain("second", second)]
    assert second.used == 1000.0
    await work.finish(*jobs)


async def test_a_client_that_has_vanished_waits_for_all_others() -> None:
    work = Work()
    gone, here = Session(), Session(used=5.0)
    jobs = [work.plain("gone", gone), work.plain("here", here), work.plain("here", here), work.plain("gone", gone)]
    gone.seen -= 3600
    await work.finish(*jobs)
    assert work.order == ["here", "here", "gone", "gone"]
    assert gone.used >= 5.0  # No credit for its absence: it would hold up the others when it comes back.


async def test_a_line_that_ends_ends_what_is_computed_in_slices() -> None:
    work = Work()
    job = work.sliced("pass", Session(), 100)
    await asyncio.sleep(0)
    work.queue.close_line("pass")
    await work.finish(job)
    assert work.order == ["pass"]
    assert job.result is not None and "has been unloaded" in str(job.result)
