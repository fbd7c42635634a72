"""Programs whose requests say which part the policy plays: conversations and rewards of each role."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.agents.agent_options import AgentOptionError
from roll.agents.endpoint import Session
from roll.agents.episode import Limits, Model, Task, run_episode
from roll.agents.registry import check_agent
from roll.rollout.episodes import EpisodeGroup
from roll.serving.dialects.requests import ChatRequest
from roll.serving.http import Refusal
from tests.agents.playing import Recorded
from tests.agents.templates import WRITTEN_HERE

ROLES = ("asker", "solver")
GO = [{"role": "user", "content": "go"}]


class Played:
    """As a black box, without its program: both ask the same and get the same, then go on, each with its own."""

    def __init__(self, rewards: list[Any]) -> None:
        self.rewards = iter(rewards)

    async def run(self, task: Task, model: Model, episode: Any) -> float:
        session = Session(task, model, roles=ROLES)
        first = {role: await session.answer(ChatRequest(GO, model=role)) for role in ROLES}
        for role in ROLES:
            goes_on = [*GO, first[role].message, {"role": "user", "content": "again"}]
            await session.answer(ChatRequest(goes_on, model=role))
        with pytest.raises(Refusal, match="'gpt-4o' is no role") as refused:
            await session.answer(ChatRequest(GO, model="gpt-4o"))
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        await session.post({"reward": next(self.rewards)})
        for role in session.roles:
            model.as_(role).reward(session.reward[role] if isinstance(session.reward, dict) else session.reward or 0.0)
        return 0.0


def episodes(rewards: list[Any]) -> EpisodeGroup:
    engine = Recorded(WRITTEN_HERE[0].chat_template(), lambda _: "same")
    limits, agent = Limits(context=1000), Played(rewards)

    async def all_of_them() -> Any:
        models = [Model(engine, engine.template, "hermes", limits) for _ in rewards]
        return [await run_episode(Task("t", 0), agent, model, limits) for model in models]

    return EpisodeGroup(0, Task("t", 0), asyncio.run(all_of_them()))


def test_each_role_has_rewards_of_its_own() -> None:
    """The roles' rewards sum to nothing in every episode."""
    group = episodes([{"asker": 1.0, "solver": -1.0}, {"asker": -1.0, "solver": 1.0}])
    for episode in group.members:
        assert [(call.role, call.parent) for call in episode.calls] == [
            *(("asker", None), ("solver", None)),
            *(("asker", 0), ("solver", 1)),
        ], "a role goes on from its own calls, whoever was answered alike"
        assert episode.reward == 0
    assert [[one.reward_of(role) for one in group.members] for role in ("asker", "solver")] == [
        [1.0, -1.0],
        [-1.0, 1.0],
    ]


def test_a_single_reward_is_earned_by_every_role() -> None:
    (episode,) = episodes([0.5]).members
    assert [(call.role, call.reward) for call in episode.calls][2:] == [("asker", 0.5), ("solver", 0.5)]


def test_rewards_of_roles_that_there_are_not() -> None:
    with pytest.raises(Refusal, match="'other' is no role of this agent; there are asker, solver"):
        asyncio.run(_post({"reward": {"other": 1.0}}, ROLES))
    with pytest.raises(Refusal, match="the agent has none"):
        asyncio.run(_post({"reward": {"asker": 1.0}}, ()))
    with pytest.raises(AgentOptionError, match="each once"):
        check_agent("black_box", {"command": ["python"], "roles": ["a", "a"]})


async def _post(body: dict[str, Any], roles: tuple[str, ...]) -> None:
    template = WRITTEN_HERE[0].chat_template()
    model = Model(Recorded(template, lambda _: ""), template, "hermes", Limits())
    await Session(Task("t", 0), model, roles=roles).post(body)
