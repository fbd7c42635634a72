"""The cases of docs/design/response-parsers.md, in which vLLM's parsers differ by family: ours is right in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from roll.agents.tool_calls import parse_response

DOC = '"""Doc."""\ndef f():\n    return \'x\'\n'
PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "items": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("write", "read")
]
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Family:
    """A format, as a model writes it."""

    name: str  # of the parser
    form: str  # a call: name and arguments as JSON; where strings are written without quotes, name and pairs
    end: str  # text with which a call ends, or that begins another
    pair: str = ""  # an argument that is written without quotes
    closing: str = ""  # end of a call, which the length may cut; empty: the arguments end it
    thought: tuple[str, str] | None = ("<think>", "</think>")

    def call(self, name: str, arguments: dict[str, Any] | str) -> str:
        """A call; a text of arguments is written as it is."""
        if self.pair:
            pairs = arguments if isinstance(arguments, dict) else {}
            texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in pairs.items()}
            written = "".join(self.pair.format(key, text) for key, text in texts.items())
        else:
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return self.form.replace("NAME", name).replace("ARGUMENTS", written)

    def bad(self, key: str, text: str) -> str:
        """A call whose argument is ``text``, which is no JSON."""
        return self.call("write", {key: text} if self.pair else f'{{"{key}": {text}}}')


_QWEN = "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>"
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = "<｜tool▁call▁end｜>"
_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
_HARMONY = "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"
_LIST = '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS}]'
_M = ("[THINK]", "[/THINK]")
_XML_END = "</parameter>\n</function>\n</tool_call>"
_ARGUMENT = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
_GLM = "<tool_call>NAME\nARGUMENTS</tool_call>"
_LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
_CODER = Family("qwen_xml", _QWEN, _XML_END, "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>")
FAMILIES = {
    "hermes": Family("hermes", _HERMES, "</tool_call>", closing="\n</tool_call>"),
    "qwen3_coder": _CODER,
    "glm": Family("glm", _GLM, "</arg_value>\n</tool_call>", _ARGUMENT, "</tool_call>"),
    "llama3_json": Family("llama3", _LLAMA, "}}; ", thought=None),
    "mistral": Family("mistral", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "[TOOL_CALLS]", thought=_M),
    "mistral v3": Family("mistral", _LIST, "]", thought=_M),
    "gpt-oss": Family("gpt_oss", _HARMONY, "<|call|", thought=_ANALYSIS),
    "deepseek_v3": Family("deepseek", _BEGIN + _V3 + _END, _DEEPSEEK, closing=_DEEPSEEK + _END),
    "deepseek_v31": Family("deepseek", _BEGIN + _V31 + _END, _DEEPSEEK, closing=_DEEPSEEK + _END),
}


@dataclass(frozen=True)
class Case:
    """A response in every format, and what it is to be read as."""

    title: str
    response: Callable[[Family], str | None]  # None: the format cannot have it
    calls: Callable[[Family], Calls]
    content: str | None = None  # without quotes; `END` is the end mark of a thought. None: it is not looked at.


def _said(family: Family, text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>" if family.name == "gpt_oss" else text


def _two(family: Family) -> str:
    first, second = family.call("write", {"text": "a"}), family.call("read", {"count": 1})
    if family.form == _LIST:
        return first[:-1] + ", " + second.removeprefix("[TOOL_CALLS] [")
    return first + {"llama3": "; ", "gpt_oss": "", "mistral": ""}.get(family.name, "\n") + second


def _listed(family: Family) -> str:
    calls = family.call("write", {"text": "a"}), family.call("read", {"count": 1})
    bodies = [call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for call in calls]
    return f"<tool_call>\n[{', '.join(bodies)}]\n</tool_call>"


def _same(**arguments: Any) -> Callable[[Family], Calls]:
    return lambda _: [("write", arguments)]


def _text_or_nothing(key: str, text: str) -> Callable[[Family], Calls]:
    return lambda family: [("write", {key: text})] if family.pair else []


def _nothing(_: Family) -> Calls:
    return []


def _thought(family: Family, *parts: str) -> str | None:
    return family.thought and family.thought[0] + family.thought[1].join(parts)


CASES = [
    Case(
        "end mark within a string",
        lambda one: one.call("write", {"text": f"a {one.end} b", "count": 3}),
        lambda one: [("write", {"text": f"a {one.end} b", "count": 3})],
    ),
    Case(
        "`</think>` within a string",
        lambda one: one.call("write", {"text": "a </think> b"}),
        _same(text="a </think> b"),
    ),
    Case("string that looks like a number", lambda one: one.call("write", {"text": "90210"}), _same(text="90210")),
    Case("docstring quotes in a string", lambda one: one.call("write", {"text": DOC}), _same(text=DOC)),
    Case("integer `1,000`", lambda one: one.bad("count", "1,000"), _text_or_nothing("count", "1,000")),
    Case("array `{1, 2}`", lambda one: one.bad("items", "{1, 2}"), _text_or_nothing("items", "{1, 2}")),
    Case(
        "line end within a JSON string",
        lambda one: one.call("write", {"text": "a\nb"} if one.pair else '{"text": "a\nb"}'),
        _text_or_nothing("text", "a\nb"),
    ),
    Case("no arguments", lambda one: one.call("write", {}), _same()),
    Case("arguments `null`", lambda one: one.call("write", "null"), _same()),
    Case(
        "arguments left empty",
        lambda one: (
            one.call("write", "")
            if one.pair or (one.name in ("gpt_oss", "deepseek", "mistral") and one.form != _LIST)
            else None
        ),
        _same(),
    ),
    Case(
        "JSON as the final answer",
        lambda one: _said(one, '{"name": "Ada", "parameters": {"age": 3}}'),
        _nothing,
        "{name: Ada, parameters: {age: 3}}",
    ),
    Case("unknown tool", lambda one: one.call("nothere", {"text": "a"}), lambda one: [("nothere", {"text": "a"})]),
    Case(
        "call that the length cut",
        lambda one: one.call("write", {"count": 3, "text": "abc"}).partition("bc")[0],
        _nothing,
    ),
    Case(
        "complete arguments, end mark cut",
        lambda one: one.call("write", {"text": "a"}).removesuffix(one.closing) if one.closing else None,
        _nothing,
    ),
    Case("two calls", _two, lambda one: [("write", {"text": "a"}), ("read", {"count": 1})]),
    Case(
        "text around a call",
        lambda one: _said(one, "So:\n") + one.call("write", {"text": "a"}) + _said(one, "\nDone."),
        _same(text="a"),
        "So: Done.",
    ),
    Case(
        "CR LF as line ends",
        lambda one: one.call("write", {"text": "a", "count": 3}).replace("\n", "\r\n"),
        _same(text="a", count=3),
    ),
    Case(
        "list of calls between the marks",
        lambda one: _listed(one) if one.form == _HERMES else None,
        lambda one: [("write", {"text": "a"}), ("read", {"count": 1})],
    ),
    Case(
        "call quoted within a line",
        lambda one: f"Write {one.call('write', {'text': 'a'})} to call it." if one.name == "llama3" else None,
        _nothing,
        "Write {name: write, parameters: {text: a}} to call it.",
    ),
    Case(
        "thought that the length cut, with a call",
        lambda one: _thought(one, f"hm {one.call('write', {'text': 'a'})} hm") if one.name != "gpt_oss" else None,
        _nothing,
        "",
    ),
    Case(
        "call after a thought", lambda one: _thought(one, "hm", one.call("write", {"text": "a"})), _same(text="a"), ""
    ),
    Case(
        "second end mark after a thought",
        lambda one: _thought(one, "hm", "So ", " Done.") if one.name != "gpt_oss" else None,
        _nothing,
        "So END Done.",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_our_reader_is_right(case: Case) -> None:
    for name, family in FAMILIES.items():
        response = case.response(family)
        # A JSON text that names no tool is an answer for Llama 3, whose calls have no mark.
        if response is None or (case.title, name) == ("unknown tool", "llama3_json"):
            continue
        parsed = parse_response(response.removesuffix("<|call|>"), family.name, TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == case.calls(family), (name, response)
        if case.content is not None:
            said = " ".join(parsed.content.replace('"', "").split())
            assert said == case.content.replace("END", family.thought[1] if family.thought else ""), (name, response)
