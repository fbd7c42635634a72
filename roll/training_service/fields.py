"""Fields of the SDK's JSON bodies: each is read, or refused by its name; nothing is passed over."""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

from roll.serving.http import BadRequest
from roll.strategies.engines.requests import SamplingParams, check_sampling_params

T = TypeVar("T")
_REFUSED = {
    "kind": "inflight sampling clients are not served; use kind='snapshot'",
    "record_stability_info": "stable_reinforce is not served, and so nothing is recorded for it",
    "target_prompt_logprobs": "not served; topk_prompt_logprobs is",
    "prompt_alt_tokens_k": "not served",
    "weights_access_token": "not served: whoever has the service's key reads all its checkpoints",
    "age_encryption_recipients": "not served; encrypt the downloaded files",
    "project_id": "there are no projects here",
}
SERVED_NOWHERE = "is not served here; docs/training-service.md lists what is"


class Fields:
    """The fields of a JSON body, each read once; :meth:`end` refuses those that nobody has read."""

    def __init__(self, body: object, where: str = "") -> None:
        if not isinstance(body, dict):
            raise BadRequest(f"{where or 'the body'} must be an object")
        self._body = {key: value for key, value in body.items() if value is not None and key != "type"}
        self._where = f"{where}." if where else ""

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of a field; ``BadRequest`` for one of another type."""
        value = self._body.pop(key, default)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= sys.float_info.max else math.inf
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            raise BadRequest(f"{self._where}{key}: {value!r:.100} must be of type {kind.__name__}", key)
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a field that must be there; ``BadRequest`` where it is not, or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise BadRequest(f"{self._where}{key} is missing", key)
        return value

    def off(self, key: str, *harmless: object) -> None:
        """Raise ``BadRequest`` for a feature that is not served, unless its value leaves it off."""
        value = self._body.pop(key, None)
        if value is not None and value not in harmless:
            raise BadRequest(f"{self._where}{key}: {_REFUSED[key]}", key)

    def end(self) -> None:
        """Raise ``BadRequest`` for a field that was not read."""
        for key in self._body:
            raise BadRequest(f"{self._where}{key} {SERVED_NOWHERE}", key)


def check_optimizer(fields: Fields) -> None:
    """Raise ``BadRequest`` for another optimizer than AdamW."""
    config = fields.get("optimizer_config", dict) or {}
    if config.get("type", "adamw") != "adamw":
        raise BadRequest(
            f"optimizer_config.type: {config['type']!r:.100} is not served; 'adamw' is", "optimizer_config"
        )


def read_prompt(body: object) -> list[int]:
    fields, tokens = Fields(body, "prompt"), []
    for index, chunk in enumerate(fields.need("chunks", list)):
        own = Fields(chunk, f"prompt.chunks[{index}]")
        if chunk.get("type", "encoded_text") != "encoded_text":
            kind = f"{chunk['type']!r:.50}"
            raise BadRequest(
                f"prompt.chunks[{index}]: chunks of type {kind} are not served; send encoded text", "prompt"
            )
        part = own.need("tokens", list)
        if not all(type(token) is int for token in part):
            raise BadRequest(f"prompt.chunks[{index}].tokens: must be integers", "prompt")
        tokens += part
    return tokens


def read_params(body: object, room: int, top: int) -> SamplingParams:
    """Sampling parameters; ``max_tokens`` as many as there is room for, unless the body says less.

    Raises:
        BadRequest: a value outside its range.
    """
    fields = Fields(body, "sampling_params")
    stop: Any = fields.get("stop", object)
    if stop == []:
        raise BadRequest("sampling_params.stop: [] (go on past the model's own end) is not served", "stop")
    stops: Any = [stop] if isinstance(stop, str) else stop or []
    kinds = {type(one) for one in stops} if isinstance(stops, list) else set()
    if stop is not None and kinds not in ({str}, {int}):
        raise BadRequest("sampling_params.stop: must be a text, texts, or token ids", "stop")
    limit = fields.get("max_tokens", int)
    values: dict[str, Any] = {key: fields.get(key, float) for key in ("temperature", "top_p")}
    values |= {key: fields.get(key, int) for key in ("top_k", "seed")}
    fields.end()
    params = SamplingParams(
        max_new_tokens=max(room, 1) if limit is None else limit,
        stop_strings=tuple(stops) if kinds == {str} else (),
        stop_token_ids=tuple(stops) if kinds == {int} else (),
        top_log_probs=top,
        **{key: value for key, value in values.items() if value is not None},
    )
    try:
        check_sampling_params(params, "sampling_params")
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return params
