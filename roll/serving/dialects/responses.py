"""OpenAI's Responses API."""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll.serving.dialects.requests import (
    HINTS,
    ChatRequest,
    Fields,
    Message,
    Reply,
    arguments_text,
    call_of,
    head,
    joined_texts,
    named_tools,
    pieces,
    read_role,
    read_tool_choice,
    tool_schema,
)
from roll.serving.http import BadRequest, event

_KNOWN = (
    *("input", "instructions", "max_output_tokens", "model", "previous_response_id", "stream", "stream_options"),
    *("temperature", "tool_choice", "tools", "top_p"),
)
# Fields that agents always send; `text` may only request plain text.
_HINTS = frozenset({*HINTS, "context_management", "include", "reasoning", "text", "truncation"})
_TEXTS = ("input_text", "output_text", "text")


def read_responses(body: object, earlier: Mapping[str, list[Message]]) -> ChatRequest:
    """The body of ``POST /v1/responses``. ``earlier``: response id to the conversation up to it, for
    ``previous_response_id``. Raises ``BadRequest``: a field that is missing, unknown, not available, of a wrong type or
    out of range."""
    fields = Fields(body, (*_KNOWN, *_HINTS))
    kind = (fields.get("text", dict, {}).get("format") or {"type": "text"}).get("type")
    if kind != "text":
        raise BadRequest(f"text.format: {kind!r} is not available in an episode", "text")
    messages: list[Message] = []
    previous = fields.get("previous_response_id", str, None)
    if previous is not None:
        if previous not in earlier:
            raise BadRequest(f"previous_response_id: no response {previous!r} in this episode", "previous_response_id")
        messages = copy.deepcopy(earlier[previous])
    messages += _read_items(fields.get("input", (str, list), []))
    if not messages:
        raise BadRequest("input: is needed, a text or a list of items", "input")
    # Instructions are not part of the conversation that a later request continues.
    instructions = fields.get("instructions", str, "")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    tools = [tool_schema(tool) for tool in fields.get("tools", list, [])]
    return ChatRequest(
        named_tools(messages),
        tools,
        **fields.shared("max_output_tokens"),
        **read_tool_choice(fields.get("tool_choice", (str, dict), "auto"), tools),
        own_messages=int(bool(instructions)),
    )


def _read_items(items: str | list[Any]) -> list[Message]:
    """Messages of input items; the text and the calls of one response become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            role = read_role(item)
            if role not in ("user", "assistant", "system"):
                raise BadRequest(f"input: a message of role {role!r} is not understood", "input")
            messages.append({"role": role, "content": joined_texts(item.get("content"), _TEXTS, "input")})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise BadRequest("input: a function_call needs a name", "input")
            call = call_of(item.get("call_id"), item["name"], item.get("arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = joined_texts(item.get("output"), _TEXTS, "input")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        elif kind != "reasoning":
            raise BadRequest(f"input: an item of type {kind!r} is not understood", "input")
    return messages


def responses_body(reply: Reply, request: ChatRequest) -> dict[str, Any]:
    """A response."""
    cut = reply.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    items: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        items.append(message | {"status": status, "content": [part]})
    for call in reply.calls:
        begun = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], "status": status}
        items.append(begun | {"name": call["function"]["name"], "arguments": arguments_text(call)})
    return head("resp_", "response", reply.model, created="created_at") | {
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "metadata": {},
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def responses_events(body: Mapping[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """A response as a stream of events."""
    numbers = itertools.count()

    def numbered(kind: str, **fields: object) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            empty = part | {"text": ""}
            opened = item | {"status": "in_progress", "content": []}
            inside = place | {"content_index": 0}
            yield numbered("response.output_item.added", output_index=index, item=opened)
            yield numbered("response.content_part.added", **inside, part=empty)
            for piece in pieces(part["text"]):
                yield numbered("response.output_text.delta", **inside, delta=piece, logprobs=[])
            yield numbered("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield numbered("response.content_part.done", **inside, part=part)
        else:
            opened = item | {"status": "in_progress", "arguments": ""}
            yield numbered("response.output_item.added", output_index=index, item=opened)
            yield numbered("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield numbered("response.function_call_arguments.done", **place, **done)
        yield numbered("response.output_item.done", output_index=index, item=item)
    yield numbered(f"response.{body['status']}", response=dict(body))
