"""Tool calls in texts, in the formats that model families write: where each begins and ends, what it says, and what
type an argument has that is written without quotes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A function and its arguments as the model wrote them."""

    name: str
    arguments: dict[str, Any]


class BadCall(ValueError):
    """A call that cannot be read."""


def no_constant(text: str) -> Any:
    """Refuse ``NaN`` and ``Infinity`` as ``parse_constant`` of Python's JSON reader, which accepts them."""
    raise ValueError(f"{text} is no JSON")


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
_UNENDED = "a tool call that does not end: {!r}"
_DECODER = json.JSONDecoder(parse_constant=no_constant)


def _json_end(text: str, start: int) -> int:
    """The end of the JSON value at ``start``, whose strings may hold any mark; ``start`` where there is none."""
    try:
        # RecursionError: a policy may write thousands of opening brackets.
        return _DECODER.raw_decode(text, next(_SPACE.finditer(text, start)).end())[1]
    except (ValueError, RecursionError):
        return start


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}
# Words that templates write for values, to the JSON type and its word.
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


def typed_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of the argument ``name``.

    A string stays the text as it is written, quotes included. What may be of another type is read as JSON (``True``,
    ``False`` and ``None`` too); where that gives no value of the schema's types it stays the text, which the tool's
    own check refuses. An argument that the schema does not type is JSON or the text.
    """
    properties = schema.get("properties")
    allowed = _types(properties.get(name) if isinstance(properties, Mapping) else None, schema)
    if allowed == {"string"}:
        return text
    kind, word = _PYTHON_WORDS.get(text.strip(), ("", text))
    spelled = word if kind in allowed else text
    try:
        value = json.loads(spelled, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return text
    return value if not allowed or _is_of(value, allowed - {"string"}) else text


def _types(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Names of the JSON types that a schema allows; empty: any."""
    # Bounded: references of a schema may form a circle.
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    written = schema.get("type")
    if written is not None:
        return {written} if isinstance(written, str) else set(written)
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    found = [_types(branch, root, depth + 1) for branch in branches]
    if found:
        return set().union(*found) if all(found) else set()
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return {name for name in _JSON_TYPES if any(_is_of(value, {name}) for value in values)}


def _is_of(value: object, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _JSON_TYPES.get(name, ())) for name in types)


def _unquoted(
    opening: re.Pattern[str], ending: re.Pattern[str], read: Callable[[str, str, Mapping[str, Any]], ToolCall]
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
            raise BadCall(_UNENDED.format(body[:80]))
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
        body = text[at:stop].strip()
        call: object = body
        if named is not None and (body or named["marked"]):
            call = {"name": named["name"], "arguments": body}
        elif not body.startswith("["):
            rule = "is followed by neither a list of calls nor name{arguments}"
            call = BadCall(f"{_CALLS} {rule}: {body[:80]!r}")
        yield begin, stop, functools.partial(_calls_of, call)
        begin = text.find(_CALLS, stop)


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
            call = BadCall(_UNENDED.format(body[:80])) if closing is None else read(begun, body)
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
        joined = _BETWEEN.fullmatch(text, end, begin) is not None
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


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{text.strip()[:80]!r} is no JSON: {error}") from None


def _calls_of(value: object) -> list[ToolCall]:
    """The calls that a JSON value or its text says; a :class:`BadCall` is raised."""
    read = _json(value) if isinstance(value, str) else value
    if read == []:
        raise BadCall("a list of no tool calls")
    calls = []
    for call in read if isinstance(read, list) else [read]:
        if isinstance(call, BadCall):
            raise call
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise BadCall(f"a tool call needs a name: {str(call)[:80]}")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments) if arguments.strip() else {}
        # Templates of some families write null for a tool without parameters.
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise BadCall(f"arguments of {call['name']} must be an object, got {str(arguments)[:80]}")
        calls.append(ToolCall(call["name"], arguments))
    return calls
