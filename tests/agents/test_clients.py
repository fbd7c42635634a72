"""The endpoint with the clients that agents are written with, each as its users call it: OpenAI's and Anthropic's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from roll.agents.episode import Limits
from roll.rollout.groups import FinishedGroup
from tests.agents.playing import Recorded, assert_trained_as_sampled, byte_soup, opened
from tests.agents.templates import WRITTEN_HERE, Family, published

pytestmark = pytest.mark.long
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")


@contextlib.asynccontextmanager
async def clients(url: str, key: str) -> AsyncIterator[tuple[Any, Any]]:
    """OpenAI's client and Anthropic's."""
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
CHAT_TOOLS = [{"type": "function", "function": CALC}]
RESPONSES_TOOLS = [{"type": "function", **CALC}]
MESSAGES_TOOLS = [{"name": "calc", "description": "Calculate.", "input_schema": CALC["parameters"]}]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "1+1"}}\n</tool_call>'
CHATML = WRITTEN_HERE[0]
FAMILIES = [*WRITTEN_HERE, *published()]


def calls_then_answers(prompt: str) -> str:
    return "It is 2" if "result 2" in prompt else "<think>a tool</think>I calculate. " + CALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_chat_completions(stream: bool) -> None:
    engine = Recorded(CHATML.chat_template(), calls_then_answers)
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (client, _):
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
        while True:
            message, reason = await _chat(client, messages, stream)
            if reason != "tool_calls":
                break
            assert message["content"] == "I calculate."
            messages.append(message)
            for call in message["tool_calls"]:
                assert json.loads(call["function"]["arguments"]) == {"x": "1+1"}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "result 2"})
        assert message["content"] == "It is 2"
        conversations = session.model.conversations
        assert [call.parent for call in conversations.calls] == [None, 0]
        assert conversations.counts.foreign_responses == conversations.counts.breaks == 0
        assert engine.options[0]["stop"] == ("never",) and session.overridden == 2
    assert_trained_as_sampled(engine, conversations)


async def _chat(client: Any, messages: list[Any], stream: bool) -> tuple[dict[str, Any], str]:
    options = {"model": "gpt-4o", "messages": messages, "tools": CHAT_TOOLS, "temperature": 0.2, "stop": ["never"]}
    if not stream:
        answer = await client.chat.completions.create(**options, max_tokens=100)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        choice = answer.choices[0]
        return choice.message.model_dump(), choice.finish_reason
    async with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
        async for _ in events:
            pass
        final = await events.get_final_completion()
    assert final.usage is not None
    message = {"role": "assistant", "content": final.choices[0].message.content}
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.function.name, "arguments": one.function.arguments}}
        for one in final.choices[0].message.tool_calls or []
    ]
    return message | ({"tool_calls": calls} if calls else {}), final.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.asyncio
async def test_responses(stream: bool, stateful: bool) -> None:
    engine = Recorded(CHATML.chat_template(), calls_then_answers)
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (client, _):
        items: list[Any] = [{"role": "user", "content": "1+1"}]
        previous: dict[str, str] = {}
        while True:
            options = {"model": "x", "input": items, "tools": RESPONSES_TOOLS, "instructions": "Be brief.", **previous}
            if stream:
                async with client.responses.stream(**options) as events:
                    kinds = [event.type async for event in events]
                    answer = await events.get_final_response()
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            else:
                answer = await client.responses.create(**options)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "result 2"} for call in calls
            ]
            if stateful:
                items, previous = results, {"previous_response_id": answer.id}
            else:
                items += [*(item.model_dump(exclude_none=True) for item in answer.output), *results]
        assert answer.output_text == "It is 2" and answer.status == "completed"
        conversations = session.model.conversations
        assert [call.parent for call in conversations.calls] == [None, 0]
        assert conversations.counts.foreign_responses == conversations.counts.breaks == 0
    assert_trained_as_sampled(engine, conversations)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_messages(stream: bool) -> None:
    engine = Recorded(CHATML.chat_template(), calls_then_answers)
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (_, client):
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
        options: dict[str, Any] = {"model": "claude", "max_tokens": 100, "system": "Be brief.", "tools": MESSAGES_TOOLS}
        counted = await client.messages.count_tokens(
            model="claude", messages=messages, system="Be brief.", tools=MESSAGES_TOOLS
        )
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **options) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **options)
            if len(messages) == 1:
                assert answer.usage.input_tokens == counted.input_tokens
            if answer.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "result 2"}]}
                for block in answer.content
                if block.type == "tool_use" and block.input == {"x": "1+1"}
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        assert answer.content[0].text == "It is 2" and answer.stop_reason == "end_turn"
        conversations = session.model.conversations
        assert [call.parent for call in conversations.calls] == [None, 0]
        assert conversations.counts.foreign_responses == conversations.counts.breaks == 0
    assert_trained_as_sampled(engine, conversations)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.asyncio
async def test_byte_soup_through_every_interface(family: Family) -> None:
    """Whatever a library makes of byte soup, nothing sampled is tokenised again, and each id is trained once."""
    with_tools = family.tools and family.name not in ("mistral", "drops thoughts", "chatml")
    template = family.chat_template()
    for number, talk in enumerate((_talk_chat, _talk_responses, _talk_messages)):
        engine = Recorded(template, byte_soup(template, number, [CALL] if with_tools else None))
        async with opened(engine) as (endpoint, session):
            async with clients(endpoint.url, session.key) as (one, other):
                for _ in range(4):
                    await talk(other if talk is _talk_messages else one, with_tools)
            conversations = session.model.conversations
        assert_trained_as_sampled(engine, conversations)
        assert conversations.counts.foreign_responses == 0, talk.__name__
        assert len(conversations.calls) == 16
        assert conversations.counts.breaks == 0 and len(conversations.branches()) == 4


async def _talk_chat(client: Any, with_tools: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    tools = {"tools": CHAT_TOOLS} if with_tools else {}
    for turn in range(4):
        answer = await client.chat.completions.create(model="x", messages=messages, **tools)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": f"go on {turn}"})


async def _talk_responses(client: Any, with_tools: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "hello"}]
    tools = {"tools": RESPONSES_TOOLS} if with_tools else {}
    for turn in range(4):
        answer = await client.responses.create(model="x", input=items, **tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": one.call_id, "output": f"result {turn}"} for one in calls]
        if not calls:
            items.append({"role": "user", "content": f"go on {turn}"})


async def _talk_messages(client: Any, with_tools: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    tools = {"tools": MESSAGES_TOOLS} if with_tools else {}
    for turn in range(4):
        answer = await client.messages.create(model="x", max_tokens=50, messages=messages, **tools)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results: Any = [{"type": "tool_result", "tool_use_id": one.id, "content": f"result {turn}"} for one in calls]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results or f"go on {turn}"},
        ]


@pytest.mark.asyncio
async def test_errors_are_those_of_the_interfaces() -> None:
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
        with pytest.raises(openai.AuthenticationError):
            wrong = client.with_options(api_key=session.key[:-1] + "~")
            await wrong.chat.completions.create(model="x", messages=messages)
        endpoint.retire(session)
        with pytest.raises(openai.APIStatusError) as gone:
            await client.chat.completions.create(model="x", messages=messages)
        assert gone.value.status_code == 410
        with pytest.raises(anthropic.APIStatusError) as gone_too:
            await claude.messages.create(model="x", max_tokens=10, messages=messages)
        assert gone_too.value.status_code == 410


@pytest.mark.asyncio
async def test_a_hot_untrained_model_behind_the_clients() -> None:
    """A real engine at temperature 2, with thinking that the template drops: what it was asked and gave is what is
    trained, over all three interfaces at once."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from roll.strategies.engines.requests import GenerationRequest, SamplingParams
    from roll.strategies.hf_infer.engine import GenerationEngine
    from roll.strategies.hf_infer.strategy import create_decoder

    template = next(family for family in published() if family.name == "qwen3").chat_template()
    tokenizer = template._tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=4096, **sizes)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig()
    decoder = create_decoder(model, 4096)
    engine = GenerationEngine(decoder, tokenizer.decode, tuple(template.end_tokens), 4, 4096)
    recorded = Recorded(template, lambda _: "")

    async def sample(prompt_ids: list[int], max_new_tokens: int, options: Any) -> FinishedGroup:
        await asyncio.sleep(0)
        name = str(len(recorded.turns))
        params = SamplingParams(min(max_new_tokens, 24), temperature=2.0, seed=len(recorded.turns))
        engine.add_requests([GenerationRequest(name, prompt_ids, params)])
        while not (done := engine.step()):
            pass
        (output,) = done
        recorded.turns.append((list(prompt_ids), output.token_ids))
        return FinishedGroup.from_samples([output], [""])

    async with (
        opened(recorded, sample=sample) as (endpoint, session),
        clients(endpoint.url, session.key) as (one, other),
    ):
        talks = [_talk_chat(one, True), _talk_responses(one, True), _talk_messages(other, True)]
        await asyncio.gather(*talks, _talk_chat(one, True))
        conversations = session.model.conversations
    assert_trained_as_sampled(recorded, conversations)
    changed = sum(template.encode(template.decode(ids)) != ids for _, ids in recorded.turns)
    assert changed > 4, "a tokenizer would have made other ids of these responses"
    assert conversations.counts.breaks == conversations.counts.foreign_responses == 0


_WEATHER = {**CALC, "name": "weather"}
"""A second tool."""


def _opens_then_answers(prompt: str) -> str:
    """Behind the opening of a call its arguments; where the choice is left, a token of ``weather``; else a text."""
    head = prompt.rpartition("<|im_start|>assistant\n")[2]
    if head.endswith('"arguments":'):
        return ' {"x": "1+1"}}\n</tool_call>'
    return "weather" if head.startswith("<tool_call>") else "just a text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_a_demanded_call_is_made(stream: bool) -> None:
    """A named tool, any tool, none: through the clients, in all three interfaces; the conversation then goes on."""
    engine = Recorded(CHATML.chat_template(), _opens_then_answers)
    async with opened(engine) as (endpoint, session), clients(endpoint.url, session.key) as (one, other):
        for name, tools in (("calc", [CALC]), ("calc", [CALC, _WEATHER]), ("weather", [CALC, _WEATHER])):
            some = len(tools) == 1 or name == "weather"
            chat = await _demand_chat(one, tools, None if some else name, stream)
            responses = await _demand_responses(one, tools, None if some else name, stream)
            messages = await _demand_messages(other, tools, None if some else name, stream)
            assert chat == responses == messages == (name, {"x": "1+1"}), (name, some)
        conversations = session.model.conversations
        assert session.demanded == 9 and conversations.counts.breaks == conversations.counts.foreign_responses == 0
        assert sum(call.parent is not None for call in conversations.calls) == 9, "each conversation has gone on"
        with pytest.raises(openai.BadRequestError, match="offers no tools"):
            await one.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "hi"}], tool_choice="required"
            )
        with pytest.raises(anthropic.BadRequestError, match="'other' is not among"):
            await _demand_messages(other, [CALC], "other", False)
        session.tool_choice = "auto"
        answer = await one.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hi"}], tools=CHAT_TOOLS, tool_choice="required"
        )
        assert answer.choices[0].message.content == "just a text"


async def _demand_chat(client: Any, tools: list[Any], name: str | None, stream: bool) -> tuple[str, Any]:
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    offered = [{"type": "function", "function": one} for one in tools]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    options = {"model": "x", "messages": messages, "tools": offered}
    if stream:
        async with client.chat.completions.stream(**options, tool_choice=choice) as events:
            async for _ in events:
                pass
            choices = (await events.get_final_completion()).choices
    else:
        choices = (await client.chat.completions.create(**options, tool_choice=choice)).choices
    assert choices[0].finish_reason == "tool_calls"
    (call,) = choices[0].message.tool_calls
    made = [{"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": "{}"}}]
    made[0]["function"]["arguments"] = call.function.arguments  # type: ignore[index]
    messages += [{"role": "assistant", "tool_calls": made}, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    assert (await client.chat.completions.create(**options)).choices[0].message.content == "just a text"
    return call.function.name, json.loads(call.function.arguments)


async def _demand_responses(client: Any, tools: list[Any], name: str | None, stream: bool) -> tuple[str, Any]:
    choice = "required" if name is None else {"type": "function", "name": name}
    items: list[Any] = [{"role": "user", "content": "go"}]
    options = {"model": "x", "input": items, "tools": [{"type": "function", **one} for one in tools]}
    if stream:
        async with client.responses.stream(**options, tool_choice=choice) as events:
            async for _ in events:
                pass
            answer = await events.get_final_response()
    else:
        answer = await client.responses.create(**options, tool_choice=choice)
    (call,) = answer.output
    assert call.type == "function_call"
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    assert (await client.responses.create(**options)).output_text == "just a text"
    return call.name, json.loads(call.arguments)


async def _demand_messages(client: Any, tools: list[Any], name: str | None, stream: bool) -> tuple[str, Any]:
    choice = {"type": "any"} if name is None else {"type": "tool", "name": name}
    offered = [{"name": one["name"], "input_schema": one["parameters"]} for one in tools]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    options = {"model": "x", "max_tokens": 100, "messages": messages, "tools": offered}
    if stream:
        async with client.messages.stream(**options, tool_choice=choice) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**options, tool_choice=choice)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert (await client.messages.create(**options)).content[0].text == "just a text"
    return block.name, block.input
