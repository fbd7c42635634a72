"""Loops of a user's own, in synchronous and in asynchronous collections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.checkpoint.state import load_state, save_state
from roll.datasets.types import PromptRow
from roll.rollout.flow import GroupFlow, RolloutStalled, collected
from roll.rollout.groups import FinishedGroup, SampleGroup, build_batch
from roll.rollout.loops import GroupSettings, RolloutContext, rollout_loops
from roll.rollout.scheduling import prompt_codec
from tests.rollout.fake_clusters import outstanding
from tests.rollout.test_asynchronous import GROUP_SIZE, PARAMS, Bench, bench, resume, row, validate
from tests.rollout.token_engines import response

__all__ = ["bench"]


class TwoThenOne:
    """One sample first; two more next to one that is given up. Every fifth prompt is passed over after its first."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        assert context.group_size == GROUP_SIZE
        first = await context.generate(prompt.token_ids, 1)
        if int(prompt.ground_truth) % 5 == 0:
            return None
        given_up, others = context.start(prompt.token_ids), context.start(prompt.token_ids, 2)
        second = await others
        given_up.abort()
        assert (await given_up) is None or given_up.value.lengths.size == GROUP_SIZE
        draft = await context.compute_rewards(context.group(prompt, first))
        group = await context.compute_rewards(context.group(prompt, first, second))
        assert group.scores()[:1].tolist() == draft.scores().tolist()
        return group


class WithoutRewards:
    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        return context.group(prompt, await context.generate(prompt.token_ids))


def test_asynchronous(bench: Any, tmp_path: Path) -> None:
    """With validations, an engine's death and a resumed run."""
    one = bench(ratio=1.5, steps=40, loop=TwoThenOne())
    seen: list[int] = []
    for step in range(one.steps):
        groups = one.step(step)
        seen += [group.order for group in groups]
        for group in groups:
            samples = [one.response_ids.tolist() for one in group.members]
            seed = 5 << 32 | group.order
            second = random.Random(f"{seed}/2").getrandbits(63)
            assert samples == [response(seed, 0), response(second, 0), response(second, 1)]
        one.train()
        if step == 10:
            one.engines.dead.add(1)
        if step == 20:
            save_state(tmp_path, one.state_dict() | {"drawn": one.flow.next_order})
            resume(one, load_state(tmp_path))
        if step % 9 == 8:
            validate(one, step + 1)
    assert len(set(seen)) == len(seen) == one.steps * one.batch
    assert {order % 5 for order in seen} == {1, 2, 3, 4}
    assert one.counts["filtered"] == sum(order % 5 == 0 for order in range(one.counts["drawn"]))


def collect(made: Bench, loop: Any, wanted: int = 6) -> Any:
    numbers = count()
    draw = lambda n: [row(next(numbers)) for _ in range(n)]  # noqa: E731

    async def drained() -> Any:
        flow = GroupFlow(made.client, made.router, draw, GroupSettings(GROUP_SIZE, PARAMS, 5), 0, loop)
        result = await collected(flow, wanted, 2, deadline=1.0)
        await made.client.drain()
        return result

    return made.driver.run(drained())


def test_mistakes_of_a_loop_are_told(bench: Any) -> None:
    with pytest.raises(ValueError, match=r"WithoutRewards.answer .*3 samples with 0 rewards; it must have 3 of each"):
        collect(bench(), WithoutRewards())


OBSERVATION = [7, 7, 7]


class ThreeRounds:
    """A draft, an observation, two answers to it; a hint, and one last answer to the first of these and one without."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[list[int], FinishedGroup]]] = {}
        """By prompt: every context that an engine was asked with, and what it sampled."""

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        self.calls[context.order] = []

        async def ask(tokens: list[int], count: int) -> FinishedGroup:
            finished = await context.generate(tokens, count)
            self.calls[context.order].append((tokens, finished))
            return finished

        draft = await ask(prompt.token_ids, 1)
        seen = [*prompt.token_ids, *draft.token_ids.tolist(), *OBSERVATION]
        answers = await ask(seen, 2)
        first, second = (part.tolist() for part in answers.split(answers.token_ids))
        last = await ask([*seen, *first, 8, 9], 1)
        hinted = await ask([*prompt.token_ids, 5, 6], 1)
        alone = await ask([*seen, *second], 1)  # it goes on at once, with nothing given in between
        return await context.compute_rewards(context.group(prompt, alone, last, hinted))


def rows_of(result: Any) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Prompt and columns, without padding, of every row of a batch."""
    batch = build_batch(result.groups, 0).batch
    orders = [group.order for group in result.groups for _ in range(len(group.members))]
    for index, order in enumerate(orders):
        there = batch["attention_mask"][index]
        yield order, {name: batch[name][index][there].tolist() for name in TOKEN_COLUMNS}


TOKEN_COLUMNS = ("input_ids", "response_mask", "rollout_log_probs", "weight_versions")


@pytest.mark.parametrize("stored", [False, True])
def test_the_last_round_is_trained_after_what_it_was_sampled_with(bench: Any, stored: bool) -> None:
    loop = ThreeRounds()
    result = collect(bench(), loop)
    if stored:
        rows = {group.item.prompt_id: group.item for group in result.groups}
        codec = prompt_codec(lambda domain, name: rows[name])
        for one in result.groups:
            state = one.state_dict()
            item = codec.item_from(state)
            one.item, one.members = item, [codec.member_from(item, member) for member in state["members"]]
    calls = (4, 2, 3)  # the call that sampled each sample of the group
    for index, (order, columns) in enumerate(rows_of(result)):
        context, finished = loop.calls[order][calls[index % GROUP_SIZE]]
        sampled = finished.token_ids.tolist()
        begin, end = len(context), len(context) + len(sampled)
        assert columns["input_ids"] == [*context, *sampled]
        assert columns["response_mask"] == [False] * begin + [True] * len(sampled)
        assert columns["rollout_log_probs"][begin:] == finished.log_probs.tolist()
        (span,) = finished.weight_versions[0]
        assert columns["weight_versions"][begin:end] == [span[0]] * (end - begin)
        group = result.groups[index // GROUP_SIZE]
        assert group.members[index % GROUP_SIZE].for_reward().num_tokens == len(sampled)
    assert index == 6 * GROUP_SIZE - 1


class OtherContext:
    """Asks about something else than its prompt; gives the answer out for the prompt's, or for that of another one."""

    def __init__(self, is_for_other: bool) -> None:
        self.is_for_other = is_for_other

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        other = replace(prompt, token_ids=[99, *prompt.token_ids])
        return context.group(other if self.is_for_other else prompt, await context.generate(other.token_ids))


@pytest.mark.parametrize("is_for_other", [False, True])
def test_samples_of_another_context_are_refused(bench: Any, is_for_other: bool) -> None:
    with pytest.raises(ValueError, match=r"context that does not begin with the prompt's tokens.*another context"):
        collect(bench(), OtherContext(is_for_other))


class Wanders:
    """Awaits what a loop may: a sleep, a thread, a subprocess, tasks of its own; one prompt in four never ends."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.answered: list[int] = []

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        try:
            await asyncio.sleep(0.01 * (context.order % 3))
            if context.order % 4 == 3:
                await asyncio.Event().wait()
            asked = context.generate(prompt.token_ids, 1), context.generate([*prompt.token_ids], 2)
            first, rest = await asyncio.gather(*asked)
            if context.order == 0:
                shell = await asyncio.create_subprocess_exec("echo", "seen", stdout=asyncio.subprocess.PIPE)
                assert (await shell.communicate())[0] == b"seen\n"
                assert await asyncio.to_thread(sum, [1, 2]) == 3
            group = await context.compute_rewards(context.group(prompt, first, rest))
            self.answered.append(context.order)
            return group
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)  # tidying up may take its time
            self.cancelled.append(context.order)
            raise


def test_a_loop_may_await_anything(bench: Any) -> None:
    """On a clock of its own: subprocesses and threads are not simulated."""
    loop = Wanders()
    made = bench(real_time=True, seed=3)
    result = collect(made, loop)
    orders = [group.order for group in result.groups]
    assert len(orders) == 6 and all(order % 4 != 3 for order in orders) and set(orders) <= set(loop.answered)
    assert result.num_aborted >= 1 and 3 in loop.cancelled
    assert result.num_drawn == len(orders) + result.num_filtered + result.num_aborted
    assert outstanding(made.client) == 0 and made.engines.calls == []


class Sleeps:
    """Something between two requests that neither engines nor rewards know of."""

    def __init__(self, first: float = 0.0) -> None:
        self.first = first

    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        await asyncio.sleep(self.first)
        first = await context.generate(prompt.token_ids, 1)
        await asyncio.sleep(0.05 * (context.order % 5))
        second = await context.generate(prompt.token_ids, 2)
        return await context.compute_rewards(context.group(prompt, first, second))


def test_a_resumed_loop_gets_the_responses_that_it_had(bench: Any, tmp_path: Path) -> None:
    """In the middle of its requests, or of those that it makes again: nothing is sampled twice."""
    one = bench(ratio=1.5, steps=12, loop=Sleeps())
    sampled = trained = 0
    for step in range(one.steps):
        trained += sum(len(sample.response_ids) for group in one.step(step) for sample in group.members)
        one.train()
        if step % 3 == 1:
            save_state(tmp_path / str(step), one.state_dict() | {"drawn": one.flow.next_order})
            state = load_state(tmp_path / str(step))
            assert any(len(entry["progress"]) == 2 for entry in state["unfinished"])
            sampled += one.engines.tokens
            resume(one, state)
            np.testing.assert_equal(one.state_dict()["unfinished"], state["unfinished"], "nothing has run yet")
    assert sampled + one.engines.tokens == trained


class Fails(Sleeps):
    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        if context.order == 9:
            raise KeyError("no such tool")
        return await super().answer(prompt, context)


def test_a_failure_of_one_prompt_ends_the_step_and_cancels_the_others(bench: Any) -> None:
    made = bench()
    with pytest.raises(KeyError, match="no such tool"):
        collect(made, Fails(), wanted=8)
    made.driver.run(made.client.drain())
    assert outstanding(made.client) == 0 and made.router.num_pending == 0
    with pytest.raises(RuntimeError, match=r"CancelsItself.answer was cancelled by something that it awaits"):
        collect(made, CancelsItself())
    ahead = bench(ratio=1, loop=Fails())
    with pytest.raises(KeyError, match="no such tool"):
        for step in range(4):
            ahead.step(step)
            ahead.train()


class CancelsItself(Sleeps):
    async def answer(self, prompt: PromptRow, context: RolloutContext) -> SampleGroup | None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError


def test_prompts_that_wait_for_ever_are_named(bench: Any) -> None:
    stalled = r"moved for 1 s; 8 groups are in flight\n  group 0 \(d, p0\) .*test_loops.py:\d+"
    with pytest.raises(RolloutStalled, match=stalled):
        collect(bench(), Sleeps(1e6))


def test_loops_are_found_by_path() -> None:
    assert isinstance(rollout_loops.resolve(f"{__name__}.TwoThenOne")(), TwoThenOne)
    with pytest.raises(ValueError, match=r"user_defined_rollout_loop_cls.*cannot be imported"):
        rollout_loops.resolve("no_such.Loop")
