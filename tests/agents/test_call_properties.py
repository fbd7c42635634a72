"""Arbitrary calls, rendered by published chat templates, are read back equal, whatever their strings hold."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll.agents.call_formats import ToolCall
from roll.agents.chat_ids import ChatTemplate
from roll.agents.tool_calls import detect_format, parse_response
from tests.agents.templates import Family, published

FAMILIES = {family.name: family for family in published() if family.name not in ("llama3", "deepseek_r1_distill")}
SAME = ("qwen2_5", "qwen3_instruct_2507")
"""Their calls are those of qwen3."""
MARKS = (
    *("<think>", "</think>", "[/THINK]", "<tool_call>", "</tool_call>", "</function>", "</parameter>", "<function=f>"),
    *("<parameter=a>", "</arg_value>", "<arg_key>", "[TOOL_CALLS]", "<|end|>", "<|call|>", "<|im_end|>", "<|eot_id|>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>", "<|channel|>analysis<|message|>"),
    *("<|python_tag|>", "\n", "\n\n", " ", "{", "}", "};", '"', "\\", "'", "```", "\n```json\n", "null", "True"),
    *("1,000", "é", "☃", "\x7f"),
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(MARKS), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=5
)
JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS.map("".join),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS.map("".join), inner, max_size=3)),
    max_leaves=6,
)
# No argument is called as the one that a mark mentions: without quotes, the two cannot be told apart.
ARGUMENTS = st.dictionaries(st.from_regex(r"[b-z_][a-zA-Z0-9_.-]{0,8}", fullmatch=True), JSON_VALUES, max_size=4)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {key: KINDS.get(type(value), "null") for key, value in arguments.items()}
    return {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}


def tools_of(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": one.name, "description": "d", "parameters": schema_of(one.arguments)}}
        for one in calls
    ]


@cache
def template_of(name: str) -> ChatTemplate:
    return FAMILIES[name].chat_template()


def rendered(family: Family, calls: list[ToolCall]) -> str:
    """What the template writes for a response that makes the calls, without the end of the turn."""
    question = [{"role": "user", "content": "q"}]
    functions = [{"name": one.name, "arguments": one.arguments} for one in calls]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call{number:05d}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ],
    }
    template = template_of(family.name)
    text = template.render([*question, message], False).removeprefix(template.render(question, False)).rstrip()
    for end in family.ends:
        text = text.removesuffix(end)
    return text


@pytest.mark.long_rows("deepseekv3", "glm4moe", "gptoss", "qwen3_5_think")
@pytest.mark.skipif(not FAMILIES, reason="trl, which packages published chat templates, is not installed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name in SAME else []) for name in sorted(FAMILIES)]
)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_calls_are_read_back(name: str, arguments: list[dict[str, Any]]) -> None:
    family = FAMILIES[name]
    calls = [ToolCall(f"tool_{number}", one) for number, one in enumerate(arguments)]
    if not family.two_tools or name == "gptoss":  # one call a turn
        calls = calls[:1]
    tool_format = detect_format(family.template)
    text = rendered(family, calls)
    parsed = parse_response(text, tool_format, tools_of(calls))
    assert (parsed.errors, parsed.calls) == ([], calls), text
    assert [json.dumps(one.arguments) for one in parsed.calls] == [json.dumps(one.arguments) for one in calls]
    if tool_format != "gpt_oss":
        # No mark in an argument ends the thought in front of the calls, or begins another; some templates write one.
        again = parse_response(f"<think>hm</think>{text}", tool_format, tools_of(calls))
        assert (again.reasoning.strip(), again.calls) == ("hm", calls)
