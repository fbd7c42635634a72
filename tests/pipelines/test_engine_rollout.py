"""The rollout phase, synchronous and ahead of training, on engines of this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from roll.checkpoint.contents import CheckpointMismatchError
from roll.datasets.types import PromptRow
from roll.distributed import DriverLoop
from roll.pipelines.engine_rollout import EngineRollout, RolloutSource, Validation, staleness_metrics
from roll.pipelines.files import sample_table
from roll.pipelines.sample_records import Notes, sample_notes
from roll.protocol import DataProto
from roll.protocol.metrics import Mean, Metrics
from roll.rollout.engines import EngineClient
from roll.rollout.flow import GroupFlow
from roll.rollout.groups import SampleGroup, build_batch
from roll.rollout.loops import GroupSettings
from roll.rollout.rewarding import RewardClient
from roll.rollout.scheduling import prompt_codec
from roll.tracking import SampleTable
from tests.rollout.fake_clusters import FakeRewards
from tests.rollout.test_asynchronous import GROUP_SIZE, PARAMS, longest_is_even, row
from tests.rollout.token_engines import TokenEngines

PROMPTS = 4


class Rows(RolloutSource):
    def __init__(self, engines: EngineClient) -> None:
        self.numbers = count()
        rewards = RewardClient({"d": FakeRewards(longest_is_even, world_size=2, rng=random.Random(1))})  # type: ignore[dict-item]
        settings = GroupSettings(GROUP_SIZE, PARAMS, seed=5)
        self.flow = GroupFlow(engines, rewards, self.draw, settings, 0)
        self.codec = prompt_codec(lambda domain, name: row(int(name[1:])))

    def connect(self, engines: EngineClient) -> None: ...

    def draw(self, number: int) -> list[PromptRow]:
        return [row(next(self.numbers)) for _ in range(number)]

    def batch(self, groups: list[SampleGroup], driver: DriverLoop) -> tuple[DataProto, Metrics]:
        return build_batch(groups, 0), {}

    def table(self, groups: Sequence[SampleGroup]) -> SampleTable:
        return sample_table(groups)

    def notes(self, groups: Sequence[SampleGroup]) -> Notes:
        return sample_notes(groups)

    async def validation(self) -> Validation:
        return Validation({"seven": 7.0}, {}, 0.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = count(int(state["num_drawn"]))


def made(ratio: float, cluster: TokenEngines) -> EngineRollout:
    engines = EngineClient(cluster, max_running_requests=5)  # type: ignore[arg-type]
    config: Any = SimpleNamespace(max_steps=20, rpc_timeout=5.0, partial_rollout=True)
    plan: Any = SimpleNamespace(
        is_async=ratio > 0,
        async_generation_ratio=ratio,
        prompts_per_step=PROMPTS,
        num_additional_prompts=0,
        engines_take_turns=False,
    )
    return EngineRollout(config, plan, engines, Rows(engines))


def exchanged(cluster: TokenEngines, version: int) -> Metrics:
    return {"version": Mean(cluster.exchange(version))}


@pytest.mark.long
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_steps_have_the_prompts_in_their_order_and_a_resumed_run_goes_on(ratio: float) -> None:
    cluster, found = TokenEngines(2, random.Random(0)), list[str]()
    rollout = made(ratio, cluster)
    try:
        for step in range(4):
            if step == 2:  # another process
                state = rollout.state_dict()
                rollout.close()
                cluster = TokenEngines(2, random.Random(1))
                rollout = made(ratio, cluster)
                rollout.load_state_dict(state)
            rollout.exchange(step, partial(exchanged, cluster, step))
            assert rollout.validate().metrics == {"seven": 7.0}
            batch, table, metrics = rollout.collect(step)
            assert len(batch) == len(rollout.notes()) == len(table()) == PROMPTS * GROUP_SIZE
            found += batch.non_tensor_batch["prompt_id"][::GROUP_SIZE].tolist()
            assert metrics["scheduler/query_use_count"].value() == PROMPTS
            assert metrics["system/tokens"].value() == float(batch.batch["attention_mask"].sum())
            assert ("scheduler/version_lag/max" in metrics) == (ratio > 0)
    finally:
        rollout.close()
    if ratio:  # in which order groups are complete is chance
        assert len(set(found)) == 4 * PROMPTS
    else:
        assert found == [f"p{number}" for number in range(4 * PROMPTS)]


def test_groups_in_flight_of_another_version_are_refused() -> None:
    """Samples and rewards of a group were two lists once."""
    rollout = made(1.0, TokenEngines(2, random.Random(0)))
    state = rollout.state_dict()
    rollout.close()
    group = {"order": 7, "version": 0, "finished": {}, "rewards": []} | row(7).state_dict()
    state["ahead"]["complete"] = [group]
    resumed = made(1.0, TokenEngines(2, random.Random(1)))
    try:
        with pytest.raises(CheckpointMismatchError, match=r"'members'.*the version of roll that wrote it"):
            resumed.load_state_dict(state)
    finally:
        resumed.close()


def test_staleness_counts_samples_and_tokens() -> None:
    """A sample without tokens has no version."""
    found = staleness_metrics([[(3, 2), (4, 6)], [(5, 8)], []], step=5)
    values = {name.rsplit("scheduler/", 1)[1]: metric.value() for name, metric in found.items()}
    assert values == {
        "version_lag/mean": (2 * 2 + 1 * 6) / 16,
        "version_lag/max": 2.0,
        "off_policy_ratio": 0.5,
        "partial_ratio": 0.5,
    }
