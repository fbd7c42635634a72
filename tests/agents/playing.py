"""An endpoint with scripted or hot engines behind it, for tests of black boxes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from roll.agents.agent_options import BlackBoxOptions
from roll.agents.chat_ids import ChatTemplate
from roll.agents.endpoint import AgentEndpoint, Session
from roll.agents.episode import Agent, Episode, Limits, Model, Task, run_episode
from roll.rollout.groups import FinishedGroup
from roll.strategies.engines.requests import FinishReason
from tests.support.episodes import ids_of, sampled, trained_ids


class Recorded:
    """An engine that records what it was asked and gave; ``choose`` makes a text, or ids, of the prompt's text."""

    def __init__(self, template: ChatTemplate, choose: Callable[[str], Any]) -> None:
        self.template, self.choose = template, choose
        self.turns: list[tuple[list[int], list[int]]] = []
        self.options: list[Mapping[str, Any]] = []

    async def __call__(self, prompt_ids: list[int], max_new_tokens: int, options: Mapping[str, Any]) -> FinishedGroup:
        await asyncio.sleep(0)
        said = self.choose(self.template.decode(prompt_ids))
        reason: FinishReason = "stop"
        if isinstance(said, str):
            ids = self.template.encode(said)
            if len(ids) >= max_new_tokens:
                ids, reason = ids[:max_new_tokens], "length"
            else:
                ids = [*ids, min(self.template.end_tokens)]
        else:
            ids, reason = said
        self.turns.append((list(prompt_ids), ids))
        self.options.append(dict(options))
        return sampled(ids, [-0.5] * len(ids), len(self.turns), reason)

    def prompts(self) -> list[list[int]]:
        return [prompt for prompt, _ in self.turns]


def byte_soup(template: ChatTemplate, seed: int, calls: list[str] | None = None) -> Callable[[str], Any]:
    """Samples of an untrained model at a high temperature: any bytes, ended or cut, now and then a tool call."""
    rng = random.Random(seed)
    ends = sorted(template.end_tokens)

    def choose(_: str) -> tuple[list[int], str]:
        if calls and rng.random() < 0.3:
            return [*template.encode(rng.choice(calls)), ends[0]], "stop"
        ids = [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
        return ([*ids, rng.choice(ends)], "stop") if rng.random() < 0.7 else (ids, "length")

    return choose


def played(
    agent: Agent,
    engine: Recorded,
    task: Task | None = None,
    limits: Limits | None = None,
    tool_format: str = "hermes",
    count: int = 1,
) -> list[Episode]:
    """The episodes of ``count`` runs of ``agent`` at the same time."""
    limits = limits or Limits(context=100_000)

    async def all_of_them() -> list[Episode]:
        runs = [
            run_episode(task or Task("t", number), agent, Model(engine, engine.template, tool_format, limits), limits)
            for number in range(count)
        ]
        episodes = await asyncio.gather(*runs)
        close = getattr(agent, "close", None)
        if close is not None:
            await close()
        return list(episodes)

    return asyncio.run(all_of_them())


@contextlib.asynccontextmanager
async def opened(
    engine: Recorded,
    limits: Limits | None = None,
    tool_format: str = "hermes",
    **options: Any,
) -> AsyncIterator[tuple[AgentEndpoint, Session]]:
    """An endpoint with one session."""
    endpoint = AgentEndpoint(BlackBoxOptions())
    endpoint.start()
    try:
        limits = limits or Limits(turns=1000, context=100_000)
        model = Model(engine, engine.template, tool_format, limits)
        session = Session(Task("t", 0, {"question": "1+1"}), model, **options)
        endpoint.open(session)
        yield endpoint, session
        endpoint.retire(session)
    finally:
        endpoint.close()


def assert_trained_as_sampled(engine: Recorded, model_calls: Any) -> None:
    """Every call's prompt and response are those that the engine saw and gave; every sampled id is trained once."""
    conversations = model_calls
    calls = [call for call in conversations.calls if call.finished]
    recorded = [(tuple(prompt), tuple(ids)) for prompt, ids in engine.turns]
    assert sorted((tuple(conversations.prompt_ids(call)), tuple(call.response_ids)) for call in calls) == sorted(
        recorded
    )
    branches = conversations.branches()
    assert sum(len(trained_ids(branch)) for branch in branches) == sum(len(ids) for _, ids in engine.turns)
    for branch in branches:
        last = branch.calls[-1]
        assert ids_of(branch) == conversations.prompt_ids(last) + last.response_ids
