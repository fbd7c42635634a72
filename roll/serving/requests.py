"""Request bodies in OpenAI's form, read strictly: what is not understood is refused, never ignored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.requests import Request

from roll.config.reading.errors import did_you_mean
from roll.strategies.engines.requests import SamplingParams, check_sampling_params

IGNORED = frozenset({"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user"})
"""Fields that do not change the response."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}
"""Fields of OpenAI's that are not available, and the values that ask for nothing."""
SHARED = (
    "include_stop_str_in_output",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "repetition_penalty",
    "return_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
)
CHAT = (*SHARED, "add_generation_prompt", "chat_template_kwargs", "logprobs", "messages", "top_logprobs")
COMPLETION = (*SHARED, "echo", "logprobs", "prompt", "prompt_logprobs")
COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats go on to the end of the context."""
NO_LIMIT = 1 << 30
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_SAMPLES = 1024
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TOP_LOG_PROBS = 16384
"""Most probable tokens at one position, over all samples of a request."""
MAX_NUMBER = 2.0**64
"""Numbers beyond it mean nothing anywhere."""
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_TEXT = 1000


class BadRequest(ValueError):
    """A body that cannot be served.

    Args:
        field: the part that is wrong.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class ParsedRequest:
    """Fields common to both endpoints."""

    params: SamplingParams
    num_samples: int = 1
    stream: bool = False
    include_usage: bool = False
    """End a stream with the number of tokens."""
    log_probs: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True)
class ParsedChat(ParsedRequest):
    messages: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class ParsedCompletion(ParsedRequest):
    prompts: Sequence[str | Sequence[int]] = ()
    echo: bool = False
    """Responses begin with their prompt, and log-probs with those of the prompt."""
    prompt_log_probs: int | None = None
    """Number of most probable tokens reported at each position of the prompt, besides its own (-1: all); None: no
    log-probs of the prompt."""


def read_chat(body: Any, model: str) -> ParsedChat:
    """The body of ``POST /v1/chat/completions``.

    Raises:
        BadRequest: a field that is missing, unknown, of a wrong type or out of range.
    """
    fields = Fields(body, CHAT, model)
    messages = fields.get("messages", list, None)
    if not messages or len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages: is needed, a list of 1 to {MAX_MESSAGES} messages", "messages")
    log_probs = fields.get("logprobs", bool, False)
    top = fields.get("top_logprobs", int, 0)
    if top and not log_probs:
        raise BadRequest("top_logprobs: needs logprobs: true", "top_logprobs")
    return ParsedChat(
        **fields.shared(NO_LIMIT, top, "top_logprobs"),
        log_probs=log_probs,
        messages=[read_message(message) for message in messages],
        template_kwargs=fields.template_kwargs(),
        add_generation_prompt=fields.get("add_generation_prompt", bool, True),
    )


def read_completion(body: Any, model: str) -> ParsedCompletion:
    """The body of ``POST /v1/completions``; a prompt is a text or a list of token ids, or a list of either.

    Raises:
        BadRequest: a field that is missing, unknown, of a wrong type or out of range.
    """
    fields = Fields(body, COMPLETION, model)
    log_probs = fields.get("logprobs", int, None)
    prompts = _prompts(fields.get("prompt", (str, list), None))
    echo = fields.get("echo", bool, False)
    of_prompt = fields.get("prompt_logprobs", int, None)
    for name, is_set in (("echo", echo), ("prompt_logprobs", of_prompt is not None)):
        if is_set and fields.get("stream", bool, False):
            raise BadRequest(f"{name}: goes with stream: false", name)
    if of_prompt is not None and not -1 <= of_prompt <= MAX_TOP_LOG_PROBS:
        raise BadRequest(f"prompt_logprobs: must be from -1 (all) to {MAX_TOP_LOG_PROBS}", "prompt_logprobs")
    return ParsedCompletion(
        **fields.shared(COMPLETION_TOKENS, log_probs or 0, "logprobs", len(prompts)),
        log_probs=log_probs is not None,
        prompts=prompts,
        echo=echo,
        prompt_log_probs=of_prompt,
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and all(_is_id(token) for token in prompt)):
        return [prompt]
    valid = prompt and all(isinstance(p, str) or (isinstance(p, list) and all(map(_is_id, p)) and p) for p in prompt)
    if not valid:
        raise BadRequest("prompt: is needed: a text, a list of token ids, or a list of either", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"prompt: a request may have {MAX_PROMPTS} prompts at most, not {len(prompt)}", "prompt")
    return list(prompt)


def _is_id(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)


def read_message(message: Any, tools: bool = False, images: bool = False) -> dict[str, Any]:
    """A message whose content is text; parts of type ``text`` are joined.

    Args:
        tools: responses may have ``tool_calls``, and then no content.
        images: a content with parts of type ``image_url`` stays as it is, its images given as ``data:`` URIs.

    Raises:
        BadRequest: anything else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("messages: each must be an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_text_of(part) for part in content]
        if images and None in parts and all(map(_is_text_or_image, content)):
            return {**message, "content": content}
        if not all(isinstance(part, str) for part in parts):
            raise BadRequest("messages: only content of type text is understood", "messages")
        content = "".join(str(part) for part in parts)
    calls = message.get("tool_calls") if tools else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRequest("messages: content must be a text", "messages")
    if calls:
        return {**message, "content": content, "tool_calls": read_tool_calls(calls)}
    return {**message, "content": content}


def _is_text_or_image(part: Any) -> bool:
    if _text_of(part) is not None:
        return True
    value = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
    url = value.get("url") if isinstance(value, Mapping) else value
    return isinstance(url, str) and url.startswith("data:")


def read_tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls of a response in OpenAI's form, with arguments as a mapping where they are JSON.

    Raises:
        BadRequest: not a list of functions with names.
    """
    if not isinstance(calls, list):
        raise BadRequest("messages: tool_calls must be a list of calls", "messages")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("messages: each of tool_calls must have a function with a name", "messages")
        name = {"name": function["name"], "arguments": read_arguments(function.get("arguments"))}
        found.append({"id": str(dict(call).get("id", "")), "type": "function", "function": name})
    return found


def read_arguments(arguments: Any) -> Any:
    """Arguments of a call as a mapping; what is no JSON object as it is."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return {} if arguments is None else arguments


def _text_of(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None


class Fields:
    """A body's fields, checked by type as they are read.

    Args:
        known: fields that are understood.
        model: the model that is served; None: any name is accepted.
        neutral: fields that are understood, too, and the only values that they may have.

    Raises:
        BadRequest: no object, an unknown field, a value of a field that is not available, or another model.
    """

    def __init__(
        self, body: Any, known: Collection[str], model: str | None, neutral: Mapping[str, Collection[Any]] | None = None
    ) -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        self._body = body
        only = {**{name: values for name, values in NEUTRAL.items() if name not in known}, **(neutral or {})}
        for name, value in body.items():
            if name in only:
                if value not in only[name]:
                    raise BadRequest(f"{name}: is not available here", name)
            elif name not in known and name not in IGNORED:
                hint = did_you_mean(name, known, "; did you mean {!r}?")
                raise BadRequest(f"{name}: unknown field{hint}", name)
        self.model = self.get("model", str, model or "")
        if model is not None and self.model != model:
            asked = self.model
            raise BadRequest(f"model: {asked!r} is not served here, only {model!r}", "model")

    def given(self, name: str) -> bool:
        """True if the field is there, and not null."""
        return self._body.get(name) is not None

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """A field's value; null and absence give the default."""
        value = self._body.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRequest(f"{name}: must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}"[:300], name)
        if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise BadRequest(f"{name}: must be from -2^64 to 2^64", name)
        return value

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template: switches, numbers and short texts."""
        name = "chat_template_kwargs"
        kwargs: dict[str, Any] = self.get(name, dict, {})
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

    def shared(self, default_tokens: int, top_log_probs: int, top_field: str, num_prompts: int = 1) -> dict[str, Any]:
        """Arguments of :class:`ParsedRequest`.

        Args:
            top_field: the field that has asked for ``top_log_probs``.
        """
        limit = self.get("max_completion_tokens", int, self.get("max_tokens", int, default_tokens))
        num_samples = self.get("n", int, 1)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise BadRequest(f"n: must be from 1 to {MAX_SAMPLES}", "n")
        if top_log_probs * num_samples * num_prompts > MAX_TOP_LOG_PROBS:
            rule = f"must be at most {MAX_TOP_LOG_PROBS} over all samples of a request"
            raise BadRequest(
                f"{top_field}: {rule}, not {top_log_probs} for each of {num_samples * num_prompts}", top_field
            )
        return {
            "params": self.sampling(limit, "stop", top_log_probs),
            "num_samples": num_samples,
            "stream": self.get("stream", bool, False),
            "include_usage": bool(self.get("stream_options", dict, {}).get("include_usage")),
            "return_token_ids": self.get("return_token_ids", bool, False),
        }

    def sampling(self, max_new_tokens: int, stop_field: str = "stop", top_log_probs: int = 0) -> SamplingParams:
        """Sampling parameters, as far as the body has them.

        Raises:
            BadRequest: one is out of range.
        """
        number = (int, float)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.get("min_tokens", int, 0),
            temperature=float(self.get("temperature", number, 1.0)),
            top_p=float(self.get("top_p", number, 1.0)),
            top_k=self.get("top_k", int, -1),
            min_p=float(self.get("min_p", number, 0.0)),
            repetition_penalty=float(self.get("repetition_penalty", number, 1.0)),
            stop_token_ids=self._stop_token_ids(),
            stop_strings=self._stops(stop_field),
            include_stop_str_in_output=self.get("include_stop_str_in_output", bool, False),
            top_log_probs=top_log_probs,
            seed=self.get("seed", int, None),
        )
        try:
            check_sampling_params(params, "request")
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return params

    def _stops(self, name: str) -> tuple[str, ...]:
        stop = self.get(name, (str, list), [])
        stops = [stop] if isinstance(stop, str) else stop
        valid = all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stops)
        if len(stops) > MAX_STOPS or not valid:
            rule = f"a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
            raise BadRequest(f"{name}: must be {rule}", name)
        return tuple(stops)

    def _stop_token_ids(self) -> tuple[int, ...]:
        ids = self.get("stop_token_ids", list, [])
        if not all(map(_is_id, ids)):
            raise BadRequest("stop_token_ids: must be a list of token ids", "stop_token_ids")
        return tuple(ids)


MAX_BODY = 32 * 2**20
"""Bytes; a million token ids take about seven."""
MAX_DEPTH = 32
"""Lists and objects inside each other."""
MAX_CONTAINERS, MAX_VALUES = 1 << 18, 1 << 22
"""Lists and objects of a body, and values: by the characters that begin and separate them, so texts count too. The
parser of Python keeps the interpreter to itself, for seconds where there are millions."""
MAX_PROMPT_LOG_PROBS = 1 << 20
"""Log-probs of prompts in one response."""


class TooLong(BadRequest):
    """A body beyond :data:`MAX_BODY`."""


async def read_json(request: Request, in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> Any:
    """The body of a request, read no further than it may be long, and parsed in another thread.

    Raises:
        TooLong: it is longer, or has more parts than can be parsed in a moment.
        BadRequest: no JSON, nested too deep, or with text that is no Unicode.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY:
            raise TooLong(f"the body is longer than {MAX_BODY} bytes")
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS or content.count(b",") > MAX_VALUES:
        raise TooLong(f"the body has more than {MAX_CONTAINERS} lists and objects, or {MAX_VALUES} values")
    return await in_thread(parse_json, bytes(content))


def parse_json(content: bytes) -> Any:
    """
    Raises:
        BadRequest: no JSON, nested too deep, or with text that is no Unicode.
    """
    try:
        body = json.loads(content, parse_constant=_no_number)
    except RecursionError as error:
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # also what is no UTF-8, and integers of thousands of digits
        raise BadRequest(f"the body is not JSON: {error}") from error
    check_tree(body)
    return body


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_tree(body: Any) -> None:
    """
    Raises:
        BadRequest: nested too deep, or a text with half a surrogate pair, which no tokenizer takes.
    """
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.keys()
                below += node.values()
            elif isinstance(node, list):
                below += [item for item in node if not isinstance(item, int)]
            elif isinstance(node, str) and not _is_unicode(node):
                raise BadRequest("the body has a text with half a surrogate pair, which is no Unicode")
        level = below


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
