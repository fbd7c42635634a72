"""Fields of request bodies, read strictly: what is not understood is refused, never ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.reading.errors import did_you_mean
from roll.serving.http import BadRequest
from roll.strategies.engines.requests import SamplingParams, check_sampling_params

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Fields that change the sampling distribution."""
LIMITS = ("max_completion_tokens", "max_tokens")
BASIC = (*SAMPLING, *LIMITS, "model", "stop", "stream", "stream_options")
"""Fields of completions and chat completions, also in an episode."""
SERVED = (*BASIC, "include_stop_str_in_output", "min_tokens", "n", "return_token_ids", "stop_token_ids")
"""Fields of completions and chat completions of a served model."""
IGNORED = frozenset({"metadata", "safety_identifier", "service_tier", "store", "user"})
"""Fields that do not change the response."""
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
"""Values that change nothing, of fields that an interface has and does not make available."""
NO_LIMIT = 1 << 30
_UNLIMITED = SamplingParams(NO_LIMIT)
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_SAMPLES = 1024
MAX_TOP_LOG_PROBS = 16384
"""Most probable tokens at one position, over all samples of a request."""
MAX_NUMBER = 2.0**64
"""Numbers beyond it mean nothing anywhere."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for responses of the model, whichever interface it came by."""

    params: SamplingParams = _UNLIMITED
    set_sampling: tuple[str, ...] = ()
    """Which of :data:`SAMPLING` the request sets."""
    num_samples: int = 1
    model: str = ""
    """Name that the client gives the model."""
    stream: bool = False
    include_usage: bool = False
    """End a stream with the number of tokens."""
    log_probs: bool = False
    return_token_ids: bool = False


class Fields:
    """A body's fields, checked by type as they are read.

    Args:
        known: fields that are available; those of :data:`NEUTRAL` besides may only have the values listed there.
        model: the model that is served; None: any name is accepted.

    Raises:
        BadRequest: no object, an unknown field, a value of a field that is not available, or another model.
    """

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

    def given(self, name: str) -> bool:
        """True if the field is there, and not null."""
        return self._body.get(name) is not None

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
        """A list that must be there, of 1 to ``most`` items.

        Args:
            kind: noun for the items.
        """
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
        """Arguments of :class:`ModelRequest`.

        Args:
            limits: fields with the most tokens of a response; the first that is given counts.
            default_tokens: the most tokens where none is given.
            stop: the field with stop strings.
            top_field: the field that sets ``top_log_probs``.
            json_schema: of the response; None: any text.

        Raises:
            BadRequest: a value of a wrong type or out of range.
        """
        num_samples = self.get("n", int, 1)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise BadRequest(f"n: must be from 1 to {MAX_SAMPLES}", "n")
        if top_log_probs * num_samples * num_prompts > MAX_TOP_LOG_PROBS:
            rule = f"must be at most {MAX_TOP_LOG_PROBS} over all samples of a request"
            raise BadRequest(
                f"{top_field}: {rule}, not {top_log_probs} for each of {num_samples * num_prompts}", top_field
            )
        number = (int, float)
        params = SamplingParams(
            max_new_tokens=next((self.get(name, int, 0) for name in limits if self.given(name)), default_tokens),
            min_new_tokens=self.get("min_tokens", int, 0),
            temperature=float(self.get("temperature", number, 1.0)),
            top_p=float(self.get("top_p", number, 1.0)),
            top_k=self.get("top_k", int, -1),
            min_p=float(self.get("min_p", number, 0.0)),
            repetition_penalty=float(self.get("repetition_penalty", number, 1.0)),
            stop_token_ids=self._stop_token_ids(),
            stop_strings=self._stops(stop),
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
            "set_sampling": tuple(name for name in SAMPLING if self.given(name)),
            "num_samples": num_samples,
            "model": self._model,
            "stream": self.get("stream", bool, False),
            "include_usage": bool(self.get("stream_options", dict, {}).get("include_usage")),
            "return_token_ids": self.get("return_token_ids", bool, False),
        }

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
        if not all(map(is_id, ids)):
            raise BadRequest("stop_token_ids: must be a list of token ids", "stop_token_ids")
        return tuple(ids)


def is_id(token: object) -> bool:
    """True for a number that may be the id of a token."""
    return isinstance(token, int) and not isinstance(token, bool)
