"""Functions of a user's own: async, batched, too slow."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from roll.rewards import RewardResult, RewardSample
from roll.rewards.custom import CustomReward, Limits, Overdue, deadline


def reward(function: Callable[..., Any], timeout: float | None = None, concurrency: int = 32, **options: Any) -> Any:
    return CustomReward("own", function, options, Limits(timeout, concurrency))


def samples(*texts: str) -> list[RewardSample]:
    return [RewardSample("", text) for text in texts]


def test_coroutines_run_side_by_side_within_the_bound() -> None:
    running, most = 0, 0
    all_in = asyncio.Event()

    async def meets(response: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_in.set()
        await all_in.wait()
        await asyncio.sleep(0)
        running -= 1
        return float(response)

    own = reward(meets, concurrency=3)
    assert [r.score for r in own(samples(*"0123456"))] == [0, 1, 2, 3, 4, 5, 6], "in the order of the samples"
    assert most == 3
    own.close()


def test_the_loop_is_the_same_from_batch_to_batch_and_ends_with_the_reward() -> None:
    loops = []

    async def seen(response: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    own = reward(seen)
    own(samples("a"))
    own(samples("b"))
    assert loops[0] is loops[1]
    own.close()
    thread = next((t for t in threading.enumerate() if t.name == "reward-coroutines"), None)
    if thread is not None:
        thread.join(5)
        assert not thread.is_alive()


def test_failures_of_coroutines_are_those_of_their_samples() -> None:
    async def answers(response: str) -> Any:
        if response == "stall":
            await asyncio.Event().wait()
        if response == "refuse":
            raise ConnectionError("no one there")
        if response == "late":
            raise TimeoutError("the service was too slow")
        return {"score": 1.0, "length": len(response)}

    results = reward(answers, timeout=0.5)(samples("ok", "stall", "refuse", "late"))
    assert results[0] == RewardResult(1.0, {"length": 2.0})
    assert results[1].error == "own: timeout: the call took too long"
    assert results[2].error == "own: ConnectionError: no one there"
    assert results[3].error == "own: timeout: the service was too slow"


def busy(response: str) -> float:
    caught: list[Exception] = []
    while response == "busy":
        try:
            time.perf_counter()
        except Exception as error:  # a user's own handler must not swallow the interruption
            caught.append(error)
    if response == "asleep":
        time.sleep(60)
    return 1.0


def test_a_plain_function_is_interrupted() -> None:
    began = time.monotonic()
    results = reward(busy, timeout=0.3)(samples("busy", "asleep", "quick"))
    assert [r.score for r in results] == [None, None, 1.0]
    assert all("timeout:" in (r.error or "") for r in results[:2])
    assert time.monotonic() - began < 10


def test_off_the_main_thread_a_late_answer_is_a_timeout_too() -> None:
    results: list[RewardResult] = []

    def late(response: str) -> float:
        time.sleep(0.02)
        return 1.0

    thread = threading.Thread(target=lambda: results.extend(reward(late, timeout=0.01)(samples("a"))))
    thread.start()
    thread.join()
    assert "timeout:" in (results[0].error or "")


def test_no_limit_outlives_its_block() -> None:
    with pytest.raises(Overdue), deadline(0.01):
        time.sleep(10)
    with deadline(0.02):
        pass
    time.sleep(0.05)


def test_a_function_of_samples_gets_the_batch() -> None:
    def ranks(samples: list[RewardSample], best: float = 1.0) -> list[Any]:
        longest = max(len(sample.response) for sample in samples)
        return [{"score": best * len(s.response) / longest, "length": len(s.response)} for s in samples]

    results = reward(ranks, best=2.0)(samples("a", "abcd"))
    assert results == [RewardResult(0.5, {"length": 1.0}), RewardResult(2.0, {"length": 4.0})]

    async def alike(samples: list[RewardSample]) -> list[float]:
        await asyncio.sleep(0)
        return [3.0] * len(samples)

    assert [r.score for r in reward(alike)(samples("a", "b"))] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("returned", "error"), [([1.0], "returned 1 results for a batch of 2"), (1.0, "returned float for a batch of 2")]
)
def test_a_batch_needs_as_many_results(returned: Any, error: str) -> None:
    results = reward(lambda samples: returned)(samples("a", "b"))
    assert all(error in (r.error or "") for r in results)


def test_a_batch_that_fails_fails_for_all_its_samples() -> None:
    def broken(samples: list[RewardSample]) -> list[float]:
        raise ValueError("no")

    assert [r.error for r in reward(broken)(samples("a", "b"))] == ["own: ValueError: no"] * 2
    stalls = reward(lambda samples: time.sleep(60), timeout=0.02)(samples("a", "b"))
    assert all("timeout:" in (r.error or "") for r in stalls)
