"""Unmodified agents of other packages, as programs of their own: their conversations are trained as sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roll.agents.episode import Episode, Limits, Task
from roll.agents.registry import make_agent
from tests.agents.playing import Recorded, assert_trained_as_sampled, played
from tests.agents.templates import WRITTEN_HERE
from tests.agents.test_agents import called
from tests.support.episodes import trained_ids

pytestmark = pytest.mark.long
PROGRAMS = Path(__file__).with_name("programs")
TASK = Task("t", 0, {"question": "What is 2 + 3?", "ground_truth": 5})
LIMITS = Limits(turns=10, context=100_000, new_tokens=1000, seconds=100)


def run(
    name: str, *arguments: str, says: list[str], reward: str, demands: bool = False, **options: Any
) -> tuple[Episode, Recorded]:
    """``demands``: some draws choose a tool, and belong to no response."""
    engine = Recorded(WRITTEN_HERE[0].chat_template(), lambda _: says[len(engine.turns)])
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *arguments]
    agent = make_agent("black_box", {"command": command, "reward": reward, **options})
    (episode,) = played(agent, engine, TASK, LIMITS)
    if not demands:
        assert_trained_as_sampled(engine, episode.conversations)
    return episode, engine


@pytest.mark.parametrize("arguments", [(), ("chat", "stream")], ids=" ".join)
def test_openai_agents(arguments: tuple[str, ...]) -> None:
    """The conversation grows in one branch, over either interface."""
    pytest.importorskip("agents")
    says = ["I add. " + called("add", a=2, b=3), "5"]
    episode, _ = run("with_openai_agents", *arguments, says=says, reward="post")
    assert (episode.outcome, episode.reward) == ("terminated", 1.0), episode.error
    assert [call.parent for call in episode.calls] == [None, 0]


def test_smolagents_tool_calls() -> None:
    """It writes its history anew: every call is a sample of its own, and is counted as such."""
    pytest.importorskip("smolagents")
    says = [called("add", a=2, b=3), called("final_answer", answer="5")]
    episode, _ = run("with_smolagents", says=says, reward="exit", tool_choice="auto")
    assert (episode.outcome, episode.reward) == ("terminated", 1.0), episode.error
    assert [call.parent for call in episode.calls] == [None, None]
    assert episode.conversations.counts.foreign_responses == 1


def test_smolagents_demands_calls() -> None:
    """It asks for a call of any tool: the policy says which, and with what; the rest is given to it."""
    pytest.importorskip("smolagents")
    says = ["add", ' {"a": 2, "b": 3}}\n</tool_call>', "final", ' {"answer": "5"}}\n</tool_call>']
    episode, engine = run("with_smolagents", says=says, reward="exit", demands=True)
    assert (episode.outcome, episode.reward) == ("terminated", 1.0), episode.error
    assert len(engine.turns) == 4 and episode.metrics["demanded_calls"] == 2
    assert [call.message["tool_calls"][0]["function"]["name"] for call in episode.calls] == ["add", "final_answer"]
    sampled = [trained_ids(branch) for branch in episode.conversations.branches()]
    assert sampled == [engine.turns[1][1], engine.turns[3][1]], "what was drawn to choose a tool is not trained"


def test_two_parts_of_one_policy() -> None:
    pytest.importorskip("anthropic")
    episode, _ = run("self_play", says=["6 x 7?", "42"], reward="post", roles=["asker", "solver"])
    assert [(call.role, call.reward) for call in episode.calls] == [("asker", -1.0), ("solver", 1.0)], episode.error


def test_smolagents_code() -> None:
    """Its stop strings hold; what it adds to a response that one of them ended makes another conversation of it."""
    pytest.importorskip("smolagents")
    says = ["Thought: add\n<code>\nprint(add(2, 3))\n</code>", "Thought: done\n<code>\nfinal_answer(5)\n</code>"]
    episode, engine = run("with_smolagents", "code", says=says, reward="exit")
    assert (episode.outcome, episode.reward) == ("terminated", 1.0), episode.error
    assert "</code>" in engine.options[0]["stop"]
