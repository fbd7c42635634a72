"""Tool calls in texts, in the formats that model families write: where each begins and ends, and what it says."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.agents.tool_arguments import no_constant, typed_value


@dataclass(frozen=True)
class ToolCall:
    """A function and its arguments as the model wrote them."""

    name: str
    arguments: dict[str, Any]


class BadCall(ValueError):
    """A call that cannot be read."""


Schemas = Mapping[str, Mapping[str, Any]]  # tool to the JSON schema of its arguments
# Begin and end of calls in a text, and a function that parses them or raises `BadCall`.
Found = Iterator[tuple[int, int, Callable[[], list[ToolCall]]]]

_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{1,256})>")
_FUNCTION_END = re.compile(r"(?:</parameter>|\A)\s*(?P<end></function>(?:\s*</tool_call>)?)")
_INVOKE = re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"\n]+)">')
_INVOKE_END = re.compile(r"(?:</parameter>|\A)\s*(?P<end></invoke>(?:\s*</minimax:tool_call>)?)")
_GLM = re.compile(r"<tool_call>(?P<name>[^<]*)")
_GLM_END = re.compile(r"(?:</arg_value>|\A)\s*(?P<end></tool_call>)")
_NEXT_PAIR = re.compile(r"</arg_value>\s*(?=<arg_key>[^<]*</arg_key>\s*<arg_value>)")
_PAIR_BEGIN = re.compile(r"<arg_key>[^<]*</arg_key>\s*<arg_value>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
_NAME = re.compile(r"[^\s{}<>\"]+")
_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?P<marked>\[ARGS\])?\s*")
_DEEPSEEK = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<before>[^<]*)<｜tool▁sep｜>(?:(?P<name>[^\n{]*)\n```json\r?\n)?"
)
_DEEPSEEK_END = re.compile(r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")
_KIMI = re.compile(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^<\s]*?)(?::[0-9]+)?\s*"
    r"<\|tool_call_argument_begin\|>"
)
_KIMI_END = re.compile(r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?")
_PYTHON_TAG = "<|python_tag|>"
_MOST_BROKEN = 256  # braces without JSON after which the search stops: a text of braces must not take quadratic time
_BETWEEN = re.compile(r"[;\s]*")
_LLAMA, _LINE_GOES_ON = re.compile(r"\[\s*(?=\{)|\{"), re.compile(r"[^\S\n]*[^;\s<{]")
_JSON_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_HARMONY = re.compile(r"<\|channel\|>(?P<channel>\w+)(?P<rest>[^<]*)(?:<\|constrain\|>\w+)?<\|message\|>")
_HARMONY_BEGIN = re.compile(r"\s*(?:<\|start\|>assistant\s*)?(?:to=[\w.-]+\s*)?<\|channel\|>")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_SPACE = re.compile(r"\s*")
_LAST_LINE_END = re.compile(r"\r?\n\Z")
_DECODER = json.JSONDecoder(parse_constant=no_constant)


def _json_end(text: str, start: int) -> int:
    """The end of the JSON value at ``start``, whose strings may hold any mark; ``start`` where there is none."""
    try:
        # RecursionError: a policy may write thousands of opening brackets.
        return _DECODER.raw_decode(text, _after(_SPACE, text, start))[1]
    except (ValueError, RecursionError):
        return start


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _unquoted(
    opening: re.Pattern[str],
    ending: re.Pattern[str],
    read: Callable[[str, str, Mapping[str, Any]], ToolCall],
) -> Callable[[str, Schemas | None], Found]:
    """A finder of calls whose arguments are written without quotes, so that any mark may be a part of one.

    A call ends at the last end mark before the next call, and a next call begins only after an end mark that follows
    an argument's.
    """

    def find(text: str, schemas: Schemas | None) -> Found:
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

    def one(name: str, body: str, ends: list[re.Match[str]], schemas: Schemas | None) -> list[ToolCall]:
        if not ends:
            raise _unended(body)
        if _NAME.fullmatch(name) is None:
            raise BadCall(f"a tool call without a name: {name[:80]!r}")
        return [read(name, body[: ends[-1].start("end")], (schemas or {}).get(name, {}))]

    return find


def _arguments(
    body: str, between: re.Pattern[str], pair: re.Pattern[str], end: str, begin: re.Pattern[str]
) -> Iterator[list[str]]:
    """Names and texts of arguments; each text reaches to the last end mark before the next argument. ``begin``:
    beginning of an argument, of which a text has none without an end mark."""
    pieces = between.split(body) if body.strip() else []
    for number, piece in enumerate(pieces, 1):
        match = pair.fullmatch(piece)
        value, closed = (match[2], end) if match and number < len(pieces) else ("", "")
        if match and number == len(pieces):
            value, closed, _ = match[2].rpartition(end)
        if match is None or not closed or len(begin.findall(value)) > value.count(end):
            raise BadCall(f"an argument that does not end with {end}: {piece.strip()[:80]!r}")
        yield [match[1].strip(), value]


def _names(schema: Mapping[str, Any]) -> str | None:
    """A pattern of the names that an argument may have; None where the schema leaves them open."""
    properties = schema.get("properties")
    if not properties or schema.get("additionalProperties", False) is not False:
        return None
    return "|".join(map(re.escape, properties))


def _parameters(opening: str) -> Callable[[str, str, Mapping[str, Any]], ToolCall]:
    """A reader of arguments in elements ``parameter`` whose ``opening`` tag holds their name in place of ``{}``."""
    pair = re.compile(r"\s*" + opening.format(r"([^>\n]+)") + r"(?:\r?\n)?(.*)", re.DOTALL)

    def read(name: str, body: str, schema: Mapping[str, Any]) -> ToolCall:
        # A name that the tool does not have begins no argument: it is a text that mentions the mark.
        known = _names(schema)
        following = opening.format(r"[^>\n]+" if known is None else f"(?:{known})")
        named = "|".join(map(re.escape, schema.get("properties") or ())) or "(?!)"
        begin = re.compile(opening.format(f"(?:{named})"))
        between = re.compile(rf"</parameter>\s*(?={following})")
        pairs = _arguments(body, between, pair, "</parameter>", begin)
        return ToolCall(name, {key: typed_value(_LAST_LINE_END.sub("", value), key, schema) for key, value in pairs})

    return read


def _glm(name: str, body: str, schema: Mapping[str, Any]) -> ToolCall:
    known, between = _names(schema), _NEXT_PAIR
    if known is not None:
        between = re.compile(rf"</arg_value>\s*(?=<arg_key>\s*(?:{known})\s*</arg_key>\s*<arg_value>)")
    pairs = _arguments(body, between, _PAIR, "</arg_value>", _PAIR_BEGIN)
    return ToolCall(name, {key: typed_value(value, key, schema) for key, value in pairs})


def _mistral(text: str, schemas: Schemas | None) -> Found:
    """``[TOOL_CALLS] [{...}, ...]``, and ``[TOOL_CALLS]name{...}`` or ``name[ARGS]{...}`` of later versions."""
    begin = text.find(_CALLS)
    while begin >= 0:
        start = begin + len(_CALLS)
        named = _NAMED.match(text, start)
        at = start if named is None else named.end()
        stop = _json_end(text, at)
        if stop == at:  # not JSON: everything up to the next call is its text
            following = text.find(_CALLS, at)
            stop = len(text) if following < 0 else following
        yield begin, stop, functools.partial(_mistral_calls, named, text[at:stop].strip())
        begin = text.find(_CALLS, stop)


def _mistral_calls(named: re.Match[str] | None, body: str) -> list[ToolCall]:
    if named is not None and (body or named["marked"]):
        return _calls_of({"name": named["name"], "arguments": body})
    if not body.startswith("["):
        raise BadCall(f"{_CALLS} is followed by neither a list of calls nor name{{arguments}}: {body[:80]!r}")
    return _calls_of(body)


def _sections(
    opening: re.Pattern[str], ending: re.Pattern[str], read: Callable[[re.Match[str], str], object]
) -> Callable[[str, Schemas | None], Found]:
    """A finder of calls between marks; ``read`` makes a call, or its JSON, of the opening and what follows it."""

    def find(text: str, schemas: Schemas | None) -> Found:
        begun = opening.search(text)
        while begun is not None:
            # From the end of the JSON on: its strings may hold the end mark.
            closing = ending.search(text, _json_end(text, begun.end()))
            stop = len(text) if closing is None else closing.end()
            body = text[begun.end() : len(text) if closing is None else closing.start()]
            call = _unended(body) if closing is None else read(begun, body)
            yield begun.start(), stop, functools.partial(_calls_of, call)
            begun = opening.search(text, stop)

    return find


def _deepseek(begun: re.Match[str], body: str) -> object:
    """V3 and R1: ``function<sep>name`` and a fenced JSON; V3.1: ``name<sep>{...}``."""
    if begun["name"] is None:
        return {"name": begun["before"].strip(), "arguments": body}
    return {"name": begun["name"].strip(), "arguments": body.rstrip().removesuffix("```")}


def _llama3(text: str, schemas: Schemas | None) -> Found:
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between or in a list, on lines of their own.

    JSON that names no tool that was offered is an answer, unless the mark of a call is in front of it. Where the tools
    are not known, any name will do. What shares a line with other words, or is fenced below some, is quoted.
    """
    is_next = schemas is None
    position = end = broken = 0
    while (opening := _LLAMA.search(text, position)) is not None and broken < _MOST_BROKEN:
        begin = opening.start()
        joined = _after(_BETWEEN, text, end) == begin
        tag = text.find(_PYTHON_TAG, max(end, begin - 2 * len(_PYTHON_TAG)), begin)
        is_next = tag >= 0 or (is_next and joined)
        first = tag if tag >= 0 else end if joined else begin
        stop = _json_end(text, begin)
        named = _JSON_NAME.match(text, begin)
        if stop > begin:
            value = json.loads(text[begin:stop])
            calls = value if isinstance(value, list) else [value]
            is_call = (tag >= 0 or joined or not _is_quoted(text, begin, stop)) and all(
                isinstance(call, dict)
                and (schemas is None or call.get("name") in schemas)
                and call.keys() & {"parameters", "arguments"}
                for call in calls
            )
            if is_next or is_call:
                yield first, stop, functools.partial(_calls_of, text[begin:stop])
                end = stop
        elif named is not None and (is_next or (schemas is not None and named[1] in schemas)):
            yield first, len(text), functools.partial(_calls_of, text[begin:])
            return
        broken += stop == begin
        position = max(stop, begin + 1)


def _is_quoted(text: str, begin: int, end: int) -> bool:
    """True for what stands within a line, or in a fence that follows other words."""
    line = text[text.rfind("\n", 0, begin) + 1 : begin]
    before, fence, inside = text[:begin].partition("```")
    is_fenced = fence != "" and before.strip() != "" and inside.count("```") % 2 == 0
    return is_fenced or line.strip() != "" or _LINE_GOES_ON.match(text, end) is not None


@dataclass(frozen=True)
class HarmonyMessage:
    """A message of gpt-oss."""

    channel: str
    recipient: str | None  # name of the tool that is called, without `functions.`; None: the message calls none
    body: str
    begin: int
    end: int


def harmony_messages(text: str) -> Iterator[HarmonyMessage]:
    """The messages of a response that begins with one; the last one may be cut."""
    at = 0 if _HARMONY_BEGIN.match(text) else len(text)
    while (match := _HARMONY.search(text, at)) is not None:
        to = _RECIPIENT.search(text[at : match.start()] + match["rest"])
        start = match.end()
        ending = _HARMONY_END.search(text, start if to is None else _json_end(text, start))
        stop, end = (len(text), len(text)) if ending is None else ending.span()
        yield HarmonyMessage(match["channel"], to and to[1], text[start:stop], at, end)
        at = end


def _gpt_oss(text: str, schemas: Schemas | None) -> Found:
    """Messages with a recipient; messages of other channels are not calls."""
    for message in harmony_messages(text):
        if message.recipient is not None:
            call = {"name": message.recipient, "arguments": message.body}
            yield message.begin, message.end, functools.partial(_calls_of, call)


# Name to the finder of calls.
TOOL_FORMATS: dict[str, Callable[[str, Schemas | None], Found]] = {
    # `<tool_call>{...}</tool_call>`, or a list of calls between the marks.
    "hermes": _sections(re.compile("<tool_call>"), re.compile("</tool_call>"), lambda _, body: body),
    "qwen_xml": _unquoted(_FUNCTION, _FUNCTION_END, _parameters("<parameter={}>")),
    "minimax": _unquoted(_INVOKE, _INVOKE_END, _parameters('<parameter name="{}">')),
    "glm": _unquoted(_GLM, _GLM_END, _glm),
    "mistral": _mistral,
    "deepseek": _sections(_DEEPSEEK, _DEEPSEEK_END, _deepseek),
    "kimi": _sections(_KIMI, _KIMI_END, lambda begun, body: {"name": begun["name"], "arguments": body}),
    "llama3": _llama3,
    "gpt_oss": _gpt_oss,
}


def call_spans(text: str) -> list[tuple[int, int]]:
    """Begin and end of all calls that can be read, in any format."""
    spans = []
    for find in TOOL_FORMATS.values():
        for begin, end, read in find(text, None):
            with contextlib.suppress(BadCall):
                spans += [(begin, end)] if read() else []
    return spans


def _unended(body: str) -> BadCall:
    return BadCall(f"a tool call that does not end: {body[:80]!r}")


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{text.strip()[:80]!r} is no JSON: {error}") from None


def _calls_of(*values: object) -> list[ToolCall]:
    """The calls that JSON values or their texts say; a :class:`BadCall` among them is raised."""
    read = [_json(value) if isinstance(value, str) else value for value in values]
    if [] in read:
        raise BadCall("a list of no tool calls")
    return [_call_of(call) for value in read for call in (value if isinstance(value, list) else [value])]


def _call_of(value: object) -> ToolCall:
    if isinstance(value, BadCall):
        raise value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise BadCall(f"a tool call needs a name: {str(value)[:80]}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    # Templates of some families write null for a tool without parameters.
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadCall(f"arguments of {value['name']} must be an object, got {str(arguments)[:80]}")
    return ToolCall(value["name"], arguments)
