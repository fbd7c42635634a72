"""Episodes made of ids, for tests: scripted calls, and random trees."""

from __future__ import annotations

from itertools import compress
from typing import Any, cast

import numpy as np

from roll.agents.chat_ids import ChatTemplate
from roll.agents.conversation import Branch, Call, Conversations
from roll.agents.episode import Episode, Outcome, Task
from roll.rollout.episodes import EpisodeGroup
from roll.rollout.groups import FinishedGroup
from roll.strategies.engines.requests import FinishReason, GenerationOutput


def said(new_ids: list[int], response_ids: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    """A call: ids before its response, the response, the call it goes on from, and ``reward``, ``state``, ``role``."""
    return {"new_ids": new_ids, "response_ids": response_ids, "parent": parent, **more}


def sampled(
    ids: list[int], log_probs: list[float] | None = None, version: int = 0, reason: FinishReason = "stop"
) -> FinishedGroup:
    """A response, as an engine gives it to an episode."""
    output = GenerationOutput("", 0, ids, log_probs or [-1.0] * len(ids), reason, [(version, 0, len(ids))])
    return FinishedGroup.from_samples([output], [""])


def ids_of(branch: Branch) -> list[int]:
    """All ids of a branch."""
    return [one for call in branch.calls for one in (*call.new_ids, *call.response_ids)]


def trained_ids(branch: Branch) -> list[int]:
    """The ids that a branch trains."""
    return [one for call in compress(branch.calls, branch.is_trained) for one in call.response_ids]


def make_episode(*calls: dict[str, Any], outcome: Outcome = "terminated", tag: str = "env", seed: int = 1) -> Episode:
    """An episode of these calls, answered in order."""
    conversations = Conversations(cast(ChatTemplate, None))
    for index, given in enumerate(calls):
        size = len(given["response_ids"])
        call = Call(
            index=index,
            messages=[],
            log_probs=[-0.5 - 0.01 * token for token in given["response_ids"]],
            versions=[index] * size,
            finish_reason="stop",
            **given,
        )
        conversations.calls.append(call)
    reward = sum(call.reward for call in conversations.calls)
    return Episode(Task(tag, seed), conversations, outcome=outcome, reward=reward)


def random_groups(
    generator: np.random.Generator, groups: int, episodes: int, vocabulary: int = 50, trees: bool = True, turns: int = 4
) -> list[EpisodeGroup]:
    """Groups of episodes of 1 to ``turns`` calls with a reward each; with ``trees`` histories branch and begin anew."""

    def ids(most: int) -> list[int]:
        return [int(token) for token in generator.integers(1, vocabulary, generator.integers(1, most + 1))]

    made = []
    for order in range(groups):
        members = []
        for _ in range(episodes):
            calls: list[dict[str, Any]] = []
            for turn in range(int(generator.integers(1, turns + 1))):
                parents = [*range(turn), None] if trees and turn else [turn - 1 if turn else None]
                reward, state = float(np.float32(generator.normal())), str(generator.integers(0, 3))
                parent = parents[int(generator.integers(len(parents)))]
                calls.append(said(ids(3), ids(4), parent, reward=reward, state=state))
            members.append(make_episode(*calls, seed=order))
        made.append(EpisodeGroup(order, Task("env", order), members))
    return made
