"""Requests and replies whichever interface they come by: fields read strictly, what is not understood is refused, never
ignored; messages, tools and calls to and from the form of chat templates."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.reading.errors import did_you_mean
from roll.serving.http import BadRequest
from roll.strategies.engines.requests import SamplingParams, check_sampling_params

Message = dict[str, Any]
# Fields that change the sampling distribution.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
LIMITS = ("max_completion_tokens", "max_tokens")
# Fields of completions and chat completions, also in an episode.
BASIC = (*SAMPLING, *LIMITS, "model", "stop", "stream", "stream_options")
# Fields of completions and chat completions of a served model.
SERVED = (*BASIC, "include_stop_str_in_output", "min_tokens", "n", "return_token_ids", "stop_token_ids")
# Fields that closed agents send, which request nothing that a response could lack.
HINTS = frozenset({"prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity"})
# Fields that do not change the response.
IGNORED = frozenset({"metadata", "safety_identifier", "service_tier", "store", "user"})
# Values that change nothing, of fields that an interface has and does not make available.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "background": (None, False),
    "best_of": (None, 1),
    "chat_template_kwargs": (None, {}),
    "container": (None,),
    "conversation": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "max_tool_calls": (None,),
    "mcp_servers": (None, []),
    "min_tokens": (None, 0),
    "n": (None, 1),
    "output_config": (None, {}),
    "output_format": (None,),
    "parallel_tool_calls": (None, True),
    "presence_penalty": (None, 0),
    "prompt": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (None, False),
    "stop_token_ids": (None, []),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
NO_LIMIT = 1 << 30
_UNLIMITED = SamplingParams(NO_LIMIT)
MAX_MESSAGES, MAX_SAMPLES = 4096, 1024
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
MAX_TOP_LOG_PROBS = 16384  # most probable tokens at one position, over all samples of a request
MAX_NUMBER = 2.0**64  # numbers beyond it mean nothing anywhere


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for responses of the model, whichever interface it came by."""

    params: SamplingParams = _UNLIMITED
    set_sampling: tuple[str, ...] = ()  # which of `SAMPLING` the request sets
    num_samples: int = 1
    model: str = ""  # name that the client gives the model
    stream: bool = False
    include_usage: bool = False  # end a stream with the number of tokens
    log_probs: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True)
class ChatRequest(ModelRequest):
    """A request for the response to a conversation."""

    messages: list[Message]
    tools: Sequence[Message] = ()  # schemas in the form of chat completions
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    add_generation_prompt: bool = True
    # Messages at the beginning that belong to this request alone, not to the conversation: instructions.
    own_messages: int = 0
    parse_calls: bool = True  # False: the response is a text, also where the model writes a call
    parallel_calls: bool = True  # False: of several calls in a response the first counts
    must_call: tuple[str, ...] = ()  # tools of which the response must call one
    tool_choice: Any = "auto"  # the request's field, which OpenAI's Responses repeat


@dataclass(frozen=True)
class Reply:
    """A response as the program of an agent gets it."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]  # calls with `id` and `function`, which has `name` and `arguments` (a mapping)
    finish_reason: str  # `stop`, `length` or `tool_calls`
    stop_string: bool  # one of the request's stop strings ended it
    prompt_tokens: int
    completion_tokens: int
    model: str

    @property
    def message(self) -> Message:
        """The message that a client puts into its conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        return message | {"tool_calls": self.calls} if self.calls else message


class Fields:
    """A body's fields, checked by type as they are read. ``known``: fields that are available; those of :data:`NEUTRAL`
    besides may only have the values listed there; ``model``: the model that is served; None: any name is accepted.
    Raises ``BadRequest``: no object, an unknown field, a value of a field that is not available, or another model."""

    def __init__(self, body: object, known: Collection[str], model: str | None = None) -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        self._body = body
        for name, value in body.items():
            if name in known or name in IGNORED:
                continue
            if name not in NEUTRAL:
                hint = did_you_mean(name, known, "; did you mean {!r}?")
                raise BadRequest(f"{name}: unknown field{hint}", name)
            if value not in NEUTRAL[name]:
                raise BadRequest(f"{name}: is not available here", name)
        self._model = self.get("model", str, model or "")
        if model is not None and self._model != model:
            raise BadRequest(f"model: {self._model!r} is not served here, only {model!r}", "model", status=404)

    def get(self, name: str, kind: type | tuple[type, ...], default: object) -> Any:
        """A field's value; null and absence give the default."""
        value = self._body.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # bool is an int in Python, but true is no number in JSON.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRequest(f"{name}: must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}"[:300], name)
        # Refuses NaN as well, for which every comparison is false.
        if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise BadRequest(f"{name}: must be from -2^64 to 2^64", name)
        return value

    def listed(self, name: str, kind: str, most: int) -> list[Any]:
        """A list that must be there, of 1 to ``most`` items; ``kind``: noun for them."""
        found: list[Any] = self.get(name, list, [])
        if not 0 < len(found) <= most:
            raise BadRequest(f"{name}: is needed, a list of 1 to {most} {kind}", name)
        return found

    def shared(
        self,
        *limits: str,
        default_tokens: int = NO_LIMIT,
        stop: str = "stop",
        top_log_probs: int = 0,
        top_field: str = "top_logprobs",
        num_prompts: int = 1,
        json_schema: str | None = None,
    ) -> dict[str, Any]:
        """Arguments of :class:`ModelRequest`; ``BadRequest`` for a value of a wrong type or out of range.

        ``limits`` are fields with the most tokens of a response: the first that is given counts. ``stop`` is the field
        with stop strings, ``top_field`` the one that sets ``top_log_probs``.
        """
        num_samples = self.get("n", int, 1)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise BadRequest(f"n: must be from 1 to {MAX_SAMPLES}", "n")
        if top_log_probs * num_samples * num_prompts > MAX_TOP_LOG_PROBS:
            rule = f"must be at most {MAX_TOP_LOG_PROBS} over all samples of a request"
            raise BadRequest(
                f"{top_field}: {rule}, not {top_log_probs} for each of {num_samples * num_prompts}", top_field
            )
        written = self.get(stop, (str, list), [])
        stops = [written] if isinstance(written, str) else written
        valid = all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stops)
        if len(stops) > MAX_STOPS or not valid:
            rule = f"a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
            raise BadRequest(f"{stop}: must be {rule}", stop)
        stop_ids = self.get("stop_token_ids", list, [])
        if not all(map(is_id, stop_ids)):
            raise BadRequest("stop_token_ids: must be a list of token ids", "stop_token_ids")
        number = (int, float)
        params = SamplingParams(
            max_new_tokens=next(
                (self.get(name, int, 0) for name in limits if self._body.get(name) is not None), default_tokens
            ),
            min_new_tokens=self.get("min_tokens", int, 0),
            temperature=float(self.get("temperature", number, 1.0)),
            top_p=float(self.get("top_p", number, 1.0)),
            top_k=self.get("top_k", int, -1),
            min_p=float(self.get("min_p", number, 0.0)),
            repetition_penalty=float(self.get("repetition_penalty", number, 1.0)),
            stop_token_ids=tuple(stop_ids),
            stop_strings=tuple(stops),
            include_stop_str_in_output=self.get("include_stop_str_in_output", bool, False),
            top_log_probs=top_log_probs,
            seed=self.get("seed", int, None),
            json_schema=json_schema,
        )
        try:
            check_sampling_params(params, "request")
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return {
            "params": params,
            "set_sampling": tuple(name for name in SAMPLING if self._body.get(name) is not None),
            "num_samples": num_samples,
            "model": self._model,
            "stream": self.get("stream", bool, False),
            "include_usage": bool(self.get("stream_options", dict, {}).get("include_usage")),
            "return_token_ids": self.get("return_token_ids", bool, False),
        }


def is_id(token: object) -> bool:
    """True for a number that may be the id of a token."""
    return isinstance(token, int) and not isinstance(token, bool)


def read_role(message: object) -> Any:
    """The role of a message, ``system`` for a developer's; None without a message."""
    role = message.get("role") if isinstance(message, Mapping) else None
    return "system" if role == "developer" else role


def joined_texts(parts: object, kinds: Sequence[str] = ("text",), field_name: str = "messages") -> str:
    """A content that is a text, or a list of parts of the given types with a text each; ``BadRequest`` for others."""
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
    ``kind``: the ``type`` that it must have; ``custom`` may be left out; ``parameters``: its field with the schema of
    the arguments. Raises ``BadRequest``: it has another type, or no name."""
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
    """The arguments of :class:`ChatRequest` that say whether a tool is called, from OpenAI's ``tool_choice``;
    ``BadRequest`` for one that the offered tools do not allow."""
    named: list[Any] = []
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = [choice["function"] if isinstance(choice.get("function"), Mapping) else choice]
    elif isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, Mapping) or allowed.get("mode") != "required":
            raise BadRequest("tool_choice: allowed_tools is available with mode required", "tool_choice")
        tools_given = allowed.get("tools") or [None]
        named = [one.get("function", one) if isinstance(one, Mapping) else one for one in tools_given]
    elif choice not in ("auto", "none", "required"):
        raise BadRequest("tool_choice: must be one of auto, none, required or name a function", "tool_choice")
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
    return {"id": f"{prefix}{uuid.uuid4().hex}", "object": kind, created: int(time.time()), "model": model}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """Pieces of a text for a stream, which begins once the whole response is generated."""
    for begin in range(0, len(text), size):
        yield text[begin : begin + size]
