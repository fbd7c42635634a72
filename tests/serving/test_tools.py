"""Tools and response formats of a served model, with OpenAI's own client; the tiny model has learnt one call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel

from tests.serving.conftest import Serving

TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\n' + tools | map(attribute='function.name') | join(' ') }}"
    "{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}{%- endfor -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("calc", "now")
]
LONG = "x" * 65_536


def of_schema(**inside: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", **inside}}}


ASKED: list[Any] = [{"role": "user", "content": "1+1?"}]
RESPONSE = 'So: <tool_call>\n{"name": "calc", "arguments": {"x": "1+1"}}\n</tool_call>'


@pytest.fixture(scope="module")
def calling(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the tiny model after it has learnt ``RESPONSE`` by heart."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(served_model)
    tokenizer.chat_template = TEMPLATE
    model: Any = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(ASKED, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    response = tokenizer.encode(RESPONSE + "<|im_end|>", add_special_tokens=False)
    ids = torch.tensor([[*prompt, *response]])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    folder = tmp_path_factory.mktemp("calling")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    serving = Serving(folder, 100)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def client(calling: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_call_and_the_conversation_that_answers_it(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, temperature=0)
    (choice,) = done.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So:")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "calc" and call.id.isalnum()
    assert json.loads(call.function.arguments) == {"x": "1+1"}
    answered = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    more = client.chat.completions.create(model="tiny", messages=answered, tools=TOOLS, max_tokens=3)
    assert more.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_streams_have_the_same_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "temperature": 0, "n": 2}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert final.usage is not None and whole.usage is not None and final.usage == whole.usage
    for one, other in zip(final.choices, whole.choices, strict=True):
        assert (one.index, one.finish_reason, one.message.content) == (other.index, "tool_calls", "So:")
        calls = [[call.function for call in choice.message.tool_calls or []] for choice in (one, other)]
        assert [(call.name, call.arguments) for call in calls[0]] == [(call.name, call.arguments) for call in calls[1]]


def test_whether_a_tool_is_called_is_the_requests_choice(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 70}
    done = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert (done.message.content, done.message.tool_calls, done.finish_reason) == (RESPONSE, None, "stop")
    for choice, names in (
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
        ("required", {"calc", "now"}),
    ):
        (call,) = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message.tool_calls or []
        assert call.function.name in names


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "must be a JSON schema"),
        ({"tools": [{"type": "web_search"}]}, "only tools of type function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "'b' is not among"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "goes without tools"),
        (of_schema(schema={"type": "b"}), "not a JSON schema that can be followed"),
        (of_schema(), "a name and a schema"),
        (of_schema(schema={"const": LONG}), "at most 65536 are read"),
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=4, **fields)


def test_a_response_of_a_schema(client: openai.OpenAI) -> None:
    """Of an untrained model, read by the client's own parser."""

    class City(BaseModel):
        name: Literal["Oslo", "Rome"]
        large: bool

    done = client.chat.completions.parse(
        model="tiny", messages=ASKED, max_tokens=40, seed=1, response_format=City, logprobs=True, top_logprobs=3
    )
    assert isinstance(done.choices[0].message.parsed, City)
    parts = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=4, seed=1, response_format={"type": "json_object"}, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts).startswith("{")


@pytest.mark.long
def test_a_template_without_tools(shared: Serving) -> None:
    refused = shared.post("chat/completions", messages=ASKED, tools=TOOLS)
    assert refused.status_code == 400
    assert "chat template does not write any" in refused.json()["error"]["message"]
