"""Messages, tools and calls in the forms of the interfaces, to and from the form of chat templates."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.serving.dialects.fields import ModelRequest
from roll.serving.http import BadRequest

Message = dict[str, Any]
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ChatRequest(ModelRequest):
    """A request for the response to a conversation."""

    messages: list[Message]
    tools: Sequence[Message] = ()
    """Schemas in the form of chat completions."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    add_generation_prompt: bool = True
    own_messages: int = 0
    """Messages at the beginning that belong to this request alone, not to the conversation: instructions."""
    parse_calls: bool = True
    """False: the response is a text, also where the model writes a call."""
    parallel_calls: bool = True
    """False: of several calls in a response the first counts."""
    must_call: tuple[str, ...] = ()
    """Tools of which the response must call one."""
    tool_choice: Any = "auto"
    """The request's field, which OpenAI's Responses repeat."""


@dataclass(frozen=True)
class Reply:
    """A response as the program of an agent gets it."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    """Calls with ``id`` and ``function``, which has ``name`` and ``arguments`` (a mapping)."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_string: bool
    """One of the request's stop strings ended it."""
    prompt_tokens: int
    completion_tokens: int
    model: str

    @property
    def message(self) -> Message:
        """The message that a client puts into its conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        return message | {"tool_calls": self.calls} if self.calls else message


def read_role(message: object) -> Any:
    """The role of a message, ``system`` for a developer's; None without a message."""
    role = message.get("role") if isinstance(message, Mapping) else None
    return "system" if role == "developer" else role


def joined_texts(parts: object, kinds: Sequence[str] = ("text",), field_name: str = "messages") -> str:
    """A content that is a text, or a list of parts of the given types with a text each.

    Raises:
        BadRequest: other parts, such as images.
    """
    if isinstance(parts, str):
        return parts
    if parts is None:
        return ""
    texts = []
    for part in parts if isinstance(parts, list) else [None]:
        if not isinstance(part, Mapping) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise BadRequest(f"{field_name}: only content of type {' or '.join(kinds)} is understood", field_name)
        texts.append(part["text"])
    return "".join(texts)


def call_of(identity: object, name: str, arguments: object) -> Message:
    """A call of an earlier response, its arguments as a mapping where they are a JSON object, else as they are."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": str(identity), "type": "function", "function": function}


def arguments_text(call: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON; those that cannot be parsed as the policy wrote them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def named_tools(messages: list[Message]) -> list[Message]:
    """Add the name of the answered tool to tool messages, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and (identity := str(message.get("tool_call_id"))) in names:
            message.setdefault("name", names[identity])
    return messages


def tool_schema(tool: object, kind: str = "function", parameters: str = "parameters") -> Message:
    """The schema of a function, without the fields that only its interface knows; it may be in a field ``function``.

    Args:
        kind: the ``type`` that it must have; ``custom`` may be left out.
        parameters: its field with the schema of the arguments.

    Raises:
        BadRequest: it has another type, or no name.
    """
    if not isinstance(tool, Mapping) or (tool.get("type") or "custom") != kind:
        found = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(f"tools: only tools of type {kind} are available, not {found!r}", "tools")
    tool = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("tools: each must have a name", "tools")
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties") or {}, Mapping):
        raise BadRequest(f"tools: {parameters} of {name!r} must be a JSON schema of an object"[:300], "tools")
    function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def read_tool_choice(choice: object, tools: Sequence[Message]) -> dict[str, Any]:
    """The arguments of :class:`ChatRequest` that say whether a tool is called, from OpenAI's ``tool_choice``.

    Raises:
        BadRequest: no such choice, or one that the offered tools do not allow.
    """
    named: list[Any] = []
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = [choice["function"] if isinstance(choice.get("function"), Mapping) else choice]
    elif isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, Mapping) or allowed.get("mode") != "required":
            raise BadRequest("tool_choice: allowed_tools is available with mode required", "tool_choice")
        tools_given = allowed.get("tools") or [None]
        named = [one.get("function", one) if isinstance(one, Mapping) else one for one in tools_given]
    elif choice not in _TOOL_CHOICES:
        raise BadRequest(f"tool_choice: must be one of {', '.join(_TOOL_CHOICES)} or name a function", "tool_choice")
    offered = [tool["function"]["name"] for tool in tools]
    names = [one.get("name") if isinstance(one, Mapping) else one for one in named]
    if choice == "required" and not offered:
        raise BadRequest("tool_choice: demands a call, and the request offers no tools", "tool_choice")
    missing = [name for name in names if name not in offered]
    if missing:
        there = f"there are {', '.join(offered)}" if offered else "it offers none"
        raise BadRequest(f"tool_choice: {missing[0]!r} is not among the request's tools; {there}", "tool_choice")
    must_call = tuple(dict.fromkeys(offered if choice == "required" else names))
    return {"parse_calls": choice != "none", "must_call": must_call, "tool_choice": choice}


def head(prefix: str, kind: str, model: str, created: str = "created") -> dict[str, Any]:
    """The fields that bodies of OpenAI begin with."""
    return {"id": identifier(prefix), "object": kind, created: int(time.time()), "model": model}


def identifier(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """Pieces of a text for a stream, which begins once the whole response is generated."""
    for begin in range(0, len(text), size):
        yield text[begin : begin + size]
