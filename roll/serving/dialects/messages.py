"""Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll.serving.dialects.requests import (
    MAX_MESSAGES,
    ChatRequest,
    Fields,
    Message,
    Reply,
    call_of,
    joined_texts,
    named_tools,
    pieces,
    read_tool_choice,
    tool_schema,
)
from roll.serving.http import BadRequest, event

_KNOWN = (
    *("max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "tool_choice", "tools"),
    *("top_k", "top_p"),
)
# Fields that request nothing that a response could lack; how much to think is up to the policy.
_HINTS = ("cache_control", "context_management", "diagnostics", "inference_geo", "speed", "thinking")
_CHOICES = ("auto", "any", "tool", "none")
# Key under which Anthropic's documentation wraps arguments that are not an object, which inputs must be.
_UNREADABLE = "INVALID_JSON"


def read_messages(body: object, counting: bool = False) -> ChatRequest:
    """The body of ``POST /v1/messages``, or ``counting``, of ``/v1/messages/count_tokens``, which needs no
    ``max_tokens``. Raises ``BadRequest``: a field that is missing, unknown, not available, of a wrong type or out of
    range."""
    fields = Fields(body, (*_KNOWN, *_HINTS))
    listed = fields.listed("messages", "messages", MAX_MESSAGES)
    if not counting and fields.get("max_tokens", int, None) is None:
        raise BadRequest("max_tokens: is needed, an integer", "max_tokens")
    system = joined_texts(fields.get("system", (str, list), None), field_name="system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in listed:
        messages += _read_message(message)
    tools = [tool_schema(tool, "custom", "input_schema") for tool in fields.get("tools", list, [])]
    choice: Mapping[str, Any] = fields.get("tool_choice", dict, {"type": "auto"})
    kind = choice.get("type")
    if kind not in _CHOICES:
        raise BadRequest(f"tool_choice: type must be one of {', '.join(_CHOICES)}", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        rule = "is not available in an episode: a response may have several calls"
        raise BadRequest(f"tool_choice.disable_parallel_tool_use: {rule}", "tool_choice")
    as_openai = {"any": "required", "tool": {"type": "function", "name": choice.get("name")}}.get(kind, kind)
    return ChatRequest(
        named_tools(messages),
        tools,
        **fields.shared("max_tokens", stop="stop_sequences"),
        **read_tool_choice(as_openai, tools),
    )


def _read_message(message: object) -> list[Message]:
    """A message with its blocks: tool results each, then the text; or the text of a response with its calls."""
    fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    role = fields.get("role")
    if role not in ("user", "assistant", "system"):
        raise BadRequest("messages: each must have the role user or assistant", "messages")
    content = fields.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise BadRequest("messages: content must be a text or a list of blocks", "messages")
    texts: list[Any] = []
    calls: list[Message] = []
    results: list[Message] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            value = block.get("input") or {}
            unreadable = value.get(_UNREADABLE) if isinstance(value, Mapping) and len(value) == 1 else None
            calls.append(call_of(block.get("id"), str(block.get("name")), unreadable or value))
        elif kind == "tool_result" and role == "user":
            text = joined_texts(block.get("content"))
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    said: Message = {"role": role, "content": joined_texts(texts)}
    if role == "assistant":
        return [said | {"tool_calls": calls} if calls else said]
    return [*results, said] if texts or not results else results


def messages_body(reply: Reply, request: ChatRequest) -> dict[str, Any]:
    """A message."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    blocks: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = {_UNREADABLE: arguments}
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    stops = request.params.stop_strings
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": blocks,
        "stop_reason": "stop_sequence" if reply.stop_string else reasons.get(reply.finish_reason, "end_turn"),
        "stop_sequence": stops[0] if reply.stop_string and len(stops) == 1 else None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def messages_events(body: Mapping[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """A message as a stream of events."""

    def typed(kind: str, **fields: object) -> bytes:
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
