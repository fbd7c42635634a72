"""Tool calls in sampled responses: parsed in the formats that model families write, and begun where one is demanded.

What is trained are the sampled ids; what is parsed here only decides what an agent sees of them.

``tool_choice: required`` holds whatever the policy would have said: the text that the chat template writes in front of
a call's arguments, the tool's name included, is appended to the prompt as ids, and the policy writes the arguments.
Where several tools would do, their openings are walked token by token: tokens that they share are given, and where they
differ the policy draws one. A draw that continues no opening is repeated, which leaves the policy's distribution over
the tokens that do. Ids of an opening are context and are never trained: they were not sampled from the policy's own
distribution.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.chat_ids import ChatTemplate, Message, TemplateError, common_prefix

DrawToken = Callable[[list[int]], Awaitable[int]]
"""The policy's next token after these ids."""
MOST_DRAWS = 8
"""Draws at a token where openings differ; after them the first tool that is offered is called."""
_ARGUMENTS: tuple[dict[str, str], ...] = ({"Zq7A": "1"}, {"Bq7Z": "2"}, {})
"""Arguments of calls that share their opening in every format, and nothing after it."""
_HERMES_OPENING = '<tool_call>\n{{"name": "{}", "arguments":'
_THINK, _THOUGHT = "<think>", "\n</think>\n\n"


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


_Found = Iterator[tuple[int, int, Callable[[], list[ToolCall]]]]
"""Begin and end of calls in a text, and a function that parses them or raises ``_BadCall``."""


def parse_response(text: str, tool_format: str) -> ParsedResponse:
    """Parse a response in ``tool_format``.

    Args:
        text: decoded with special tokens, without the token that ended the turn.
        tool_format: one of :data:`TOOL_FORMATS`.
    """
    if tool_format == "gpt_oss":
        return _gpt_oss(text)
    parsed = ParsedResponse()
    text = _split_thinking(text, parsed)
    at, kept = 0, []
    for begin, end, read in TOOL_FORMATS[tool_format](text):
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


_TAGGED = re.compile(r"<tool_call>(?P<body>.*?)(?P<end></tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(
    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?P<end></function>|$)(?:\s*</tool_call>)?", re.DOTALL
)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|$)", re.DOTALL)
_DEEPSEEK = re.compile(
    "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<before>.*?)<｜tool▁sep｜>(?P<body>.*?)(?P<end><｜tool▁call▁end｜>|$)"
    r"(?:\s*<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<rest>[^<]*)(?:<\|constrain\|>\w+)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)",
    re.DOTALL,
)


def _split_thinking(text: str, parsed: ParsedResponse) -> str:
    """Move ``<think>...</think>`` to ``parsed``; a template may have opened it in the prompt."""
    head, closed, rest = text.partition("</think>")
    if not closed:
        opened = text.lstrip().startswith("<think>")
        parsed.reasoning = text.lstrip().removeprefix("<think>").strip() if opened else ""
        return "" if opened else text
    parsed.reasoning = head.lstrip().removeprefix("<think>").strip()
    return rest


def _hermes(match: re.Match[str]) -> list[ToolCall]:
    return [_call_of(_json(_closed(match)))]


def _qwen_xml(match: re.Match[str]) -> list[ToolCall]:
    parameters = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", _closed(match), re.DOTALL)
    return [ToolCall(match["name"].strip(), {name.strip(): _value(value) for name, value in parameters})]


def _glm(match: re.Match[str]) -> list[ToolCall]:
    body = _closed(match)
    name = re.split(r"<arg_key>|\n", body.strip(), maxsplit=1)[0].strip()
    if not name:
        raise _BadCall("a tool call without a name")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return [ToolCall(name, {key.strip(): _value(value.strip()) for key, value in pairs})]


def _mistral(text: str) -> _Found:
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
        return [_call_of({"name": name, "arguments": _json(arguments)}) for name, arguments in parts]

    yield begin, len(text), read


def _deepseek(match: re.Match[str]) -> list[ToolCall]:
    """V3 and R1: ``function<sep>name`` and a fenced JSON; V3.1: ``name<sep>{...}``."""
    before, behind = match["before"], _closed(match)
    fenced = re.fullmatch(r"(.*?)\n```json\n(.*)\n```\s*", behind, re.DOTALL)
    name, arguments = (fenced[1], fenced[2]) if fenced else (before, behind)
    return [_call_of({"name": name.strip(), "arguments": _json(arguments)})]


def _llama3(text: str) -> _Found:
    """A response that is nothing but calls: ``{"name": ..., "parameters": {...}}``, several with ``;`` between."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return

    def read() -> list[ToolCall]:
        decoder, at, calls = json.JSONDecoder(), 0, []
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except ValueError as error:
                raise _BadCall(f"{body[:80]!r} is no JSON: {error}") from None
            calls.append(_call_of(value))
            at += len(body[at:]) - len(body[at:].lstrip("; \n"))
        return calls

    yield 0, len(text), read


def _each(pattern: re.Pattern[str], read: Callable[[re.Match[str]], list[ToolCall]]) -> Callable[[str], _Found]:
    """A finder of the calls that match ``pattern``."""

    def find(text: str) -> _Found:
        for match in pattern.finditer(text):
            yield match.start(), match.end(), functools.partial(read, match)

    return find


TOOL_FORMATS: dict[str, Callable[[str], _Found]] = {
    "hermes": _each(_TAGGED, _hermes),
    "qwen_xml": _each(_FUNCTION, _qwen_xml),
    "glm": _each(_TAGGED, _glm),
    "mistral": _mistral,
    "deepseek": _each(_DEEPSEEK, _deepseek),
    "llama3": _llama3,
    "gpt_oss": lambda _: iter(()),
}
"""Name to the finder of calls; ``gpt_oss``, which has channels in place of marks, has its own parser."""


def _gpt_oss(text: str) -> ParsedResponse:
    """Harmony: messages with a channel each; a call is a message ``to=functions.NAME``."""
    parsed = ParsedResponse()
    contents, thoughts = [], []
    for match in _HARMONY.finditer(text):
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", match["to"] + match["rest"])
        if recipient is not None:
            try:
                parsed.calls.append(_call_of({"name": recipient[1], "arguments": _json(match["body"])}))
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


def _closed(match: re.Match[str]) -> str:
    """The body of a call that has its end mark."""
    if not match["end"]:
        raise _BadCall(f"a tool call that does not end: {match['body'][:80]!r}")
    return match["body"]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _BadCall(f"{text.strip()[:80]!r} is no JSON: {error}") from None


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _BadCall(f"a tool call needs a name: {str(value)[:80]}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise _BadCall(f"arguments of {value['name']} must be an object, got {str(arguments)[:80]}")
    return ToolCall(value["name"], arguments)


def _value(text: str) -> Any:
    """A value without quotes: JSON or a Python literal where it is one, else the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
    return text


def call_opening(template: ChatTemplate, tool_format: str, messages: Sequence[Message], name: str) -> str:
    """The opening of a response to ``messages`` that calls ``name``, up to its arguments.

    It is derived from the chat template; where that writes no calls, ``hermes`` has a default form. Thinking that the
    generation prompt has opened is closed first.

    Raises:
        TemplateError: the template writes calls in no form, or in one that ``tool_format`` does not read.
    """
    begun = template.render(messages)
    texts = [text for arguments in _ARGUMENTS if (text := _rendered(template, messages, name, arguments)) is not None]
    stem, closing = begun, ""
    if (texts and not texts[0].startswith(begun)) or (begun.rstrip().endswith(_THINK) and not texts):
        stem, closing = begun.rpartition(_THINK)[0], _THOUGHT
    shown = [text.removeprefix(stem) for text in texts if text.startswith(stem)]
    if not shown or name not in shown[0]:
        if tool_format != "hermes":
            raise TemplateError(f"the chat template writes no tool calls, so none of the form {tool_format} can begin")
        return (_THOUGHT if begun.rstrip().endswith(_THINK) else "") + _HERMES_OPENING.format(name)
    written = shown[0].rstrip()
    for end in template.end_texts:
        written = written.removesuffix(end)
    if [call.name for call in parse_response(written, tool_format).calls] != [name]:
        raise TemplateError(f"the chat template writes tool calls in another form than {tool_format}")
    # A brace or a quote is one token with what follows it, so it is the policy's.
    return closing + common_prefix(shown).rstrip(' {"<')


def _rendered(template: ChatTemplate, messages: Sequence[Message], name: str, arguments: dict[str, str]) -> str | None:
    text = None
    # Some templates write calls only where there is no content at all, and then with arguments as JSON.
    for content, value in (("", arguments), (None, json.dumps(arguments))):
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": value}}
        try:
            text = template.render([*messages, {"role": "assistant", "content": content, "tool_calls": [call]}], False)
        except TemplateError:
            continue
        if name in text[len(template.render(messages, False)) :]:
            break
    return text


async def choose_opening(openings: Sequence[list[int]], prompt_ids: Sequence[int], draw: DrawToken) -> int:
    """Index of the opening that the policy chooses.

    Args:
        openings: token ids; none is the beginning of another.
    """
    left, at = list(range(len(openings))), 0
    while len(left) > 1:
        here = {openings[index][at] for index in left}
        if len(here) > 1:
            ids, chosen = [*prompt_ids, *openings[left[0]][:at]], openings[left[0]][at]
            for _ in range(MOST_DRAWS):
                if (token := await draw(ids)) in here:
                    chosen = token
                    break
            left = [index for index in left if openings[index][at] == chosen]
        at += 1
    return left[0]
