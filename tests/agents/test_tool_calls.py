"""Tool calls of nine formats: read right, damaged ones named, templates' own renderings read back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from roll.agents.tool_calls import TOOL_FORMATS, ToolCall, detect_format, parse_response
from tests.agents.templates import published

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
    "minimax": (
        'Let me see.\n<minimax:tool_call>\n<invoke name="calc">\n<parameter name="x">1+2</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi": (
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>"
        '{"x": "1+2", "n": 3}<|tool_call_end|><|tool_calls_section_end|>'
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


SCHEMA = {
    "type": "object",
    "$defs": {"Unit": {"enum": ["1", "2"]}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "table": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "unit": {"$ref": "#/$defs/Unit"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
ONE_CALL = '{"name": "calc", "arguments": {}}'
PAIR = "<arg_key>b</arg_key><arg_value>c</arg_value>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n{name: calc}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "calc", "arguments": {}}'),
        ("hermes", "<tool_call>[1, 2]</tool_call>"),
        # vLLM's parser reads neither.
        ("hermes", f"<tool_call>{ONE_CALL}\n{ONE_CALL}</tool_call>"),
        ("hermes", f"<tool_call>\n```json\n{ONE_CALL}\n```\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"x": NaN}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "calc", "arguments": {"x": -Infinity}}]'),
        ("hermes", '<tool_call>{"name": "calc", "arguments": 3}</tool_call>'),
        ("qwen_xml", "<function=calc><parameter=x>1</parameter>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="calc"><parameter name="x">1</parameter>'),
        ("kimi", '<|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>{"x": 1}'),
        ("mistral", "[TOOL_CALLS] calc"),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}}]'),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n{x}\n```<｜tool▁call▁end｜>"),
        ("llama3", '{"name": "write", "parameters": {"x"'),
        ("gpt_oss", "<|channel|>commentary to=functions.calc<|message|>{x}"),
        ("qwen_xml", "<function=write>\n<parameter=text>\na\n</function>"),
        ("qwen_xml", "<function=write>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n3\n</function>"),
        ("qwen_xml", "<function=write>\n<parameter=text>\na\n<parameter=count>\n3\n</parameter>\n</function>"),
        ("glm", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>"),
        ("glm", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>"),
        ("glm", f"<tool_call>write\n<arg_key>text</arg_key><arg_value>a{PAIR}</tool_call>"),
    ],
)
def test_damaged_calls_are_named(name: str, text: str) -> None:
    """And said: no argument is dropped for a missing mark."""
    parsed = parse_response(text, name, TOOLS)
    assert parsed.calls == [] and len(parsed.errors) == 1
    assert parsed.content == ("" if name == "gpt_oss" else text)


def test_several_calls() -> None:
    named = '[TOOL_CALLS]calc{"x": "1+2", "n": 3}[TOOL_CALLS]other[ARGS]{}'
    assert [call.name for call in parse_response(named, "mistral").calls] == ["calc", "other"]
    half = '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name"}</tool_call>'
    parsed = parse_response(half, "hermes")
    assert [call.name for call in parsed.calls] == ["a"] and len(parsed.errors) == 1
    assert parse_response("<tool_call>[]</tool_call>", "hermes").errors == ["a list of no tool calls"]


def test_formats_are_known_by_their_templates() -> None:
    expected = {"qwen3": "hermes", "qwen3_5_think": "qwen_xml", "llama3_1": "llama3", "deepseekv3": "deepseek"}
    expected |= {"glm4moe": "glm", "gptoss": "gpt_oss"}
    found = {family.name: detect_format(family.template) for family in published() if family.name in expected}
    assert found == (expected if published() else {})
    written = ("[TOOL_CALLS]", "{{ '<|tool_call_begin|>' }}", "<minimax:tool_call>", "nothing")
    assert [detect_format(one) for one in written] == ["mistral", "kimi", "minimax", "hermes"]


def _written(tool_format: str, **arguments: str) -> str:
    if tool_format == "glm":
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
        return f"<tool_call>write\n{pairs}</tool_call>"
    if tool_format == "minimax":
        pairs = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in arguments.items())
        return f'<minimax:tool_call>\n<invoke name="write">\n{pairs}</invoke>\n</minimax:tool_call>'
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function=write>\n{pairs}</function>\n</tool_call>"


@pytest.mark.parametrize("tool_format", ["qwen_xml", "glm", "minimax"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", '"quoted"', '"quoted"'),
        ("text", "null", "null"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "  def f():\n      pass", "  def f():\n      pass"),
        ("text", "", ""),
        ("unit", "1", "1"),
        ("count", "3", 3),
        ("count", "1,000", "1,000"),
        ("count", "true", "true"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("items", "[1, 2]", [1, 2]),
        ("items", "1,000", "1,000"),
        ("table", '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("either", "7", 7),
        ("either", '"7"', '"7"'),
        ("unknown", "1,000", "1,000"),
        ("unknown", "{1, 2}", "{1, 2}"),
        ("unknown", "('a',)", "('a',)"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "7", 7),
    ],
)
def test_arguments_are_typed_by_the_schema(tool_format: str, key: str, text: str, value: Any) -> None:
    parsed = parse_response(_written(tool_format, **{key: text}), tool_format, TOOLS)
    assert parsed.errors == [] and len(parsed.calls) == 1
    found = parsed.calls[0].arguments[key]
    assert found == value and type(found) is type(value)
    json.dumps(parsed.calls[0].arguments)


MARKS = {
    "qwen_xml": ["</parameter>", "</function>", "a </parameter>\n</function> b", "<tool_call> x", "</think>"],
    "minimax": ["</parameter>", "</invoke>", "a </parameter>\n</invoke> b", '<invoke name="x">', "</think>"],
    "glm": ["</tool_call>", "<tool_call>a</tool_call>", "</arg_value>", "</think>"],
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("tool_format", MARKS)
def test_marks_within_arguments_are_text(tool_format: str, tools: Any) -> None:
    for mark in MARKS[tool_format]:
        calls = _written(tool_format, text=f"x {mark} y", count="3"), _written(tool_format, text="z")
        parsed = parse_response(f"So:\n{calls[0]}\nand\n{calls[1]}\nDone.", tool_format, tools)
        arguments = {"text": f"x {mark} y", "count": 3}, {"text": "z"}
        assert (parsed.calls, parsed.errors) == ([ToolCall("write", one) for one in arguments], []), mark
        assert parsed.content.split() == ["So:", "and", "Done."] and parsed.reasoning == ""


@pytest.mark.parametrize(
    ("tool_format", "mark"),
    [
        ("qwen_xml", "a</parameter><parameter=x>b"),
        ("qwen_xml", "a\n</parameter>\n<parameter=other>\nb\n</parameter>\nc"),
        ("glm", "a</arg_value><arg_key>x</arg_key><arg_value>b"),
    ],
)
def test_an_argument_that_the_tool_does_not_have_begins_nothing(tool_format: str, mark: str) -> None:
    """The schema decides; where there is none, or it leaves names open, each mark begins an argument."""
    written = _written(tool_format, text=mark, count="3")
    assert parse_response(written, tool_format, TOOLS).calls == [ToolCall("write", {"text": mark, "count": 3})]
    opened = copy.deepcopy(TOOLS)
    for tool in opened:
        tool.get("function", tool)["parameters"]["additionalProperties"] = True
    for tools in (None, opened):
        (call,) = parse_response(written, tool_format, tools).calls
        assert len(call.arguments) == 3 and call.arguments["text"] == "a"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("You can call {CALL} if you want.", []),
        ("Use `{CALL}` to write.", []),
        ('He said "{CALL}".', []),
        ("Example:\n```json\n{CALL}\n```", []),
        ("I will do that.\n{CALL}", ["get"]),
        ("```json\n{CALL}\n```", ["get"]),
        ("{CALL}; {CALL}", ["get", "get"]),
        ("{CALL}\n{CALL}", ["get", "get"]),
        ("[{CALL}, {CALL}]", ["get", "get"]),
        ("So <|python_tag|>{CALL}", ["get"]),
    ],
)
def test_a_call_of_llama_that_is_quoted_is_none(text: str, names: list[str]) -> None:
    tools = [{"name": "get", "parameters": {"type": "object", "properties": {}}}]
    parsed = parse_response(text.replace("{CALL}", '{"name": "get", "parameters": {}}'), "llama3", tools)
    assert ([call.name for call in parsed.calls], parsed.errors) == (names, [])
