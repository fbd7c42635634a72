from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from pathlib import Path

import pytest

from roll.distributed import WorkerDied
from roll.distributed.failures import RankReport
from roll.rollout.groups import SampleGroup
from roll.rollout.rewarding import QUARANTINE_FILE, RewardClient, SampleQuarantine
from tests.rollout.fake_clusters import FakeRewards, let_be_done, on_clock, settle
from tests.support.sample_groups import make_group


def groups(count: int, size: int = 2, domain: str = "a", first: int = 0):
    return [make_group(first + i, [1], [[i, j] for j in range(size)], domain=domain) for i in range(count)]


def length_of(sample) -> float:
    return float(len(sample.response))


def last_number(sample) -> float:
    return float(sample.response.split()[-1])


async def submit(client: RewardClient, given: list[SampleGroup]) -> list[asyncio.Task[SampleGroup]]:
    tasks = [asyncio.ensure_future(client.score(group)) for group in given]
    await settle()
    return tasks


@on_clock
async def test_each_group_gets_the_scores_of_its_own_samples():
    clusters = {"a": FakeRewards(last_number, world_size=3), "b": FakeRewards(lambda s: 9.0)}
    client = RewardClient(clusters)
    given = groups(7, size=3) + groups(2, domain="b", first=7)
    tasks = await submit(client, given)
    assert client.num_pending == 9
    assert client.num_calls == 0
    await let_be_done([*clusters["b"].calls, *reversed(clusters["a"].calls)])
    assert [await task for task in tasks] == given
    for group in given:
        assert (
            group.scores().tolist()
            == ([9.0] * 3 if group.item.domain == "b" else [0.0, 1.0, 2.0])[: len(group.members)]
        )
    assert client.num_pending == 0
    assert client.num_calls == 4, "groups that are given together travel together"


@on_clock
async def test_work_is_spread_over_the_workers_of_a_domain():
    cluster = FakeRewards(length_of, world_size=3)
    client = RewardClient({"a": cluster})
    await submit(client, groups(9))
    assert cluster.samples_of_rank == {0: 6, 1: 6, 2: 6}
    await let_be_done([call for call in cluster.calls if call.rank == 1])
    await submit(client, groups(1, first=9))
    assert cluster.samples_of_rank == {0: 6, 1: 8, 2: 6}, "the one that is idle"


@on_clock
async def test_scores_that_nobody_waits_for_occupy_their_worker_until_they_are_there():
    cluster = FakeRewards(length_of, world_size=2)
    client = RewardClient({"a": cluster})
    (task,) = await submit(client, groups(1))
    task.cancel()
    await settle()
    assert client.num_pending == 0
    unsent = asyncio.ensure_future(client.score(groups(1)[0]))
    await asyncio.sleep(0)
    unsent.cancel()
    await submit(client, groups(1, first=1))
    assert cluster.samples_of_rank == {0: 2, 1: 2}, "rank 0 is still at it; what nobody waits for is not sent"
    await let_be_done(cluster.calls)
    await submit(client, groups(1, first=2))
    assert cluster.samples_of_rank == {0: 4, 1: 2}


def dies_of(deadly: str, times: int):
    """A score; the worker dies of one response, so many times."""
    deaths = []

    def score(sample) -> float:
        if sample.response == deadly and len(deaths) < times:
            deaths.append(sample)
            raise WorkerDied("rewards.a", "score", 0.0, [RankReport(0, error="killed")], [])
        return length_of(sample)

    return score


@pytest.mark.parametrize("times", [1, 2, 99])
def test_a_reward_worker_that_dies_is_replaced(times: int, tmp_path: Path) -> None:
    """Its work is done again; the sample that kills it twice is quarantined, with its row, and no other one."""

    @on_clock
    async def play() -> None:
        given = groups(3, size=2)
        deadly = given[1].members[1].text
        cluster = FakeRewards(dies_of(deadly, times), rng=random.Random(0))
        quarantine = SampleQuarantine(tmp_path)
        client = RewardClient({"a": cluster}, quarantine=quarantine)
        await asyncio.gather(*(client.score(group) for group in given))
        results = [one.reward for group in given for one in group.members]
        quarantined_at = [number for number, result in enumerate(results) if result.score is None]
        assert quarantined_at == ([] if times == 1 else [3])
        assert len(cluster.restarts) == quarantine.num_deaths == min(times, 2)
        assert quarantine.num_samples == len(quarantined_at)
        lines = (tmp_path / QUARANTINE_FILE).read_text().splitlines() if quarantined_at else []
        assert [json.loads(line)["response"] for line in lines] == [deadly] * len(quarantined_at)

    play()


class SharedFate(FakeRewards):
    """All calls that a worker has when it dies fail."""

    def _score(self, call):
        try:
            return super()._score(call)
        except WorkerDied as death:
            for other in self.calls:
                other.work = partial(self._fail, other, death)
            raise

    def _fail(self, call, death):
        self.calls.remove(call)
        raise death


@pytest.mark.parametrize("seed", range(8))
def test_no_sample_is_blamed_for_the_death_that_another_call_causes(seed: int) -> None:
    """Groups that come one after the other are calls of their own, which die together when one of them kills the
    worker that they share."""

    @on_clock
    async def play() -> None:
        given = groups(6, size=2)
        deadly = given[2].members[1].text
        client = RewardClient({"a": SharedFate(dies_of(deadly, 99), rng=random.Random(seed))})
        tasks = [task for group in given for task in await submit(client, [group])]
        await asyncio.gather(*tasks)
        results = [one.reward for group in given for one in group.members]
        assert [number for number, result in enumerate(results) if result.score is None] == [5]
        assert client.quarantine.num_samples == 1

    play()


@on_clock
async def test_a_worker_that_dies_of_everything_ends_the_run() -> None:
    def die(sample) -> float:
        raise WorkerDied("rewards.a", "score", 0.0, [RankReport(0, error="killed")], [])

    client = RewardClient({"a": FakeRewards(die, rng=random.Random(0))})
    (group,) = groups(1, size=8)
    with pytest.raises(WorkerDied, match=r"rewards\.a rank 0"):
        await client.score(group)
