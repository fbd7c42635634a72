"""Validation that goes on while the policy trains gives what it gives by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from roll.config.data import DataArguments
from roll.config.roles import GeneratingArguments
from roll.distributed import WorkerDied
from roll.pipelines.rlvr.config import ValidationSet
from roll.pipelines.rlvr.pipeline import Validation, validate
from roll.rollout.flow import GroupFlow, collected
from roll.rollout.groups import SampleGroup
from roll.rollout.loops import GroupSettings
from tests.rollout.test_asynchronous import Bench, bench, longest_is_even, row  # noqa: F401  a fixture
from tests.rollout.token_engines import LONGEST

QUESTIONS = 11
STEPS = 12


def one_set(name: str, samples: int, greedy: bool) -> ValidationSet:
    generating = GeneratingArguments(num_return_sequences=samples)
    return ValidationSet(name, DataArguments(), generating, 8, 8 + LONGEST, LONGEST, samples, greedy)


SETS = [one_set("", 2, True), one_set("few", 3, False)]
ROWS = {"": [row(number) for number in range(QUESTIONS)], "few": [row(number) for number in range(3)]}


@dataclass
class Asked:
    """Result of a validation."""

    metrics: dict[str, float]
    tokens: dict[str, list[list[int]]]
    versions: set[int]

    @staticmethod
    def of(validation: Validation) -> Asked:
        metrics, shown = validation.metrics, validation.groups
        groups: list[SampleGroup] = [group for groups in shown.values() for group in groups]
        versions = {span[0] for group in groups for one in group.members for span in one.weight_versions}
        samples = {name: [one for group in groups for one in group.members] for name, groups in shown.items()}
        tokens = {name: [one.response_ids.tolist() for one in own] for name, own in samples.items()}
        return Asked(metrics, tokens, versions)


def begin(one: Bench) -> asyncio.Task[Validation]:
    async def answer(rows: Any, count: int, params: Any, first: int) -> list[SampleGroup]:
        settings, remaining = GroupSettings(count, params, seed=3), iter(rows)
        flow = GroupFlow(one.client, one.router, lambda count: list(islice(remaining, count)), settings, first)
        return (await collected(flow, len(rows), 0, 1.0)).groups

    return one.driver.spawn(validate(SETS, ROWS, 4, answer))


def before(one: Bench, version: int) -> Asked:
    """By itself, between an exchange of weights and the step."""
    one.exchange(version)
    one.driver.run(one.scheduler.free_engines())
    return Asked.of(one.driver.run(begin(one)))


def concurrently(one: Bench) -> Asked:
    """While the driver waits for something else, until it has nothing else to wait for."""
    validation = begin(one)
    for _ in ("log-probs", "update"):
        one.train()
    return Asked.of(one.driver.run(validation))


@pytest.mark.parametrize("options", [{"ratio": 1}, {"ratio": 2.5, "filtered": True}, {"ratio": 1, "in_flight": False}])
def test_answers_during_generation_and_training_are_those_of_one_version(bench: Any, options: dict[str, Any]) -> None:  # noqa: F811
    """Engines have training prompts and questions of the same numbers at a time; one of them dies."""
    alone = before(bench(seed=5), 7)
    assert alone.versions == {7}
    assert alone.metrics.keys() >= {"val/sampled/accuracy", "val/greedy/accuracy", "val/few.sampled/pass@2"}
    assert 0 < alone.metrics["val_correct/all/mean"] < 1
    one = bench(steps=STEPS, **options)
    trained = []
    for step in range(STEPS):
        trained += one.step(step)
        if step == 4:
            one.engines.dead.add(1)
        asked = concurrently(one)
        assert asked.versions == {step}
        assert (asked.metrics, asked.tokens) == (alone.metrics, alone.tokens)
    assert len({group.order for group in trained}) == STEPS * one.batch
    assert one.client.num_engines == 2


def test_what_fails_in_it_ends_the_wait_for_others(bench: Any) -> None:  # noqa: F811
    one = bench()
    one.step(0)
    begin(one)
    one.engines.dead |= {0, 1, 2}
    with pytest.raises(WorkerDied, match="killed"):
        one.driver.run(asyncio.Event().wait())
