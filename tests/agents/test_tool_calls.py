"""Tool calls of seven formats: read right, damaged ones named, templates' own renderings read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll.agents.tool_calls import TOOL_FORMATS, ToolCall, detect_format, parse_response
from tests.agents.templates import MISTRAL, published

CALL = ToolCall("calc", {"x": "1+2", "n": 3})
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"x": "1+2", "n": 3}}\n</tool_call>',
    "qwen_xml": (
        "Let me see.\n<tool_call>\n<function=calc>\n<parameter=x>\n1+2\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm": (
        "Let me see.\n<tool_call>calc\n<arg_key>x</arg_key>\n<arg_value>1+2</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
    ),
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "calc", "arguments": {"x": "1+2", "n": 3}}]',
    "deepseek": (
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n"
        '{"x": "1+2", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "llama3": '{"name": "calc", "parameters": {"x": "1+2", "n": 3}}',
    "gpt_oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.calc "
        '<|constrain|>json<|message|>{"x": "1+2", "n": 3}'
    ),
}


def test_every_format_is_tested() -> None:
    assert set(WRITTEN) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_are_read(name: str) -> None:
    parsed = parse_response(WRITTEN[name], name)
    assert (parsed.calls, parsed.errors) == ([CALL], [])
    assert parsed.content == ("" if name in ("llama3", "gpt_oss") else "Let me see.")
    assert parsed.reasoning == ("hm" if name == "gpt_oss" else "")


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_text_without_calls_is_content(name: str) -> None:
    for text in ("just text", "", "{not json", "a < b > c"):
        parsed = parse_response(text, name)
        assert parsed.calls == []
        assert parsed.content == text or parsed.errors


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n{name: calc}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "calc", "arguments": {}}'),
        ("hermes", "<tool_call>[1, 2]</tool_call>"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": 3}</tool_call>'),
        ("qwen_xml", "<function=calc><parameter=x>1</parameter>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("mistral", "[TOOL_CALLS] calc"),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}}]'),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n{x}\n```<｜tool▁call▁end｜>"),
        ("llama3", '{"name": "calc", "parameters": {"x"'),
        ("gpt_oss", "<|channel|>commentary to=functions.calc<|message|>{x}"),
    ],
)
def test_damaged_calls_are_named(name: str, text: str) -> None:
    parsed = parse_response(text, name)
    assert parsed.calls == [] and len(parsed.errors) == 1


def test_several_calls() -> None:
    two = WRITTEN["hermes"] + '\n<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    assert [call.name for call in parse_response(two, "hermes").calls] == ["calc", "other"]
    assert [call.name for call in parse_response(WRITTEN["llama3"] + "; " + WRITTEN["llama3"], "llama3").calls] == [
        "calc"
    ] * 2
    named = '[TOOL_CALLS]calc{"x": "1+2", "n": 3}[TOOL_CALLS]other[ARGS]{}'
    assert [call.name for call in parse_response(named, "mistral").calls] == ["calc", "other"]
    short = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert parse_response(short, "deepseek").calls == [ToolCall("calc", {})]
    half = '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name"}</tool_call>'
    parsed = parse_response(half, "hermes")
    assert [call.name for call in parsed.calls] == ["a"] and len(parsed.errors) == 1


def test_thinking_is_set_apart() -> None:
    for text in ("<think>\n1 2\n</think>\n\nLeft", "1 2\n</think>\n\nLeft"):
        parsed = parse_response(text, "hermes")
        assert (parsed.reasoning, parsed.content) == ("1 2", "Left")
    assert parse_response("<think>cut", "hermes").content == ""


@pytest.mark.skipif(not published(), reason="trl, which packages published chat templates, is not installed")
def test_a_template_s_own_calls_are_read_back() -> None:
    expected = {
        "qwen2_5": "hermes",
        "qwen3": "hermes",
        "qwen3_instruct_2507": "hermes",
        "qwen3_5_think": "qwen_xml",
        "llama3_1": "llama3",
        "deepseekv3": "deepseek",
        "glm4moe": "glm",
        "gptoss": "gpt_oss",
    }
    assert detect_format(MISTRAL) == "mistral" or "[TOOL_CALLS]" not in MISTRAL
    for family in published():
        if family.name not in expected:
            continue
        tool_format = detect_format(family.template)
        assert tool_format == expected[family.name], family.name
        rendered = None
        for arguments in (CALL.arguments, json.dumps(CALL.arguments)):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "calc", "arguments": arguments}}],
            }
            tokenizer = family.tokenizer()
            try:
                rendered = tokenizer.apply_chat_template([{"role": "user", "content": "q"}, message], tokenize=False)
            except TypeError:
                continue
            break
        assert rendered is not None
        start = rendered.rindex("assistant" if tool_format in ("hermes", "llama3", "qwen_xml", "gpt_oss") else "q")
        response = rendered[start:].removeprefix("assistant").removeprefix("<|end_header_id|>").removeprefix("q")
        for end in family.ends:
            response = response.replace(end, "")
        assert parse_response(response, tool_format).calls == [CALL], (family.name, response)
