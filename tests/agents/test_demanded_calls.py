"""Calls that must be made: the ids that a response begins with, in every template's form, and which tool is called."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from roll.agents.chat_ids import TemplateError
from roll.agents.endpoint import Session
from roll.agents.episode import Limits, Model, Task
from roll.agents.tool_calls import call_opening, choose_opening, detect_format, parse_response
from roll.serving.dialects.chat import read_chat, read_responses
from roll.serving.dialects.messages import messages_body, read_messages
from roll.serving.http import BadRequest
from tests.agents.playing import Recorded
from tests.agents.templates import WRITTEN_HERE, Family, published
from tests.support.episodes import trained_ids

CHATML = WRITTEN_HERE[0]
HELLO = [{"role": "user", "content": "hello"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}


# Text of a policy behind an opening.
_REST = {
    "hermes": ' {"x": "1"}}\n</tool_call>',
    "qwen_xml": "<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": '{"x": "1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": ' {"x": "1"}}',
    "gpt_oss": '{"x": "1"}<|call|>',
}


@pytest.mark.parametrize("family", [*WRITTEN_HERE, *published()], ids=lambda family: family.name)
def test_a_response_that_goes_on_from_an_opening_is_a_call(family: Family) -> None:
    """With the ids of the opening in front, what a policy writes is read as the call; the opening is never trained."""
    template = family.chat_template([tool("calc")])
    tool_format = detect_format(template.source)
    engine = Recorded(template, lambda _: _REST[tool_format])
    model = Model(engine, template, tool_format, Limits(context=100_000))
    response = asyncio.run(model.chat(HELLO, must_call=["calc"]))
    (call,) = model.conversations.calls
    opening = template.decode(call.new_ids[-call.opening :])
    assert [(one.name, str(one.arguments["x"])) for one in response.parsed.calls] == [("calc", "1")]
    assert engine.turns[0][0] == template.prompt(HELLO) + template.encode(opening) == call.new_ids
    (branch,) = model.conversations.branches()
    assert trained_ids(branch) == engine.turns[0][1]
    # As the template writes such a call, thinking left out.
    made = {"id": "call00000", "type": "function", "function": response.message["tool_calls"][0]["function"]}
    text = template.render([*HELLO, {"role": "assistant", "content": "", "tool_calls": [made]}], False)
    if "calc" in text[len(template.render(HELLO)) :]:
        assert opening.removeprefix("\n</think>\n\n") in text


def test_several_tools_are_chosen_among_as_the_policy_would() -> None:
    """The token at which openings part has the policy's distribution restricted to the tokens that go on."""
    template = CHATML.chat_template()
    openings = [template.encode(call_opening(template, "hermes", HELLO, name)) for name in ("left", "right", "rest")]
    rng = random.Random(0)
    asked = Counter[int]()

    async def draw(ids: list[int]) -> int:
        """Half of the draws go on with no opening; of the others three in four go to the first tool."""
        asked[len(ids)] += 1
        here = sorted({one[len(ids)] for one in openings if one[: len(ids)] == ids})
        assert len(here) == 2
        return rng.choice([here[0], here[0], here[0], here[1], 0, 0, 0, 0])

    chosen = Counter(asyncio.run(_many(openings, draw, 2000)))
    shares = [chosen[index] / 2000 for index in range(3)]
    assert shares == pytest.approx([0.75, 0.25 * 0.25, 0.25 * 0.75], abs=0.04)
    assert len(asked) == 2, "shared ids are given, not drawn"


async def _many(openings: list[list[int]], draw: Any, count: int) -> list[int]:
    return [await choose_opening(openings, [], draw) for _ in range(count)]


def test_a_form_that_the_template_does_not_write_is_refused() -> None:
    template = published()[0].chat_template() if published() else CHATML.chat_template()
    with pytest.raises(TemplateError, match="mistral"):
        call_opening(template, "mistral", HELLO, "calc")
    assert parse_response(json.dumps({"name": "calc"}), "hermes").calls == []


@pytest.mark.parametrize("written", [" not json", ""])
def test_arguments_that_cannot_be_read_go_to_and_fro(written: str) -> None:
    """They are a call all the same. Anthropic's inputs are objects: what is none is wrapped, and recognised when the
    client sends it back."""
    engine = Recorded(CHATML.chat_template(), lambda _: written)
    tools = [{"name": "calc", "input_schema": {"type": "object"}}]
    body = {"model": "x", "max_tokens": 50, "messages": HELLO, "tools": tools, "tool_choice": {"type": "any"}}

    async def talk() -> tuple[Any, Session]:
        model = Model(engine, engine.template, "hermes", Limits(context=100_000))
        session = Session(Task("t", 0), model)
        request = read_messages(body)
        content = messages_body(await session.answer(request), request)["content"]
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "no"}
        goes_on = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await session.answer(read_messages(body | {"messages": goes_on, "tool_choice": {"type": "auto"}}))
        return content, session

    (block,), session = asyncio.run(talk())
    assert block["input"] == ({"INVALID_JSON": "not json"} if written else {})
    first, second = session.model.conversations.calls
    assert (first.parent, second.parent) == (None, 0)
    made = {"name": "calc", "arguments": written.strip() or {}}
    assert (first.message["tool_calls"][0]["function"], first.message["content"]) == (made, "")


@pytest.mark.parametrize(
    "family",
    [one for one in published() if one.chat_template([]).render(HELLO).rstrip().endswith("<think>")],
    ids=lambda family: family.name,
)
def test_no_call_of_a_thought_that_was_cut_is_made(family: Family) -> None:
    """Where the generation prompt opens the thought, a response that the length cuts is thought to its end."""
    template = family.chat_template([tool("calc")])
    tool_format = detect_format(template.source)
    opening = call_opening(template, tool_format, HELLO, "calc").partition("</think>")[2]
    written = f"I could write {opening}{_REST[tool_format]} or"
    engine = Recorded(template, lambda _: (template.encode(written), "length"))
    response = asyncio.run(Model(engine, template, tool_format, Limits(context=100_000)).chat(HELLO))
    assert response.parsed.calls == [] and "tool_calls" not in response.message
    assert (response.parsed.reasoning, response.parsed.content) == (written, "")


def test_one_call_at_a_time_is_refused_not_ignored() -> None:
    """The policy is trained on what it said: a second call cannot be left out of its conversation."""
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
    chat: dict[str, Any] = {"messages": HELLO, "tools": tools}
    assert read_chat({**chat, "parallel_tool_calls": True}).tools
    with pytest.raises(BadRequest, match="parallel_tool_calls"):
        read_chat({**chat, "parallel_tool_calls": False})
    with pytest.raises(BadRequest, match="parallel_tool_calls"):
        read_responses({"input": "Hi", "parallel_tool_calls": False}, {})
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "calc", "input_schema": {}}]}
    assert read_messages({**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}).tools
    with pytest.raises(BadRequest, match="disable_parallel_tool_use"):
        read_messages({**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
