"""Asynchronous rollout on engines that answer in any order, die, are interrupted and get new weights."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulation.clock import Clock
from roll.checkpoint.state import load_state, save_state
from roll.config.plan.plan import RunAhead
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow, build_filter, by_domain, collected
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import GroupSettings, RolloutContext, RolloutLoop
from roll.rollout.rewarding import RewardClient
from roll.rollout.scheduling import AsyncScheduler, prompt_codec
from roll.strategies.engines.requests import SamplingParams
from tests.rollout.fake_clusters import SLOWEST, FakeRewards, outstanding
from tests.rollout.token_engines import LONGEST, TokenEngines, response

GROUP_SIZE = 3
PARAMS = SamplingParams(max_new_tokens=LONGEST)


def row(number: int) -> PromptRow:
    return PromptRow(f"p{number}", "d", "tag", [number % 7], "prompt", str(number), {})


def longest_is_even(sample: Any) -> float:
    return float(int(sample.response) % 2)


@dataclass
class Bench:
    """An asynchronous scheduler whose calls are answered in an order drawn from ``seed``."""

    ratio: float = 1.0
    batch: int = 4
    additional: int = 0
    steps: int = 100
    world_size: int = 3
    seed: int = 0
    in_flight: bool = True
    takes_turns: bool = False
    filtered: bool = False
    loop: RolloutLoop | None = None
    driver: DriverLoop | None = None
    real_time: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engines = TokenEngines(self.world_size, self.rng)
        self.rewards = FakeRewards(longest_is_even, world_size=2, rng=self.rng)
        self.ahead = RunAhead.of(self.ratio, self.batch, self.additional)
        self.build(first_draw=0)

    def build(self, first_draw: int) -> None:
        numbers = count(first_draw)
        filters = {"d": build_filter("std_filter", {})} if self.filtered else {}
        settings = GroupSettings(GROUP_SIZE, PARAMS, 5, by_domain(filters))
        self.close()
        self.driver = DriverLoop(None if self.real_time else Clock())
        self.client = EngineClient(self.engines, max_running_requests=5)
        self.router = RewardClient({"d": self.rewards})
        draw = lambda n: [row(next(numbers)) for _ in range(n)]  # noqa: E731
        self.flow = GroupFlow(self.client, self.router, draw, settings, first_draw, self.loop)
        codec = prompt_codec(lambda domain, name: row(int(name[1:])))
        self.scheduler = AsyncScheduler(
            self.flow, self.ahead, codec, self.steps, 1.0, in_flight=self.in_flight, takes_turns=self.takes_turns
        )
        self.driver.spawn(self.scheduler.keep_going())

    def close(self) -> None:
        if self.driver is not None:
            self.driver.close()

    def exchange(self, version: int) -> None:
        self.driver.run(self.scheduler.pause())
        self.engines.exchange(version)
        self.scheduler.exchanged(version)

    def state_dict(self) -> dict[str, Any]:
        return self.driver.run(self.scheduler.state_dict())

    @property
    def counts(self) -> dict[str, int]:
        return self.scheduler.counts()

    def step(self, step: int) -> list[SampleGroup]:
        self.exchange(step)
        groups = self.driver.run(self.scheduler.collect(step))
        assert not self.takes_turns or (outstanding(self.client) == 0 and not self.engines.calls)
        self.check(step, groups)
        return groups

    def train(self) -> None:
        """Something else that takes its time: it is answered when the rollout has had some turns."""
        sampled = self.engines.tokens
        self.driver.run(asyncio.sleep(self.rng.random() * 3 * SLOWEST))
        assert not self.takes_turns or self.engines.tokens == sampled, "the engines' devices are others'"

    def check(self, step: int, groups: list[SampleGroup]) -> None:
        """The step's samples are whole, of its number, and not too old; the books balance."""
        assert len(groups) == self.batch
        orders = [group.order for group in groups]
        assert orders == sorted(orders)
        for group in groups if self.loop is None else []:
            assert int(group.item.ground_truth) == group.order
            seed = 5 << 32 | group.order
            whole = [response(seed, index) for index in range(GROUP_SIZE)]
            assert [sample.response_ids.tolist() for sample in group.members] == whole
            for tokens, sample in zip(whole, group.members, strict=True):
                assert np.allclose(sample.log_probs, -sample.response_ids / 2**30)
                spans = sample.weight_versions
                positions = [position for _, start, end in spans for position in range(start, end)]
                assert positions == list(range(len(tokens))), "every token has its version"
                versions = [version for version, _, _ in spans]
                assert versions == sorted(versions)
                assert step - self.ahead.max_lag <= versions[0] <= versions[-1] <= step
        self.scheduler.check()
        counts = self.counts
        assert counts["trained"] == (step + 1) * self.batch
        left = ("trained", "filtered", "stale", "generating", "scoring", "ready")
        assert counts["drawn"] == sum(counts[name] for name in left)
        held = counts["generating"] + counts["scoring"] + counts["ready"]
        assert held <= self.ahead.capacity - self.batch, "what was taken at this version counts, too"


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        for one in made:
            one.close()  # a thread has one loop
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def orders(groups: list[SampleGroup]) -> list[int]:
    return [group.order for group in groups]


@pytest.mark.parametrize(
    ("ratio", "options"),
    [
        (0.5, {"filtered": True}),
        (1, {"additional": 3}),
        (3, {}),
        (1.5, {"additional": 1, "filtered": True}),
        (1, {"takes_turns": True, "filtered": True}),
    ],
)
def test_no_sample_is_lost_or_doubled(bench: Any, tmp_path: Path, ratio: float, options: dict[str, Any]) -> None:
    """100 steps with deaths, updates in flight, groups given up, validations in between and resumed runs."""
    one = bench(ratio=ratio, seed=int(10 * ratio), **options)
    additional, rng = one.additional, random.Random(one.seed)
    seen: list[int] = []
    for step in range(one.steps):
        seen += orders(one.step(step))
        if step in (30, 70):
            one.engines.dead.add(step % 3)
        for _ in range(rng.randint(0, 4)):
            one.train()
        if step % 17 == 16:
            save_state(tmp_path / str(step), one.state_dict() | {"drawn": one.flow.next_order})
        if step % 34 == 33:
            resume(one, load_state(tmp_path / str(step)))
        if step % 9 == 8:
            validate(one, step + 1)
    assert len(set(seen)) == len(seen) == one.steps * one.batch
    counts = one.counts
    assert counts["drawn"] == one.flow.next_order
    assert counts["generating"] + counts["scoring"] + counts["ready"] <= additional, "nothing that no step needs"
    assert (counts["filtered"] > 0) == one.filtered
    assert (counts["stale"] > 0) == (additional > 0)
    assert len(one.engines.left_out) == 2
    assert one.client.num_engines == 1


def test_samples_of_one_version_where_updates_wait_for_them(bench: Any) -> None:
    assert num_mixed(bench(in_flight=False, steps=20)) == 0
    assert num_mixed(bench(steps=20)) > 0
    assert num_mixed(bench(steps=20, takes_turns=True)) > 0, "what was set aside goes on with the next weights"


def num_mixed(one: Bench) -> int:
    """Samples with tokens of several versions, over all steps."""
    mixed = 0
    for step in range(one.steps):
        for group in one.step(step):
            mixed += sum(len(sample.weight_versions) > 1 for sample in group.members)
        one.train()
    return mixed


@pytest.mark.parametrize(
    ("ratio", "behind"),
    [(0, [0, 0, 0, 0]), (0.25, [0, 0, 0, 1]), (0.5, [0, 0, 1, 1]), (1, [1, 1, 1, 1]), (1.5, [1, 1, 2, 2])],
)
def test_a_fraction_of_each_batch_is_begun_ahead(bench: Any, ratio: float, behind: list[int]) -> None:
    """Which steps' weights the prompts of a step were begun with, on engines that answer all in order."""
    one = bench(ratio=ratio, steps=8)
    begun: dict[int, int] = {}
    begin = one.flow.begin

    def note(context: RolloutContext) -> None:
        begun[context.order] = context.version
        begin(context)

    one.flow.begin = note
    for step in range(one.steps):
        groups = one.step(step)
        if ratio <= 1 and step > 1:
            assert sorted(step - begun[group.order] for group in groups) == behind
    ahead = [order // one.batch - version for order, version in begun.items()]
    assert sorted(ahead[-one.batch :]) == behind
    assert list(begun) == list(range(one.steps * one.batch)), "the last steps run ahead of nothing"


@pytest.mark.parametrize(
    ("ready", "unfinished", "can"),
    [
        ({8: 2}, {8: 1}, False),
        ({8: 2}, {9: 2}, True),
        ({8: 1, 9: 1}, {8: 1}, False),
        ({9: 2}, {8: 1}, False),
        ({9: 2, 10: 1}, {9: 1}, True),
        ({10: 2}, {9: 2}, True),
        ({10: 2}, {9: 3}, False),
        ({9: 1, 10: 1}, {9: 3}, False),
        ({8: 1}, {}, False),
    ],
)
def test_a_step_waits_for_what_would_become_too_old(ready: dict[int, int], unfinished: dict[int, int], can: bool):
    """Step 10, at most two versions behind, two groups a step: of version 8 all must be there, of version 9 no more
    than two may be left for step 11."""
    assert RunAhead.of(2, 2).can_be_taken(10, ready, unfinished) is can
    taken_anyway = sum(ready.values()) >= 2
    assert RunAhead.of(2, 2, num_additional=1).can_be_taken(10, ready, unfinished) is taken_anyway


def test_bounds() -> None:
    table = {0: (8, 0), 0.1: (8, 1), 0.5: (12, 1), 1: (16, 1), 1.25: (18, 2), 2: (24, 2)}
    assert {r: (RunAhead.of(r, 8).capacity, RunAhead.of(r, 8).max_lag) for r in table} == table
    assert RunAhead.of(0.7, 10).capacity == 17, "1.7 * 10 is a little less in binary"
    assert RunAhead.of(1, 8, num_additional=5).capacity == 21
    ahead = RunAhead.of(1.5, 8)
    assert [ahead.is_too_old(version, 7) for version in (4, 5, 6, 7)] == [True, False, False, False]


def resume(one: Bench, state: dict[str, Any]) -> None:
    """A new process, new engines."""
    one.engines = TokenEngines(one.world_size, one.rng, dead=one.engines.dead, left_out=[])
    one.build(first_draw=state["drawn"])
    one.driver.run(one.scheduler.load_state_dict(state))


def validate(one: Bench, version: int) -> None:
    """Other prompts, on the same engines, with weights of one version; they are drawn from 0 every time."""
    one.exchange(version)
    rows = iter(range(6))
    one.driver.run(one.scheduler.free_engines())
    draw = lambda n: [row(next(rows)) for _ in range(n)]  # noqa: E731
    flow = GroupFlow(one.client, one.router, draw, GroupSettings(2, PARAMS, 1), 0)
    result = one.driver.run(collected(flow, 6, 0, deadline=1.0))
    assert orders(result.groups) == list(range(6))
    versions = {span[0] for group in result.groups for one in group.members for span in one.weight_versions}
    assert versions == {version}
