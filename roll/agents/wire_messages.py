"""Anthropic's Messages API for agents' programs: requests to :class:`ChatRequest`, replies to bodies and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from roll.agents.chat_ids import Message
from roll.agents.wire_chat import (
    ChatRequest,
    Reply,
    demanded_tools,
    identifier,
    joined_texts,
    named_tools,
    pieces,
    sampling_options,
    tool_schema,
)
from roll.serving.requests import BadRequest, Fields
from roll.serving.responses import event

_KNOWN = (
    *("max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "tool_choice", "tools"),
    *("top_k", "top_p"),
)
_HINTS = frozenset({"cache_control", "context_management", "diagnostics", "inference_geo", "speed", "thinking"})
"""Fields that request nothing that a response could lack; how much to think is up to the policy."""
_UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "output_config": (None, {}),
    "output_format": (None,),
}
_CHOICES = ("auto", "any", "tool", "none")
_UNREADABLE = "INVALID_JSON"
"""Key under which Anthropic's documentation wraps arguments that are no object, as an input must be one."""


def read_messages_request(body: Any, counting: bool = False) -> ChatRequest:
    """The body of ``POST /v1/messages``.

    Args:
        counting: of ``/v1/messages/count_tokens``, which needs no ``max_tokens``.

    Raises:
        BadRequest: a field that is missing, unknown, not available, of a wrong type or out of range.
    """
    fields = Fields(body, {*_KNOWN, *_HINTS}, None, _UNAVAILABLE)
    listed = fields.get("messages", list, [])
    if not listed:
        raise BadRequest("messages: is needed, a list of messages", "messages")
    if not counting and not fields.given("max_tokens"):
        raise BadRequest("max_tokens: is needed, an integer", "max_tokens")
    system = joined_texts(fields.get("system", (str, list), None), ("text",), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in listed:
        messages += _read_message(message)
    tools = [tool_schema(tool, "custom", "input_schema") for tool in fields.get("tools", list, [])]
    return ChatRequest(
        messages=named_tools(messages),
        tools=tools,
        **sampling_options(fields, fields.sampling(fields.get("max_tokens", int, 1), "stop_sequences")),
        model=fields.model,
        stream=fields.get("stream", bool, False),
        **_read_choice(fields.get("tool_choice", dict, {"type": "auto"}), tools),
    )


def _read_choice(choice: Mapping[str, Any], tools: list[Message]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind not in _CHOICES:
        raise BadRequest(f"tool_choice: type must be one of {', '.join(_CHOICES)}", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        rule = "is not available in an episode: a response may have several calls"
        raise BadRequest(f"tool_choice.disable_parallel_tool_use: {rule}", "tool_choice")
    offered = [tool["function"]["name"] for tool in tools]
    names = offered if kind == "any" else [choice.get("name")] if kind == "tool" else []
    return {"parse_calls": kind != "none", "must_call": demanded_tools(names, offered, kind == "any")}


def _read_message(message: Any) -> list[Message]:
    """A message with its blocks: tool results each, then the text; or the text of a response with its calls."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest("messages: each must have the role user or assistant", "messages")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise BadRequest("messages: content must be a text or a list of blocks", "messages")
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            value = block.get("input") or {}
            unreadable = value.get(_UNREADABLE) if isinstance(value, Mapping) and len(value) == 1 else None
            function = {"name": str(block.get("name")), "arguments": unreadable or value}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = joined_texts(block.get("content"), ("text",), "messages")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    text = joined_texts(texts, ("text",), "messages")
    if role == "assistant":
        response: Message = {"role": role, "content": text}
        return [response | {"tool_calls": calls} if calls else response]
    return [*results, {"role": role, "content": text}] if texts or not results else results


def messages_body(reply: Reply, stop_sequence: str | None = None) -> dict[str, Any]:
    """A message."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = "stop_sequence" if reply.stop_string else reasons.get(reply.finish_reason, "end_turn")
    blocks: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = {_UNREADABLE: arguments}
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return {
        "id": identifier("msg_"),
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": stop_sequence if reason == "stop_sequence" else None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def messages_events(reply: Reply, body: Mapping[str, Any]) -> Iterator[bytes]:
    """A message as a stream of events."""

    def typed(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    usage = body["usage"] | {"output_tokens": 0}
    begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield typed("message_start", message=begun)
    for index, block in enumerate(body["content"]):
        if block["type"] == "text":
            yield typed("content_block_start", index=index, content_block={"type": "text", "text": ""})
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            yield typed("content_block_start", index=index, content_block=block | {"input": {}})
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]
        for delta in deltas:
            yield typed("content_block_delta", index=index, delta=delta)
        yield typed("content_block_stop", index=index)
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield typed("message_delta", delta=ended, usage={"output_tokens": body["usage"]["output_tokens"]})
    yield typed("message_stop")
