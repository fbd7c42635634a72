"""Our reader of responses against vLLM's parsers, case by case; writes the page of the decisions.

``python -m tests.agents.parser_table > docs/design/response-parsers.md``
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.agents.tool_calls import parse_response
from tests.agents.tiny import make_tokenizer

DOC = '"""Doc."""\ndef f():\n    return \'x\'\n'
PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "items": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("write", "read")
]
MARKS = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
)
Calls = list[tuple[str, Any]]
Reader = Callable[["Family", str], tuple[Calls, str]]


@dataclass(frozen=True)
class Family:
    """A format, and who reads it."""

    name: str  # of our parser
    form: str  # a call: name and arguments as JSON; where strings are written without quotes, name and pairs
    end: str  # text with which a call ends, or that begins another
    tool_parser: str  # name of vLLM's parser
    reasoning_parser: str | None = None
    pair: str = ""  # an argument that is written without quotes
    marks: tuple[str, ...] = ()
    closing: str = ""  # end of a call, which the length may cut; empty: the arguments end it
    thought: tuple[str, str] = ("<think>", "</think>")

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
FAMILIES = {
    "hermes": Family("hermes", _HERMES, "</tool_call>", "hermes", "qwen3", closing="\n</tool_call>"),
    "qwen3_coder": Family(
        *("qwen_xml", _QWEN, _XML_END, "qwen3_coder", "qwen3", "<parameter={}>\n{}\n</parameter>\n"),
        closing="</function>\n</tool_call>",
    ),
    "glm": Family(
        *("glm", "<tool_call>NAME\nARGUMENTS</tool_call>", "</arg_value>\n</tool_call>", "glm45", "glm45"),
        *("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",),
        closing="</tool_call>",
    ),
    "llama3_json": Family("llama3", '{"name": "NAME", "parameters": ARGUMENTS}', "}}; ", "llama3_json"),
    "mistral": Family(
        *("mistral", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "[TOOL_CALLS]", "mistral", "mistral"),
        marks=("[ARGS]",),
        thought=_M,
    ),
    "mistral v3": Family("mistral", _LIST, "]", "mistral", "mistral", thought=_M),
    "gpt-oss": Family("gpt_oss", _HARMONY, "<|call|", "", thought=("<|channel|>analysis<|message|>", "<|end|>")),
    "deepseek_v3": Family(
        "deepseek", _BEGIN + _V3 + _END, _DEEPSEEK, "deepseek_v3", "deepseek_r1", closing=_DEEPSEEK + _END
    ),
    "deepseek_v31": Family(
        "deepseek", _BEGIN + _V31 + _END, _DEEPSEEK, "deepseek_v31", "deepseek_r1", closing=_DEEPSEEK + _END
    ),
}


@dataclass(frozen=True)
class Case:
    """A response in every format, and what it is to be read as."""

    title: str
    response: Callable[[Family], str | None]  # None: the format cannot have it
    calls: Callable[[Family], Calls]
    decision: str
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
    begin, end = family.thought
    return None if family.reasoning_parser is None and family.name != "gpt_oss" else begin + end.join(parts)


CASES = [
    Case(
        "end mark within a string",
        lambda one: one.call("write", {"text": f"a {one.end} b", "count": 3}),
        lambda one: [("write", {"text": f"a {one.end} b", "count": 3})],
        "ours: a program that is written to a file may hold any mark, and half of it would be written. JSON is decoded"
        " to its own end; without quotes, the last end mark in front of the next argument counts",
    ),
    Case(
        "`</think>` within a string",
        lambda one: one.call("write", {"text": "a </think> b"}),
        _same(text="a </think> b"),
        "ours: a mark in an argument ends no thought and is no token to be dropped",
    ),
    Case(
        "string that looks like a number",
        lambda one: one.call("write", {"text": "90210"}),
        _same(text="90210"),
        "both: the schema says string",
    ),
    Case(
        "docstring quotes in a string",
        lambda one: one.call("write", {"text": DOC}),
        _same(text=DOC),
        "both: a string is the text as it is written",
    ),
    Case(
        "integer `1,000`",
        lambda one: one.bad("count", "1,000"),
        _text_or_nothing("count", "1,000"),
        "ours: without quotes the text, which the tool refuses by its schema (no tuple, no 1); within JSON an error"
        " that names the fault, never arguments that are no JSON",
    ),
    Case(
        "array `{1, 2}`", lambda one: one.bad("items", "{1, 2}"), _text_or_nothing("items", "{1, 2}"), "ours: as above"
    ),
    Case(
        "line end within a JSON string",
        lambda one: one.call("write", {"text": "a\nb"} if one.pair else '{"text": "a\nb"}'),
        _text_or_nothing("text", "a\nb"),
        "ours: JSON forbids it, servers refuse it or pass it on as it is; a policy that is refused learns to escape",
    ),
    Case("no arguments", lambda one: one.call("write", {}), _same(), "both"),
    Case(
        "arguments `null`",
        lambda one: one.call("write", "null"),
        _same(),
        "ours: a tool without parameters is called as templates of some families write it; `null` cannot be passed on",
    ),
    Case(
        "arguments left empty",
        lambda one: (
            one.call("write", "")
            if one.pair or (one.name in ("gpt_oss", "deepseek", "mistral") and one.form != _LIST)
            else None
        ),
        _same(),
        "ours: as above (for Mistral we took theirs)",
    ),
    Case(
        "JSON as the final answer",
        lambda one: _said(one, '{"name": "Ada", "parameters": {"age": 3}}'),
        _nothing,
        "ours: JSON that names no offered tool is an answer",
        "{name: Ada, parameters: {age: 3}}",
    ),
    Case(
        "unknown tool",
        lambda one: one.call("nothere", {"text": "a"}),
        lambda one: [("nothere", {"text": "a"})],
        "ours: the call is read, and answered with the names that there are. llama3_json keeps it as an answer: without"
        " a mark it cannot be told from JSON",
    ),
    Case(
        "call that the length cut",
        lambda one: one.call("write", {"count": 3, "text": "abc"}).partition("bc")[0],
        _nothing,
        "ours: half a call is an error, not a call with what is left of its arguments",
    ),
    Case(
        "complete arguments, end mark cut",
        lambda one: one.call("write", {"text": "a"}).removesuffix(one.closing) if one.closing else None,
        _nothing,
        "ours: of a call without its end nobody knows whether the model was done with it",
    ),
    Case(
        "two calls",
        _two,
        lambda one: [("write", {"text": "a"}), ("read", {"count": 1})],
        "both",
    ),
    Case(
        "text around a call",
        lambda one: _said(one, "So:\n") + one.call("write", {"text": "a"}) + _said(one, "\nDone."),
        _same(text="a"),
        "ours: what follows a call was said too (for Llama and Mistral, calls within text are theirs)",
        "So: Done.",
    ),
    Case(
        "CR LF as line ends",
        lambda one: one.call("write", {"text": "a", "count": 3}).replace("\n", "\r\n"),
        _same(text="a", count=3),
        "ours: a line end that the format writes around an argument is no part of it, whichever it is",
    ),
    Case(
        "list of calls between the marks",
        lambda one: _listed(one) if one.form == _HERMES else None,
        lambda one: [("write", {"text": "a"}), ("read", {"count": 1})],
        "ours: every item is a call by itself, as SGLang's parser says too; vLLM's reads none of them",
    ),
    Case(
        "call quoted within a line",
        lambda one: f"Write {one.call('write', {'text': 'a'})} to call it." if one.name == "llama3" else None,
        _nothing,
        "ours: the form has no marks, and what shares a line with other words explains a call",
        "Write {name: write, parameters: {text: a}} to call it.",
    ),
    Case(
        "thought that the length cut, with a call",
        lambda one: _thought(one, f"hm {one.call('write', {'text': 'a'})} hm") if one.name != "gpt_oss" else None,
        _nothing,
        "ours: what is thought is not done. Parsers of Qwen and GLM let a call end the thought, which makes calls that"
        " a model only weighs",
        "",
    ),
    Case(
        "call after a thought",
        lambda one: _thought(one, "hm", one.call("write", {"text": "a"})),
        _same(text="a"),
        "both",
        "",
    ),
    Case(
        "second end mark after a thought",
        lambda one: _thought(one, "hm", "So ", " Done.") if one.name != "gpt_oss" else None,
        _nothing,
        "the first one ends the thought for both. We leave the second in the answer, as `deepseek_r1` does, where the"
        " engines of Qwen, GLM and Mistral drop it: it is what the policy said",
        "So END Done.",
    ),
]


def ours(family: Family, response: str) -> tuple[Calls, str]:
    text = response.removesuffix("<|call|>")
    parsed = parse_response(text, family.name, TOOLS)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.content


def theirs(family: Family, response: str) -> tuple[Calls, str]:
    """What vLLM reads; openai-harmony in the place of its parser for gpt-oss, which is built on it."""
    if family.name == "gpt_oss":
        return _harmony(response)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "q"}], model="m", tools=TOOLS, tool_choice="auto"
    )
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*MARKS, *family.marks]})
    content: str | None = response
    if response.startswith(family.thought[0]):
        reasoning = ReasoningParserManager.get_reasoning_parser(family.reasoning_parser)(tokenizer)
        content = reasoning.extract_reasoning(response, request)[1]
    found = ToolParserManager.get_tool_parser(family.tool_parser)(tokenizer, request.tools).extract_tool_calls(
        content or "", request
    )
    return [(one.function.name, _value(one.function.arguments)) for one in found.tool_calls], found.content or ""


def _harmony(response: str) -> tuple[Calls, str]:
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    tokens = encoding.encode(response.removeprefix("<|start|>assistant"), allowed_special="all")
    calls: Calls = []
    said = []
    for message in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient is not None:
            calls.append((message.recipient.removeprefix("functions."), _value(text)))
        elif message.channel != "analysis":
            said.append(text)
    return calls, "".join(said)


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return f"no JSON: {arguments}"


def verdict(case: Case, family: Family, readers: Sequence[Reader] = (ours, theirs)) -> str:
    """Who reads the case right: ``both``, ``ours``, ``theirs`` or ``neither``; a dash where there is no such case."""
    response = case.response(family)
    if response is None:
        return "–"
    right = []
    for read in readers:
        calls, content = read(family, response)
        said = " ".join(content.replace('"', "").split())
        is_said = case.content is None or said == case.content.replace("END", family.thought[1])
        right.append(calls == case.calls(family) and is_said)
    return {(True, True): "both", (True, False): "ours", (False, True): "theirs"}.get((right[0], right[-1]), "neither")


HEAD = """# Response parsers

**Decision.** Thought, answer and tool calls of a response are read by one reader of our own: `split_thought`
(`roll/rewards/thoughts.py`) for rewards, votes, judges, code rewards and agents alike, and on top of it
`parse_response` (`roll/agents/tool_calls.py`) for calls.

**Why not vLLM's.** Its parsers are a part of a server: there is no vLLM in a CPU run, and they differ by family in what
they do with the same fault. They are the yardstick all the same, since a trained model is served with them. A thought
ends at its first end mark because all of their reasoning parsers say so.

The table has the cases that only vLLM {version} (openai-harmony for gpt-oss) or only we read right.
`python -m tests.agents.parser_table > docs/design/response-parsers.md` makes this page;
`tests/agents/test_response_parsers.py` fails when it differs.
"""
TAIL = """**Cost.** Formats are added by hand. `tests/agents/test_call_properties.py` renders arbitrary calls by chat
templates as they are published, and reads them back.

**Revisit when** vLLM's parsers come as a package without the engine, or one of them is right in a column where we are
not.
"""


def page() -> str:
    """The page as Markdown."""
    import vllm

    logging.disable(logging.CRITICAL)
    rows = ["| case | only ours | only vLLM's | kept, and why |", "|---|---|---|---|"]
    for case in CASES:
        found = {name: verdict(case, family) for name, family in FAMILIES.items()}
        ours_only, theirs_only = (
            ", ".join(name for name, word in found.items() if word == wanted) for wanted in ("ours", "theirs")
        )
        if ours_only or theirs_only:
            rows.append(f"| {case.title} | {ours_only} | {theirs_only} | {case.decision} |")
    logging.disable(logging.NOTSET)
    return "\n".join([HEAD.format(version=vllm.__version__), *rows, "", TAIL])


if __name__ == "__main__":
    sys.stdout.write(page())
