"""Tool calls in sampled responses: parsed in the formats that model families write.

What is trained are the sampled ids; what is parsed here only decides what an agent sees of them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.tool_arguments import parameters_of, typed_value
from roll.rewards.thoughts import HARMONY, THOUGHT_BEGIN, split_thought


@dataclass(frozen=True)
class ToolCall:
    """A function and its arguments as the model wrote them."""

    name: str
    arguments: dict[str, Any]


@dataclass
class ParsedResponse:
    """A response as an agent sees it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Reasons why calls that were begun cannot be parsed; their text stays in ``content``."""


class _BadCall(ValueError):
    """A call that cannot be read."""


_Schemas = Mapping[str, Mapping[str, Any]]
"""Tool to the JSON schema of its arguments."""
_Found = Iterator[tuple[int, int, Callable[[], list[ToolCall]]]]
"""Begin and end of calls in a text, and a function that parses them or raises ``_BadCall``."""


def parse_response(
    text: str, tool_format: str, tools: Sequence[Mapping[str, Any]] | None = None, opened: str = ""
) -> ParsedResponse:
    """Parse a response in ``tool_format``.

    Args:
        text: decoded with special tokens, without the token that ended the turn.
        tool_format: one of :data:`TOOL_FORMATS`.
        tools: schemas of the tools that were offered, which type arguments; None: not known.
        opened: the mark with which the prompt opened a thought. What follows is thought until its end mark, and no
            call in it is one, also where the length cut it.
    """
    if tool_format == "gpt_oss":
        return _gpt_oss(text)
    parsed, schemas = ParsedResponse(), None if tools is None else parameters_of(tools)
    text = _split_thinking(text, parsed, tool_format, opened)
    at, kept = 0, []
    for begin, end, read in TOOL_FORMATS[tool_format](text, schemas):
        try:
            calls = read()
        except _BadCall as error:
            parsed.errors.append(str(error))
            continue
        kept.append(text[at:begin])
        parsed.calls += calls
        at = end
    parsed.content = "".join([*kept, text[at:]]).strip() if parsed.calls else text.strip()
    return parsed


def detect_format(chat_template: str) -> str:
    """The format that a chat template writes calls in; ``hermes`` where it has none of its own."""
    for mark, name in _MARKS:
        if mark in chat_template:
            return name
    return "hermes"


_MARKS = (
    ("<|channel|>", "gpt_oss"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("tool▁call", "deepseek"),
    ("<|python_tag|>", "llama3"),
)
"""Text that only the template of one format has, the most specific first."""


_CALL_BEGIN, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>")
_FUNCTION_END = re.compile(r"(?:</parameter>|\A)\s*(?P<end></function>(?:\s*</tool_call>)?)")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*)", re.DOTALL)
_NEXT_PARAMETER = re.compile(r"</parameter>\s*(?=<parameter=[^>\n]+>)")
_GLM = re.compile(r"<tool_call>(?P<name>[^<]*)")
_GLM_END = re.compile(r"(?:</arg_value>|\A)\s*(?P<end></tool_call>)")
_NEXT_PAIR = re.compile(r"</arg_value>\s*(?=<arg_key>)")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|$)", re.DOTALL)
_DEEPSEEK = re.compile(
    "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<before>.*?)<｜tool▁sep｜>(?P<body>.*?)(?P<end><｜tool▁call▁end｜>|$)"
    r"(?:\s*<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)


def _split_thinking(text: str, parsed: ParsedResponse, tool_format: str, opened: str) -> str:
    """Move the thought to ``parsed``; a template may have opened it in the prompt."""
    thought, rest = split_thought(text, opened)
    if rest == text:
        return text
    begun = opened or THOUGHT_BEGIN.match(text.lstrip())
    if not begun and rest is not None and _is_in_call(text, len(text) - len(rest) - 1, tool_format):
        return text
    parsed.reasoning = thought
    return rest or ""


def _is_in_call(text: str, position: int, tool_format: str) -> bool:
    """True if the position is inside a call that can be read: a text that is an argument ends no thought."""
    for begin, end, read in TOOL_FORMATS[tool_format](text, None):
        if begin < position < end:
            try:
                return bool(read())
            except _BadCall:
                return False
    return False


def _hermes(text: str, schemas: _Schemas | None) -> _Found:
    """``<tool_call>{...}</tool_call>``; the call ends after the JSON, whose strings may hold any mark."""
    decoder, begin = json.JSONDecoder(), text.find(_CALL_BEGIN)
    while begin >= 0:
        start = begin + len(_CALL_BEGIN)
        try:
            end = decoder.raw_decode(text, start + len(text[start:]) - len(text[start:].lstrip()))[1]
        except (ValueError, RecursionError):
            end = start
        closing = text.find(_CALL_END, end)
        stop = len(text) if closing < 0 else closing + len(_CALL_END)
        body = text[start : len(text) if closing < 0 else closing]
        yield begin, stop, functools.partial(_hermes_call, body, closing >= 0)
        begin = text.find(_CALL_BEGIN, stop)


def _hermes_call(body: str, closed: bool) -> list[ToolCall]:
    if not closed:
        raise _unended(body)
    return [_call_of(_json(body))]


def _unquoted(
    opening: re.Pattern[str],
    ending: re.Pattern[str],
    read: Callable[[str, str, Mapping[str, Any]], ToolCall],
) -> Callable[[str, _Schemas | None], _Found]:
    """A finder of calls whose arguments are written without quotes, so that any mark may be a part of one.

    A call ends at the last end mark before the next call, and a next call begins only after an end mark that follows
    an argument's.
    """

    def find(text: str, schemas: _Schemas | None) -> _Found:
        match = opening.search(text)
        while match is not None:
            start, following, first = match.end(), None, ending.search(text[match.end() :])
            if first is not None:
                following = opening.search(text, start + first.end())
            body = text[start : len(text) if following is None else following.start()]
            ends = list(ending.finditer(body))
            stop = start + (ends[-1].end() if ends else len(body))
            yield match.start(), stop, functools.partial(one, match["name"].strip(), body, ends, schemas)
            match = following

    def one(name: str, body: str, ends: list[re.Match[str]], schemas: _Schemas | None) -> list[ToolCall]:
        if not ends:
            raise _unended(body)
        if not name:
            raise _BadCall("a tool call without a name")
        return [read(name, body[: ends[-1].start("end")], (schemas or {}).get(name, {}))]

    return find


def _arguments(body: str, between: re.Pattern[str], pair: re.Pattern[str], end: str, begin: str) -> Iterator[list[str]]:
    """Names and texts of arguments; each text reaches to the last end mark before the next argument."""
    pieces = between.split(body) if body.strip() else []
    for number, piece in enumerate(pieces, 1):
        match = pair.fullmatch(piece)
        value, closed = (match[2], end) if match and number < len(pieces) else ("", "")
        if match and number == len(pieces):
            value, closed, _ = match[2].rpartition(end)
        if match is None or not closed or value.count(begin) > value.count(end):
            raise _BadCall(f"an argument that does not end with {end}: {piece.strip()[:80]!r}")
        yield [match[1].strip(), value]


def _qwen_xml(name: str, body: str, schema: Mapping[str, Any]) -> ToolCall:
    pairs = _arguments(body, _NEXT_PARAMETER, _PARAMETER, "</parameter>", "<parameter=")
    return ToolCall(name, {key: typed_value(value.removesuffix("\n"), key, schema) for key, value in pairs})


def _glm(name: str, body: str, schema: Mapping[str, Any]) -> ToolCall:
    pairs = _arguments(body, _NEXT_PAIR, _PAIR, "</arg_value>", "<arg_key>")
    return ToolCall(name, {key: typed_value(value, key, schema) for key, value in pairs})


def _mistral(text: str, schemas: _Schemas | None) -> _Found:
    """``[TOOL_CALLS] [{...}, ...]``, and ``[TOOL_CALLS]name{...}`` or ``name[ARGS]{...}`` of later versions."""
    begin = text.find("[TOOL_CALLS]")
    if begin < 0:
        return
    body = text[begin + len("[TOOL_CALLS]") :]

    def read() -> list[ToolCall]:
        if body.lstrip().startswith("["):
            calls = _json(body)
            if not isinstance(calls, list):
                raise _BadCall("[TOOL_CALLS] is followed by no list of calls")
            return [_call_of(call) for call in calls]
        parts = _NAMED.findall(body)
        if not parts:
            raise _BadCall(f"[TOOL_CALLS] is followed by {body[:80]!r}, neither a list of calls nor name{{arguments}}")
        return [_call_of({"name": name, "arguments": arguments}) for name, arguments in parts]

    yield begin, len(text), read


def _deepseek(match: re.Match[str]) -> list[ToolCall]:
    """V3 and R1: ``function<sep>name`` and a fenced JSON; V3.1: ``name<sep>{...}``."""
    if not match["end"]:
        raise _unended(match["body"])
    before, behind = match["before"], match["body"]
    fenced = re.fullmatch(r"(.*?)\n```json\n(.*)\n```\s*", behind, re.DOTALL)
    name, arguments = (fenced[1], fenced[2]) if fenced else (before, behind)
    return [_call_of({"name": name.strip(), "arguments": arguments})]


def _llama3(text: str, schemas: _Schemas | None) -> _Found:
    """A response that is nothing but calls: ``{"name": ..., "parameters": {...}}``, several with ``;`` between.

    JSON that names no tool that was offered is an answer, unless the mark of a call is in front of it.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return
    named = re.search(r'"name"\s*:\s*"([^"]*)"', body)
    is_marked = text.lstrip().startswith("<|python_tag|>")
    if not is_marked and schemas is not None and (named is None or named[1] not in schemas):
        return

    def read() -> list[ToolCall]:
        decoder, at, calls = json.JSONDecoder(), 0, []
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except (ValueError, RecursionError) as error:
                raise _BadCall(f"{body[:80]!r} is no JSON: {error}") from None
            calls.append(_call_of(value))
            at += len(body[at:]) - len(body[at:].lstrip("; \n"))
        return calls

    yield 0, len(text), read


TOOL_FORMATS: dict[str, Callable[[str, _Schemas | None], _Found]] = {
    "hermes": _hermes,
    "qwen_xml": _unquoted(_FUNCTION, _FUNCTION_END, _qwen_xml),
    "glm": _unquoted(_GLM, _GLM_END, _glm),
    "mistral": _mistral,
    "deepseek": lambda text, _: (
        (match.start(), match.end(), functools.partial(_deepseek, match)) for match in _DEEPSEEK.finditer(text)
    ),
    "llama3": _llama3,
    "gpt_oss": lambda text, _: iter(()),
}
"""Name to the finder of calls; ``gpt_oss``, which has channels in place of marks, has its own parser."""


def _gpt_oss(text: str) -> ParsedResponse:
    """Harmony: messages with a channel each; a call is a message ``to=functions.NAME``."""
    parsed = ParsedResponse()
    contents, thoughts = [], []
    for match in HARMONY.finditer(text):
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", match["to"] + match["rest"])
        if recipient is not None:
            try:
                parsed.calls.append(_call_of({"name": recipient[1], "arguments": match["body"]}))
            except _BadCall as error:
                parsed.errors.append(str(error))
        elif match["channel"] == "analysis":
            thoughts.append(match["body"])
        else:
            contents.append(match["body"])
    if not (parsed.calls or parsed.errors or thoughts or contents):
        contents.append(text)
    parsed.content, parsed.reasoning = "".join(contents).strip(), "\n".join(thoughts).strip()
    return parsed


def _unended(body: str) -> _BadCall:
    return _BadCall(f"a tool call that does not end: {body[:80]!r}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadCall(f"{text.strip()[:80]!r} is no JSON: {error}") from None


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _BadCall(f"a tool call needs a name: {str(value)[:80]}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _BadCall(f"arguments of {value['name']} must be an object, got {str(arguments)[:80]}")
    return ToolCall(value["name"], arguments)
