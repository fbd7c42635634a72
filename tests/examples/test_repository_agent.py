"""Repositories that the policy repairs: tools, tests, what a policy may try instead, and the generated tasks."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.agentic_demo import toy_repositories
from examples.agentic_demo.repository_agent import Repository, files_of
from roll.agents.agent_options import AgentOptionError
from roll.agents.episode import Episode, Limits, Task
from roll.agents.registry import make_agent
from tests.agents.playing import Recorded, assert_trained_as_sampled, played
from tests.agents.templates import WRITTEN_HERE

AGENT = "examples.agentic_demo.repository_agent.RepositoryAgent"


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def repaired(row: dict[str, Any]) -> list[str]:
    """Response of a policy that knows the solution."""
    writes = [called("write_file", path=path, content=text) for path, text in row["solution"].items()]
    return [called("list_files"), called("read_file", path=next(iter(row["files"]))), *writes, called("run_tests")]


def play(rows: list[dict[str, Any]], says: Callable[[dict[str, Any]], list[str]], turns: int = 10) -> list[Episode]:
    """An episode of each row with one agent; behind what it ``says`` the policy is done."""
    agent = make_agent(AGENT, {"timeout": 10})
    found = []
    for row in rows:
        text = iter([*says(row), *["done"] * turns])
        engine = Recorded(WRITTEN_HERE[0].chat_template(), lambda _, text=text: next(text))
        limits = Limits(turns=turns, new_tokens=2000, context=100_000)
        agent_of_row = _Open(agent)
        (episode,) = played(agent_of_row, engine, Task("t", 0, row), limits)
        assert_trained_as_sampled(engine, episode.conversations)
        found.append(episode)
    asyncio.run(agent.close())
    return found


class _Open:
    """An agent that stays open for the next episode."""

    def __init__(self, agent: Any) -> None:
        self.run = agent.run


@pytest.mark.long
def test_what_is_repaired_passes_and_what_is_not_fails() -> None:
    rows = [toy_repositories.task(number) for number in range(4)]
    assert len({row["imports"] for row in rows}) == 2
    for episode in play(rows, repaired):
        assert (episode.outcome, episode.reward, episode.success) == ("terminated", 1.0, True), episode.error
        results = [message["content"] for message in episode.calls[-1].messages if message["role"] == "tool"]
        assert results[-1] == "All tests pass.\n" and "characters written" in results[-2]
    for episode in play(rows, lambda row: [called("run_tests")]):
        assert (episode.reward, episode.success) == (0.0, False), "the fault is there before anybody repairs it"
        assert "AssertionError" in episode.calls[-1].messages[-1]["content"]
    (episode,) = play(rows[:1], lambda row: repaired(row)[2:], turns=2)
    assert (episode.outcome, episode.reward, episode.success) == ("turn_limit", 1.0, True), "judged as it was left"


FORGED = (
    "import os\nos._exit(0)",
    "raise SystemExit(0)",
    "class Same:\n    __eq__ = lambda self, other: True\ntotal = lambda *args: Same()",
    "import builtins, sys\nsys.modules['__main__'].__dict__['total'] = lambda *args: True\ntotal = lambda *args: True",
)


@pytest.mark.long
def test_a_verdict_is_not_forged_and_hidden_tests_count() -> None:
    row = next(row for row in map(toy_repositories.task, range(9)) if "shop" in row["imports"])
    values = {}
    for line in row["tests"].splitlines():
        call, _, value = line.removeprefix("assert ").partition(" == ")
        arguments: Any = ast.parse(call, mode="eval").body
        values[str(tuple(ast.literal_eval(one) for one in arguments.args))] = float(value)
    learnt = f"def total(*args):\n    return {values}[str(args)]"
    for text in (*FORGED, learnt):
        (episode,) = play([row], lambda _, text=text: [called("write_file", path="shop/prices.py", content=text)])
        assert episode.reward == 0.0 and not episode.failed, text
        assert episode.metrics["tests_passed"] == (0.5 if text == learnt else 0.0), text


def test_files_of_a_task(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "one.py").write_text("x = 1\n")
    assert files_of({"folder": str(tmp_path)}) == files_of({"files": '{"./package/one.py": "x = 1\\n"}'})
    for row, words in (({}, "neither files"), ({"files": {"../x": ""}}, "leads out"), ({"files": {"/x": ""}}, "out")):
        with pytest.raises(ValueError, match=words):
            files_of(row)
    repository = Repository({"a": "1"}, most_bytes=10)
    assert repository.write("./a", "12345").text == "a: 5 characters written." and repository.files == {"a": "12345"}
    for path, content in (("../a", ""), ("/a", ""), ("b", "123456")):
        assert repository.write(path, content).failed
    assert repository.read("b").failed and len(repository.files) == 1


def test_options() -> None:
    with pytest.raises(AgentOptionError, match="timeuot"):
        make_agent(AGENT, {"timeuot": 1})
    assert toy_repositories.task(3, 1) == toy_repositories.task(3, 1) != toy_repositories.task(3, 0)
