"""The endpoint with the clients that agents are written with, each as its users call it: OpenAI's and Anthropic's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from roll.agents.episode import Limits
from tests.agents.conftest import rows
from tests.agents.playing import Recorded, assert_trained_as_sampled, byte_soup, opened
from tests.agents.templates import WRITTEN_HERE, Family

# Imported by those who need them: every test process collects this file.
MISSING = [name for name in ("anthropic", "openai") if find_spec(name) is None]
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]


@contextlib.asynccontextmanager
async def clients(url: str, key: str) -> AsyncIterator[tuple[Any, Any]]:
    """OpenAI's client and Anthropic's."""
    import anthropic
    import openai

    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key=key) as other,
    ):
        yield one, other


CALC: dict[str, Any] = {
    "name": "calc",
    "description": "Calculate.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "1+1"}}\n</tool_call>'
CHATML = WRITTEN_HERE[0]
Calls = list[tuple[str, Any]]


class Chat:
    """A conversation through an interface, as its users have one: here OpenAI's chat completions."""

    def __init__(self, client: Any, tools: Sequence[Any] = (CALC,), said: str = "hello", **options: Any) -> None:
        self.client, self.ids, self.sent = client, [], [self.user(said)]
        self.options: dict[str, Any] = {"model": "x"} | options
        if tools:
            self.options["tools"] = [self.offered(one) for one in tools]

    @staticmethod
    def offered(tool: Any) -> Any:
        return {"type": "function", "function": tool}

    @staticmethod
    def choice(name: str | None) -> Any:
        return "required" if name is None else {"type": "function", "function": {"name": name}}

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    async def ask(self, stream: bool = False, **more: Any) -> tuple[str, Calls]:
        """The response's text and calls, which become part of the conversation."""
        options = {**self.options, **more, "messages": self.sent}
        if stream:
            usage = {"stream_options": {"include_usage": True}}
            async with self.client.chat.completions.stream(**options, **usage) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await self.client.chat.completions.create(**options, max_tokens=100)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        (choice,) = answer.choices
        made = choice.message.tool_calls or []
        assert not made or choice.finish_reason == "tool_calls"
        self.ids = [one.id for one in made]
        self.sent = [*self.sent, choice.message.model_dump(include={"role", "content", "tool_calls"})]
        return choice.message.content or "", [(one.function.name, json.loads(one.function.arguments)) for one in made]

    def tell(self, result: str) -> None:
        """Give every call the result; without calls, say it."""
        results = [{"role": "tool", "tool_call_id": identity, "content": result} for identity in self.ids]
        self.sent = [*self.sent, *(results or [self.user(result)])]


class Responses(Chat):
    """OpenAI's responses: every request has the whole conversation."""

    stateful = False

    @staticmethod
    def offered(tool: Any) -> Any:
        return {"type": "function", **tool}

    @staticmethod
    def choice(name: str | None) -> Any:
        return "required" if name is None else {"type": "function", "name": name}

    async def ask(self, stream: bool = False, **more: Any) -> tuple[str, Calls]:
        options = {**self.options, **more, "input": self.sent}
        if stream:
            async with self.client.responses.stream(**options) as events:
                kinds = [event.type async for event in events]
                answer = await events.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        else:
            answer = await self.client.responses.create(**options)
        assert answer.status in ("completed", "incomplete")
        made = [item for item in answer.output if item.type == "function_call"]
        self.ids = [one.call_id for one in made]
        if self.stateful:
            self.sent, self.options["previous_response_id"] = [], answer.id
        else:
            self.sent = [*self.sent, *(item.model_dump(exclude_none=True) for item in answer.output)]
        return answer.output_text, [(one.name, json.loads(one.arguments)) for one in made]

    def tell(self, result: str) -> None:
        results = [{"type": "function_call_output", "call_id": one, "output": result} for one in self.ids]
        self.sent = [*self.sent, *(results or [self.user(result)])]


class Stateful(Responses):
    """OpenAI's responses: a request names the response that it goes on from."""

    stateful = True


class Messages(Chat):
    """Anthropic's messages."""

    @staticmethod
    def offered(tool: Any) -> Any:
        return {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}

    @staticmethod
    def choice(name: str | None) -> Any:
        return {"type": "any"} if name is None else {"type": "tool", "name": name}

    def user(self, text: str) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    async def ask(self, stream: bool = False, **more: Any) -> tuple[str, Calls]:
        options = {**self.options, **more, "messages": self.sent}
        if stream:
            async with self.client.messages.stream(**options, max_tokens=100) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**options, max_tokens=100)
        made = [block for block in answer.content if block.type == "tool_use"]
        assert (answer.stop_reason == "tool_use") == bool(made)
        if len(self.sent) == 1 and not more:
            counted = await self.client.messages.count_tokens(**options)
            assert answer.usage.input_tokens == counted.input_tokens
        self.ids = [block.id for block in made]
        self.sent = [*self.sent, {"role": "assistant", "content": answer.content}]
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, [(block.name, block.input) for block in made]

    def tell(self, result: str) -> None:
        content = [{"type": "text", "text": result}]
        results = [{"type": "tool_result", "tool_use_id": one, "content": content} for one in self.ids]
        self.sent = [*self.sent, {"role": "user", "content": results} if results else self.user(result)]


INTERFACES = [Chat, Responses, Stateful, Messages]


def calls_then_answers(prompt: str) -> str:
    return "It is 2" if "result 2" in prompt else "<think>a tool</think>I calculate. " + CALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", INTERFACES)
@pytest.mark.asyncio
async def test_a_conversation_with_a_tool(kind: type[Chat], stream: bool) -> None:
    engine = Recorded(CHATML.chat_template(), calls_then_answers)
    system: dict[str, Any] = {Chat: {"temperature": 0.2, "stop": ["never"]}, Messages: {"system": "Be brief."}}.get(
        kind, {"instructions": "Be brief."}
    )
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (one, other):
        talk = kind(other if kind is Messages else one, said="1+1", **system)
        assert await talk.ask(stream) == ("I calculate.", [("calc", {"x": "1+1"})])
        talk.tell("result 2")
        assert await talk.ask(stream) == ("It is 2", [])
        conversations = session.model.conversations
        assert [call.parent for call in conversations.calls] == [None, 0]
        assert conversations.counts.foreign_responses == conversations.counts.breaks == 0
        assert kind is not Chat or (engine.options[0]["stop"] == ("never",) and session.overridden == 2)
        assert kind is Chat or "Be brief." in engine.template.decode(engine.turns[1][0])
    assert_trained_as_sampled(engine, conversations)


async def goes_on(talk: Chat) -> None:
    """Four turns, whatever is said in them."""
    for turn in range(4):
        await talk.ask()
        talk.tell(f"result {turn}")


@pytest.mark.parametrize("family", rows("qwen3", "deepseekv3", "gptoss"))
@pytest.mark.asyncio
async def test_byte_soup_through_every_interface(family: Family) -> None:
    """Whatever a library makes of byte soup, nothing sampled is tokenised again, and each id is trained once."""
    tools = [CALC] if family.tools and family.name not in ("mistral", "drops thoughts", "chatml") else []
    template = family.chat_template()
    for number, kind in enumerate((Chat, Responses, Messages)):
        engine = Recorded(template, byte_soup(template, number, [CALL] if tools else None))
        async with opened(engine) as (endpoint, session):
            async with clients(endpoint.url, session.key) as (one, other):
                for _ in range(4):
                    await goes_on(kind(other if kind is Messages else one, tools))
            conversations = session.model.conversations
        assert_trained_as_sampled(engine, conversations)
        assert conversations.counts.foreign_responses == 0, kind.__name__
        assert len(conversations.calls) == 16
        assert conversations.counts.breaks == 0 and len(conversations.branches()) == 4


@pytest.mark.asyncio
async def test_errors_are_those_of_the_interfaces() -> None:
    import anthropic
    import openai

    engine = Recorded(CHATML.chat_template(), lambda _: "hello")
    async with (
        opened(engine, Limits(turns=3, context=120), sampling="refuse") as (endpoint, session),
        clients(endpoint.url, session.key) as (client, claude),
    ):
        messages = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="x", messages=messages, temperature=0.1)
        with pytest.raises(openai.BadRequestError, match="n: is not available"):
            await client.chat.completions.create(model="x", messages=messages, n=2)
        long = [{"role": "user", "content": "hello " * 200}]
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(model="x", messages=long)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await claude.messages.create(model="x", max_tokens=10, messages=long)
        assert not session.done.is_set()
        await claude.messages.create(model="x", max_tokens=10, messages=messages)
        with pytest.raises(openai.PermissionDeniedError, match="turn_limit"):
            await client.chat.completions.create(model="x", messages=messages)
        with pytest.raises(anthropic.PermissionDeniedError, match="turn_limit"):
            await claude.messages.create(model="x", max_tokens=10, messages=messages)
        assert session.done.is_set()
        endpoint.retire(session)
        with pytest.raises(anthropic.APIStatusError) as gone:
            await claude.messages.create(model="x", max_tokens=10, messages=messages)
        assert gone.value.status_code == 410


WEATHER = {**CALC, "name": "weather"}


def opens_then_answers(prompt: str) -> str:
    """Behind the opening of a call its arguments; where the choice is left, a token of ``weather``; else a text."""
    head = prompt.rpartition("<|im_start|>assistant\n")[2]
    if head.endswith('"arguments":'):
        return ' {"x": "1+1"}}\n</tool_call>'
    return "weather" if head.startswith("<tool_call>") else "just a text"


@pytest.mark.asyncio
async def test_a_demanded_call_is_made() -> None:
    """A named tool, any tool, none: through the clients, in all three interfaces; the conversation then goes on."""
    import anthropic
    import openai

    engine = Recorded(CHATML.chat_template(), opens_then_answers)
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (one, other):
        for name, tools in (("calc", [CALC]), ("calc", [CALC, WEATHER]), ("weather", [CALC, WEATHER])):
            some = len(tools) == 1 or name == "weather"
            for kind in (Chat, Responses, Messages):
                talk = kind(other if kind is Messages else one, tools, "go")
                _, calls = await talk.ask(stream=some, tool_choice=kind.choice(None if some else name))
                assert calls == [(name, {"x": "1+1"})], (kind, name, some)
                talk.tell("2")
                assert await talk.ask() == ("just a text", [])
        conversations = session.model.conversations
        assert session.demanded == 9 and conversations.counts.breaks == conversations.counts.foreign_responses == 0
        assert sum(call.parent is not None for call in conversations.calls) == 9, "each conversation has gone on"
        with pytest.raises(openai.BadRequestError, match="offers no tools"):
            await Chat(one, ()).ask(tool_choice="required")
        with pytest.raises(anthropic.BadRequestError, match="'other' is not among"):
            await Messages(other).ask(tool_choice=Messages.choice("other"))
        session.tool_choice = "auto"
        assert await Chat(one).ask(tool_choice="required") == ("just a text", [])
