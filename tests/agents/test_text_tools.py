"""Tools around environments, called in the text of a response; questions of a data set."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar

import pytest

from examples.tiny_agentic.games import GuessNumber
from roll.agents.agent_options import ToolWrapperArguments
from roll.agents.text_tools import TextTools, text_tool
from roll.agents.tools import ToolError
from roll.environments.base import Environment, EnvironmentOptionError, make_environment
from tests.rewards.http_service import Answer, serving
from tests.support.environments import check_environment


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    rows = [{"problem": f"What is {n} + {n} ?", "answer": str(2 * n), "prompt": f"{n}?"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def played(environment: Environment, *actions: str, seed: int = 3) -> list[Any]:
    async def play() -> list[Any]:
        found: list[Any] = [await environment.reset(seed)]  # type: ignore[misc]
        for action in actions:
            found.append(await environment.step(action))  # type: ignore[misc]
        return found

    return asyncio.run(play())


@pytest.mark.parametrize(("name", "right"), [("roll_math", r"\boxed{%s}"), ("roll_qa", r"It is \boxed{ %s. }")])
def test_questions_of_rolls_files(questions: str, name: str, right: str) -> None:
    environment = make_environment(name, {"dataset_name": questions, "mode": "train", "split": "train"})
    text, _ = environment.reset(seed=5)  # type: ignore[misc]
    assert environment.reset(seed=5)[0] == text  # type: ignore[index]
    number = int(str(text).split()[2])
    assert environment.step(right % (2 * number))[1:4] == (1.0, True, False)  # type: ignore[index]
    environment.reset(seed=5)
    assert environment.step(r"\boxed{-1}")[1] == 0.0  # type: ignore[index]
    assert not check_environment(name, {"dataset_name": questions}, episodes=3).faults


def test_a_column_that_is_not_there(questions: str) -> None:
    environment = make_environment("roll_math", {"dataset_name": questions, "answer_key": "solution"})
    with pytest.raises(ValueError, match="no column 'solution'; it has problem, answer, prompt"):
        environment.reset(seed=1)
    with pytest.raises(EnvironmentOptionError, match="did you mean 'answer_key'"):
        make_environment("roll_math", {"dataset_name": questions, "answer_kye": "x"})


class Waits(GuessNumber):
    """A subclass of an instant environment whose own ``step`` may wait."""

    threads: ClassVar[set[int]] = set()

    def step(self, action: str) -> Any:
        self.threads.add(get_ident())
        return super().step(action)


class Decorated(GuessNumber):
    """An instant environment whose ``step`` returns an awaitable, as a decorated coroutine function does."""

    instant = True

    def step(self, action: str) -> Any:
        async def answer() -> Any:
            return super(Decorated, self).step(action)

        return answer()


def test_methods_that_may_wait_are_called_off_the_loop_and_awaitables_awaited() -> None:
    for kind in (Waits, Decorated):
        (_, step) = played(TextTools([], ToolWrapperArguments()).around(kind), "1")
        assert len(step) == 5
    assert Waits.threads and get_ident() not in Waits.threads


def reverse(text: str) -> str:
    """Turn a text round.

    Args:
        text: What is turned round.
    """
    return text[::-1]


def test_a_wrapped_environment(questions: str) -> None:
    tools = TextTools([text_tool(f"{__name__}.reverse", {})], ToolWrapperArguments(0.1, 0.5, 2))
    wrapped = tools.around(lambda: make_environment("roll_math", {"dataset_name": questions}))
    call = "<tool_call>\n<function=reverse>\n<parameter=text>\n123\n</parameter>\n</function>\n</tool_call>"
    begin, _ = played(wrapped)[0]
    assert begin.startswith("What is") and "<tool_call>" in begin
    answer = f"\\boxed{{{2 * int(begin.split()[2])}}}"
    _, first, broken, last = played(wrapped, call, "<tool_call>{</tool_call>", answer)
    assert "321" in first[0] and first[1:4] == (0.1, False, False), "the tool's schema says that it is a text"
    assert "cannot be read" in broken[0] and "last use of a tool" in broken[0]
    assert broken[4]["metrics"] == {"tool_calls": 1.0, "failed_tool_calls": 1.0}
    assert last[1:4] == (1.5, True, False), "the environment's 1, and 0.5 for a success with a tool"
    assert played(wrapped, answer)[1][1] == 1.0, "without a tool there is nothing more"
    assert played(wrapped, call, call, call)[3][2], "a third call is the answer"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("So <code>print(1)</code>", "print(1)"),
        ("<code>print(1)", "print(1)"),
        ("<python>\nx = 2\n</python> then", "\nx = 2\n"),
        ("```python\nprint(3)\n```", "print(3)\n"),
        ("print(1)", None),
    ],
)
def test_programs_in_a_text(text: str, program: str | None) -> None:
    assert text_tool("python_code", {"timeout": 5, "sandbox_type": "none"}).find(text) == program


def test_searches_in_a_text() -> None:
    found = [{"document": {"contents": f"text {n}"}, "score": 1.0} for n in range(2)]
    with serving(lambda number, body: Answer({"result": [found[: body["topk"]]]})) as service:
        tool = text_tool("search", {"search_url": service.url, "topk": 2})
        query = tool.find("Let me see. <search> who was first </search>")
        result = asyncio.run(tool.call(query))
    assert service.bodies == [{"queries": ["who was first"], "topk": 2, "return_scores": True}]
    assert result.text == "<information>[1] text 0\n\n[2] text 1</information>" and not result.failed
    nowhere = asyncio.run(text_tool("search", {"search_url": "http://127.0.0.1:9/x", "timeout": 1}).call("x"))
    assert nowhere.failed and "the search failed" in nowhere.text


def test_tools_that_do_not_exist() -> None:
    with pytest.raises(ToolError, match="tool_args of search"):
        text_tool("search", {"url": "x"})
    with pytest.raises(ToolError, match="no_such_module"):
        text_tool("no_such_module.tool", {})


def test_no_call_of_a_thought_is_made(questions: str) -> None:
    tools = TextTools([text_tool(f"{__name__}.reverse", {})], ToolWrapperArguments())
    wrapped = tools.around(lambda: make_environment("roll_math", {"dataset_name": questions}))
    call = '<tool_call>{"name": "reverse", "arguments": {"text": "abc"}}</tool_call>'

    async def step(action: str, opened: str) -> Any:
        await wrapped.reset(3)  # type: ignore[misc]
        return await wrapped.step(action, opened=opened)  # type: ignore[misc, call-arg]

    for action, opened in ((f"hm {call}", "<think>"), (f"<think>hm {call}", ""), (f"hm {call}</think>7", "<think>")):
        assert "tool_calls" not in asyncio.run(step(action, opened))[4].get("metrics", {})
    assert "cba" in asyncio.run(step(f"hm</think>{call}", "<think>"))[0]
