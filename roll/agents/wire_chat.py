"""OpenAI's chat completions for agents' programs: requests in, bodies and events out.

Also the common form of requests and replies that the other interfaces translate to and from.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.agents.chat_ids import Message
from roll.agents.episode import Response
from roll.serving.requests import CHAT, NO_LIMIT, BadRequest, Fields, read_message
from roll.serving.responses import event, usage_of
from roll.strategies.engines.requests import SamplingParams, visible_text

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Fields that change the sampling distribution, which is the run's: the policy is trained under it."""
HINTS = frozenset({"prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity"})
"""Fields that closed agents send, which request nothing that a response could lack."""
_UNAVAILABLE = {
    "add_generation_prompt": (None, True),
    "chat_template_kwargs": (None, {}),
    "include_stop_str_in_output": (None, False),
    "logprobs": (None, False),
    "min_tokens": (None, 0),
    "n": (None, 1),
    # The policy's response is what it is: a call left out would not be in the conversation that it is trained on.
    "parallel_tool_calls": (None, True),
    "return_token_ids": (None, False),
    "stop_token_ids": (None, []),
    "top_logprobs": (None, 0),
}
"""Fields of the served interface that are not available in an episode, and their neutral values."""
_CHAT = {*CHAT, *HINTS, "tools", "tool_choice"} - _UNAVAILABLE.keys()
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ChatRequest:
    """A model call of an agent's program."""

    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    """Schemas in the form of chat completions."""
    max_tokens: int | None = None
    """None: as many as the run allows."""
    stops: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    """Which of :data:`SAMPLING` the request sets."""
    model: str = ""
    """As the client names it; any name is the policy."""
    stream: bool = False
    include_usage: bool = False
    own_messages: int = 0
    """Messages at the beginning that belong to this request alone, not to the conversation: instructions."""
    parse_calls: bool = True
    """False: the client wants a text whatever the policy writes."""
    must_call: tuple[str, ...] = ()
    """Tools of which the response must call one."""
    tool_choice: Any = "auto"
    """As in the request; OpenAI's Responses repeat it."""


@dataclass(frozen=True)
class Reply:
    """A response as an agent's program gets it."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    """With ``id``, and ``function`` of ``name`` and ``arguments`` (a mapping)."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_string: bool
    """One of the request's stop strings ended it."""
    prompt_tokens: int
    completion_tokens: int
    model: str

    @property
    def usage(self) -> dict[str, int]:
        return usage_of(self.prompt_tokens, self.completion_tokens)

    @property
    def message(self) -> Message:
        """The message that a client puts into its conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        return message | {"tool_calls": self.calls} if self.calls else message


def reply_of(request: ChatRequest, response: Response, prompt_tokens: int) -> Reply:
    """The client's view of ``response``: thinking separated, stop strings cut off."""
    parsed = response.parsed
    calls = list(response.message.get("tool_calls", ())) if request.parse_calls else []
    content = parsed.content if request.parse_calls or not parsed.calls else response.text
    shown = visible_text(content, SamplingParams(1, stop_strings=request.stops))
    return Reply(
        content=shown,
        reasoning=parsed.reasoning,
        calls=calls,
        finish_reason="tool_calls" if calls else response.finish_reason,
        stop_string=shown != content,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(response.call.response_ids),
        model=request.model,
    )


def read_chat_request(body: Any) -> ChatRequest:
    """The body of ``POST /v1/chat/completions``.

    Raises:
        BadRequest: a field that is missing, unknown, not available, of a wrong type or out of range.
    """
    fields = Fields(body, _CHAT, None, _UNAVAILABLE)
    messages = fields.get("messages", list, [])
    if not messages:
        raise BadRequest("messages: is needed, a list of messages", "messages")
    shared = fields.shared(NO_LIMIT, 0, "top_logprobs")
    tools = [_chat_tool(tool) for tool in fields.get("tools", list, [])]
    return ChatRequest(
        messages=named_tools([_plain(read_message(message, tools=True, images=True)) for message in messages]),
        tools=tools,
        **sampling_options(fields, shared["params"]),
        model=fields.model,
        stream=shared["stream"],
        include_usage=shared["include_usage"],
        **read_tool_choice(fields.get("tool_choice", (str, dict), "auto"), tools),
    )


def sampling_options(fields: Fields, params: SamplingParams) -> dict[str, Any]:
    """The arguments of :class:`ChatRequest` that say how a response is sampled."""
    limited = any(fields.given(name) for name in LIMITS)
    return {
        "max_tokens": params.max_new_tokens if limited else None,
        "stops": params.stop_strings,
        "sampling": tuple(name for name in SAMPLING if fields.given(name)),
    }


def read_tool_choice(choice: Any, tools: Sequence[Message]) -> dict[str, Any]:
    """The arguments of :class:`ChatRequest` that say whether a tool is called, from OpenAI's ``tool_choice``.

    Raises:
        BadRequest: no such choice, or one that the offered tools do not allow.
    """
    offered = [tool["function"]["name"] for tool in tools]
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
    names = [one.get("name") if isinstance(one, Mapping) else one for one in named]
    must_call = demanded_tools(offered if choice == "required" else names, offered, choice == "required")
    return {"parse_calls": choice != "none", "must_call": must_call, "tool_choice": choice}


def demanded_tools(names: Sequence[Any], offered: Sequence[str], some: bool) -> tuple[str, ...]:
    """``names`` of tools of which one must be called.

    Args:
        some: there must be one.

    Raises:
        BadRequest: there is none, or one that is not offered.
    """
    if some and not names:
        raise BadRequest("tool_choice: demands a call, and the request offers no tools", "tool_choice")
    missing = [name for name in names if name not in offered]
    if missing:
        there = f"there are {', '.join(offered)}" if offered else "it offers none"
        raise BadRequest(f"tool_choice: {missing[0]!r} is not among the request's tools; {there}", "tool_choice")
    return tuple(dict.fromkeys(names))


def named_tools(messages: list[Message]) -> list[Message]:
    """Add the name of the answered tool to tool messages, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _plain(message: Message) -> Message:
    """The fields that templates use: client libraries add others."""
    role = {"developer": "system"}.get(message["role"], message["role"])
    kept = {key: message[key] for key in ("content", "tool_calls", "tool_call_id", "name") if message.get(key)}
    return {"role": role, "content": ""} | kept


def _chat_tool(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return tool_schema({**function, "type": tool.get("type")} if isinstance(function, Mapping) else None, "function")


def tool_schema(tool: Any, kind: str, parameters: str = "parameters") -> Message:
    """The schema of a function, without the fields that only its interface knows.

    Args:
        kind: the ``type`` that it must have; ``custom`` may be left out.
        parameters: its field with the schema of the arguments.

    Raises:
        BadRequest: it has another type, or no name.
    """
    if not isinstance(tool, Mapping) or (tool.get("type") or "custom") != kind:
        found = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(f"tools: only tools of type {kind} are available, not {found!r}", "tools")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("tools: each must have a name", "tools")
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def chat_body(reply: Reply) -> dict[str, Any]:
    """A chat completion."""
    message: Message = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return _head(reply, "chat.completion") | {"choices": [choice], "usage": reply.usage}


def chat_events(reply: Reply, include_usage: bool) -> Iterator[bytes]:
    """A chat completion as a stream."""
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    yield chunk({"role": "assistant", "content": ""})
    if reply.reasoning:
        yield chunk({"reasoning_content": reply.reasoning})
    for piece in pieces(reply.content):
        yield chunk({"content": piece})
    for index, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": index} | _call(call)]})
    yield chunk({}, reply.finish_reason)
    if include_usage:
        yield event(head | {"choices": [], "usage": reply.usage})
    yield b"data: [DONE]\n\n"


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """Pieces of a text for a stream, which begins once the whole response is generated."""
    for begin in range(0, len(text), size):
        yield text[begin : begin + size]


def arguments_text(call: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON; those that cannot be parsed as the policy wrote them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def identifier(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": identifier("chatcmpl-"), "object": kind, "created": int(time.time()), "model": reply.model}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


def joined_texts(parts: Any, kinds: Sequence[str], field_name: str) -> str:
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
