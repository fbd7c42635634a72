"""Which groups a step gets, for engines and rewards that answer in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.clock import Clock
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.rewards.base import RewardSample
from roll.rollout.engines import EngineClient
from roll.rollout.flow import (
    MAX_DRAWS_PER_WANTED,
    GroupFlow,
    RolloutExhausted,
    RolloutResult,
    build_filter,
    by_domain,
    collected,
)
from roll.rollout.loops import GroupSettings
from roll.rollout.rewarding import RewardClient
from roll.strategies.engines.requests import SamplingParams
from tests.rollout.fake_clusters import SLOWEST, FakeEngines, FakeRewards, outstanding

PARAMS = SamplingParams(max_new_tokens=8)
DIFFERENT = build_filter("std_filter", {})


def row(number: int, domain: str = "d") -> PromptRow:
    return PromptRow(f"p{number}", domain, "tag", [number], "prompt", str(number), {})


def one_in_three_differs(sample: RewardSample) -> float:
    """Samples of every third prompt get scores that differ (their length), others a score that is the prompt's."""
    number = int(sample.ground_truth)
    return float(len(sample.response)) if number % 3 == 0 else float(number)


@dataclass
class Bench:
    """A scheduler on fake clusters; calls are answered in an order drawn from ``seed``."""

    engines: FakeEngines = field(default_factory=FakeEngines)
    rewards: FakeRewards = field(default_factory=lambda: FakeRewards(one_in_three_differs))
    seed: int = 0
    max_running: int = 100
    domains: Callable[[int], str] = lambda number: "d"

    def __post_init__(self) -> None:
        self.engines.rng = self.rewards.rng = random.Random(self.seed)
        self.numbers = count()
        self.in_flight: list[int] = []
        self.client = EngineClient(self.engines, self.max_running)
        self.router = RewardClient({"d": self.rewards, "other": self.rewards})

    async def watch(self) -> None:
        """Note at all times how many groups are being generated or scored."""
        while True:
            await asyncio.sleep(SLOWEST / 20)
            self.in_flight.append(outstanding(self.client) // 3 + self.router.num_pending)

    def draw(self, n: int) -> list[PromptRow]:
        return [row(number, self.domains(number)) for _, number in zip(range(n), self.numbers, strict=False)]

    def collect(self, wanted=4, filters=None, first_draw=0, num_additional=0) -> RolloutResult:
        settings = GroupSettings(3, PARAMS, 5, by_domain(filters or {}))
        driver = DriverLoop(Clock())
        try:
            watching = driver.spawn(self.watch())
            flow = GroupFlow(self.client, self.router, self.draw, settings, first_draw)
            result = driver.run(collected(flow, wanted, num_additional, deadline=1.0))
            watching.cancel()
            driver.run(self.client.drain())
        finally:
            driver.close()
        assert self.engines.calls == [], "engines are at rest when their weights are exchanged"
        assert outstanding(self.client) == 0
        assert self.router.num_pending == 0
        parts = len(result.groups) + result.num_filtered + result.num_aborted
        assert result.num_drawn == parts, "every prompt that was drawn is used, filtered or aborted"
        return result


benches = st.builds(
    Bench,
    engines=st.builds(FakeEngines, world_size=st.integers(1, 3), per_turn=st.integers(1, 5)),
    rewards=st.builds(FakeRewards, score=st.just(one_in_three_differs), world_size=st.integers(1, 3)),
    seed=st.integers(0, 1000),
    max_running=st.integers(1, 4),
)


@pytest.mark.long
@given(benches)
def test_order_of_the_result_is_that_of_drawing_whoever_finishes_first(bench):
    result = bench.collect(wanted=7, first_draw=40)
    assert [group.order for group in result.groups] == list(range(40, 47))
    for group in result.groups:
        number = group.item.token_ids[0]
        assert [one.text for one in group.members] == [str(number), f"{number} {number}", f"{number} {number} {number}"]
        expected = [one_in_three_differs(sample) for sample in (one.for_reward() for one in group.members)]
        assert group.scores().tolist() == expected


@pytest.mark.long
@given(benches)
def test_filtered_groups_are_replaced_and_the_same_prompts_used_whatever_the_timing(bench):
    result = bench.collect(wanted=4, filters={"d": DIFFERENT})
    assert [group.item.token_ids[0] for group in result.groups] == [0, 3, 6, 9]
    assert result.num_drawn == 10, "not a prompt more than it takes"
    assert result.num_filtered == 6
    assert result.num_aborted == 0


@pytest.mark.long
@settings(max_examples=30)
@given(benches, st.integers(1, 6))
def test_additional_prompts_are_run_and_what_is_left_is_aborted(bench, additional):
    result = bench.collect(wanted=4, filters={"d": DIFFERENT}, num_additional=additional)
    assert len(result.groups) == 4
    assert all(len(set(group.scores())) > 1 for group in result.groups)
    orders = [group.order for group in result.groups]
    assert orders == sorted(orders)
    assert result.num_drawn <= 10 + 3 * (additional + 4)


def test_a_margin_of_additional_prompts_is_kept_while_groups_are_missing():
    bench = Bench(FakeEngines(per_turn=1))
    bench.collect(wanted=4, filters={"d": DIFFERENT}, num_additional=2)
    assert bench.in_flight[0] == 6
    assert min(bench.in_flight) >= 3, "one group missing and two additional at the least"


def test_seed_depends_on_the_draw_alone():
    seeds = []
    for bench in (Bench(), Bench(FakeEngines(world_size=3, per_turn=1), seed=9)):
        bench.collect(wanted=5, first_draw=10)
        seeds.append({key.partition(".")[0]: request.params.seed for key, (_, request) in bench.engines.seen.items()})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 5
    assert list(seeds[0]) == ["10", "11", "12", "13", "14"]


def test_fewer_prompts_than_wanted_is_all_there_is_and_filters_are_the_domains_own():
    bench = Bench()
    bench.numbers = iter(range(3))
    assert len(bench.collect(wanted=8).groups) == 3
    bench = Bench(domains=lambda number: "other" if number % 2 else "d")
    for group in bench.collect(wanted=6, filters={"d": DIFFERENT}).groups:
        assert group.item.domain == "other" or len(set(group.scores())) > 1


def test_everything_filtered_or_nothing_scored_ends_with_what_was_seen():
    filtered = "query_filter_config rejected 102 groups while 2 were wanted and 0"
    with pytest.raises(RolloutExhausted, match=filtered) as failure:
        Bench(rewards=FakeRewards(lambda sample: 0.25)).collect(wanted=2, filters={"d": DIFFERENT})
    assert "0.250 to 0.250" in str(failure.value) and MAX_DRAWS_PER_WANTED == 50
    with pytest.raises(RolloutExhausted, match=r"no sample could be scored in \d+ groups.*has no score") as failure:
        Bench(rewards=FakeRewards(lambda sample: None)).collect(2, {"d": build_filter("no_filter", {})})
    assert "query_filter_config" not in str(failure.value)


def test_partly_scored_groups_are_used():
    bench = Bench(rewards=FakeRewards(lambda sample: None if " " in sample.response else 1.0))
    result = bench.collect(wanted=2, filters={"d": build_filter("no_filter", {})})
    assert [np.isnan(group.scores()).tolist() for group in result.groups] == [[False, True, True]] * 2
