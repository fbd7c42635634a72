"""OpenAI's chat completions, and completions with the log-probs of prompts that vLLM adds."""

from __future__ import annotations

import json
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
