"""OpenAI's interfaces: chat completions, completions with the log-probs of prompts that vLLM adds, and Responses."""

from __future__ import annotations

import copy
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.serving.dialects.requests import (
    BASIC,
    HINTS,
    LIMITS,
    MAX_MESSAGES,
    MAX_NUMBER,
    MAX_TOP_LOG_PROBS,
    SERVED,
    ChatRequest,
    Fields,
    Message,
    ModelRequest,
    Reply,
    arguments_text,
    call_of,
    head,
    is_id,
    joined_texts,
    named_tools,
    pieces,
    read_role,
    read_tool_choice,
    tool_schema,
    usage_of,
)
from roll.serving.http import BadRequest, event

MAX_TEMPLATE_KWARGS, MAX_TEMPLATE_TEXT = 32, 1000  # variables for a chat template, and characters of each
MAX_SCHEMA_TEXT = 65_536  # an engine compiles it between two steps of everybody's samples
MAX_PROMPTS = 1024
# Without parallel_tool_calls: a call that is left out would be missing in the conversation that is trained on.
_IN_EPISODE = (*BASIC, *HINTS, "messages", "tool_choice", "tools")
_SERVED = (
    *(*SERVED, "add_generation_prompt", "chat_template_kwargs", "logprobs", "messages", "parallel_tool_calls"),
    *("response_format", "tool_choice", "tools", "top_logprobs"),
)
_COMPLETION = (*SERVED, "echo", "logprobs", "prompt", "prompt_logprobs")


def read_chat(body: object, model: str | None = None) -> ChatRequest:
    """The body of ``POST /v1/chat/completions``. ``model``: the model that is served; None: the policy of an episode,
    under any name, which knows tools and images. Raises ``BadRequest``: a field that is missing, unknown, not
    available, of a wrong type or out of range."""
    in_episode = model is None
    fields = Fields(body, _IN_EPISODE if in_episode else _SERVED, model)
    messages = [_read_message(message, in_episode) for message in fields.listed("messages", "messages", MAX_MESSAGES)]
    log_probs, top = fields.get("logprobs", bool, False), fields.get("top_logprobs", int, 0)
    if top and not log_probs:
        raise BadRequest("top_logprobs: needs logprobs: true", "top_logprobs")
    tools = [tool_schema(tool) for tool in fields.get("tools", list, [])]
    choice = read_tool_choice(fields.get("tool_choice", (str, dict), "auto"), tools)
    json_schema = None if in_episode else _json_schema(fields.get("response_format", dict, {}))
    if json_schema is not None and tools and choice["parse_calls"]:
        raise BadRequest("response_format: goes without tools, or with tool_choice: none", "response_format")
    return ChatRequest(
        named_tools(messages),
        tools,
        **fields.shared(*LIMITS, top_log_probs=top, json_schema=json_schema),
        **choice,
        parallel_calls=fields.get("parallel_tool_calls", bool, True),
        log_probs=log_probs,
        template_kwargs=_template_kwargs(fields),
        add_generation_prompt=fields.get("add_generation_prompt", bool, True),
    )


def _json_schema(response_format: Mapping[str, Any]) -> str | None:
    """The JSON schema, as a text, of what a response must be; None: any text."""
    name, kind = "response_format", response_format.get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{name}: type must be text, json_object or json_schema, not {kind!r}"[:300], name)
    if kind == "text":
        return None
    inside = response_format.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = inside.get("schema") if isinstance(inside, Mapping) else None
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{name}: json_schema must be an object with a name and a schema", name)
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_TEXT:
        raise BadRequest(f"{name}: the schema has {len(text)} characters, at most {MAX_SCHEMA_TEXT} are read", name)
    return text


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    name = "chat_template_kwargs"
    kwargs: dict[str, Any] = fields.get(name, dict, {})
    plain = all(
        value is None
        or (isinstance(value, int | float) and abs(value) <= MAX_NUMBER)
        or (isinstance(value, str) and len(value) <= MAX_TEMPLATE_TEXT)
        for value in kwargs.values()
    )
    if len(kwargs) > MAX_TEMPLATE_KWARGS or not plain:
        rule = f"at most {MAX_TEMPLATE_KWARGS} switches, numbers or texts of up to {MAX_TEMPLATE_TEXT} characters"
        raise BadRequest(f"{name}: must be {rule}", name)
    return kwargs


def _read_message(message: object, in_episode: bool) -> Message:
    """A message with its content as one text. In an episode it may have images, as ``data:`` URIs, and keeps only the
    fields that templates use: client libraries add others."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("messages: each must be an object with role and content", "messages")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is None and not calls:
        raise BadRequest("messages: content must be a text", "messages")
    if in_episode and isinstance(content, list) and any(map(_is_image, content)):
        joined_texts([part for part in content if not _is_image(part)])
    else:
        content = joined_texts(content)
    kept = {name: message[name] for name in ("tool_call_id", "name") if message.get(name)} if in_episode else message
    if not isinstance(calls, list):
        raise BadRequest("messages: tool_calls must be a list of calls", "messages")
    read = {**kept, "role": read_role(message), "content": content}
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("messages: each of tool_calls must have a function with a name", "messages")
    made = [call_of(call.get("id", ""), call["function"]["name"], call["function"].get("arguments")) for call in calls]
    return read | {"tool_calls": made} if made else read


def _is_image(part: object) -> bool:
    value = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
    url = value.get("url") if isinstance(value, Mapping) else value
    return isinstance(url, str) and url.startswith("data:")


def chat_message(content: str, reasoning: str, calls: Sequence[Message]) -> Message:
    """The message of a response, with thinking and calls as fields of their own."""
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": arguments_text(call)}} for call in calls
        ]
    return message | {"reasoning_content": reasoning} if reasoning else message


def chat_body(reply: Reply, request: ChatRequest) -> dict[str, Any]:
    """A chat completion."""
    message = chat_message(reply.content, reply.reasoning, reply.calls)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    usage = usage_of(reply.prompt_tokens, reply.completion_tokens)
    return head("chatcmpl-", "chat.completion", reply.model) | {"choices": [choice], "usage": usage}


def chat_events(body: Mapping[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """A chat completion as a stream."""
    begun = head("chatcmpl-", "chat.completion.chunk", body["model"])
    for choice in body["choices"]:
        message, index = choice["message"], {"index": choice["index"]}
        deltas: list[Message] = [{"role": "assistant", "content": ""}]
        if "reasoning_content" in message:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        deltas += [{"content": piece} for piece in pieces(message["content"] or "")]
        deltas += [{"tool_calls": [{"index": at} | call]} for at, call in enumerate(message.get("tool_calls", ()))]
        yield from (chunk(begun, {**index, "delta": delta}) for delta in deltas)
        # What a request may add to a sample comes with its end.
        added = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
        yield chunk(begun, {**index, "delta": {}, **added}, choice["finish_reason"])
    yield from closing(begun, body["usage"] if request.include_usage else None)


def chunk(begun: Mapping[str, Any], choice: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
    """An event of a stream; ``begun``: the fields that all its events share (:func:`head`)."""
    return event({**begun, "choices": [{"index": 0, **choice, "finish_reason": finish_reason}]})


def closing(begun: Mapping[str, Any], usage: Mapping[str, int] | None) -> Iterator[bytes]:
    """The last events of a stream; ``usage``: None where the request does not include it."""
    if usage is not None:
        yield event({**begun, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionRequest(ModelRequest):
    """A request for continuations of prompts."""

    prompts: Sequence[str | Sequence[int]]
    echo: bool = False  # responses begin with their prompt, and log-probs with those of the prompt
    # Number of most probable tokens reported at each position of the prompt, besides its own (-1: all); None: no
    # log-probs of the prompt.
    prompt_log_probs: int | None = None


def read_completion(body: object, model: str) -> CompletionRequest:
    """The body of ``POST /v1/completions``; a prompt is a text or a list of token ids, or a list of either. Raises
    ``BadRequest``: a field that is missing, unknown, of a wrong type or out of range."""
    fields = Fields(body, _COMPLETION, model)
    log_probs = fields.get("logprobs", int, None)
    given = fields.get("prompt", (str, list), None)
    prompts = [given] if isinstance(given, str) or (given and all(map(is_id, given))) else given
    if not prompts or not all(
        isinstance(one, str) or (isinstance(one, list) and all(map(is_id, one)) and one) for one in prompts
    ):
        raise BadRequest("prompt: is needed: a text, a list of token ids, or a list of either", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt: a request may have {MAX_PROMPTS} prompts at most, not {len(prompts)}", "prompt")
    echo = fields.get("echo", bool, False)
    of_prompt = fields.get("prompt_logprobs", int, None)
    for name, is_set in (("echo", echo), ("prompt_logprobs", of_prompt is not None)):
        if is_set and fields.get("stream", bool, False):
            raise BadRequest(f"{name}: goes with stream: false", name)
    if of_prompt is not None and not -1 <= of_prompt <= MAX_TOP_LOG_PROBS:
        raise BadRequest(f"prompt_logprobs: must be from -1 (all) to {MAX_TOP_LOG_PROBS}", "prompt_logprobs")
    shared = fields.shared(
        *LIMITS,
        default_tokens=16,  # OpenAI's; chats go on to the end of the context
        top_log_probs=log_probs or 0,
        top_field="logprobs",
        num_prompts=len(prompts),
    )
    return CompletionRequest(prompts, echo, of_prompt, log_probs=log_probs is not None, **shared)


_RESPONSES = (
    *("input", "instructions", "max_output_tokens", "model", "previous_response_id", "stream", "stream_options"),
    *("temperature", "tool_choice", "tools", "top_p"),
)
# Fields that agents always send; `text` may only request plain text.
_RESPONSES_HINTS = frozenset({*HINTS, "context_management", "include", "reasoning", "text", "truncation"})
_TEXTS = ("input_text", "output_text", "text")


def read_responses(body: object, earlier: Mapping[str, list[Message]]) -> ChatRequest:
    """The body of ``POST /v1/responses``. ``earlier``: response id to the conversation up to it, for
    ``previous_response_id``. Raises ``BadRequest``: a field that is missing, unknown, not available, of a wrong type or
    out of range."""
    fields = Fields(body, (*_RESPONSES, *_RESPONSES_HINTS))
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
