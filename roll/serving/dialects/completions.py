"""OpenAI's completions, with the log-probs of prompts that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.serving.dialects.fields import LIMITS, MAX_TOP_LOG_PROBS, SERVED, Fields, ModelRequest, is_id
from roll.serving.refusals import BadRequest

MAX_PROMPTS = 1024
_KNOWN = (*SERVED, "echo", "logprobs", "prompt", "prompt_logprobs")
_DEFAULT_TOKENS = 16
"""OpenAI's default for completions; chats go on to the end of the context."""


@dataclass(frozen=True)
class CompletionRequest(ModelRequest):
    """A request for continuations of prompts."""

    prompts: Sequence[str | Sequence[int]]
    echo: bool = False
    """Responses begin with their prompt, and log-probs with those of the prompt."""
    prompt_log_probs: int | None = None
    """Number of most probable tokens reported at each position of the prompt, besides its own (-1: all); None: no
    log-probs of the prompt."""


def read_completion(body: object, model: str) -> CompletionRequest:
    """The body of ``POST /v1/completions``; a prompt is a text or a list of token ids, or a list of either.

    Raises:
        BadRequest: a field that is missing, unknown, of a wrong type or out of range.
    """
    fields = Fields(body, _KNOWN, model)
    log_probs = fields.get("logprobs", int, None)
    prompts = _prompts(fields.get("prompt", (str, list), None))
    echo = fields.get("echo", bool, False)
    of_prompt = fields.get("prompt_logprobs", int, None)
    for name, is_set in (("echo", echo), ("prompt_logprobs", of_prompt is not None)):
        if is_set and fields.get("stream", bool, False):
            raise BadRequest(f"{name}: goes with stream: false", name)
    if of_prompt is not None and not -1 <= of_prompt <= MAX_TOP_LOG_PROBS:
        raise BadRequest(f"prompt_logprobs: must be from -1 (all) to {MAX_TOP_LOG_PROBS}", "prompt_logprobs")
    shared = fields.shared(
        *LIMITS,
        default_tokens=_DEFAULT_TOKENS,
        top_log_probs=log_probs or 0,
        top_field="logprobs",
        num_prompts=len(prompts),
    )
    return CompletionRequest(prompts, echo, of_prompt, log_probs=log_probs is not None, **shared)


def _prompts(prompt: str | list[Any] | None) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and all(map(is_id, prompt))):
        return [prompt]
    valid = prompt and all(isinstance(p, str) or (isinstance(p, list) and all(map(is_id, p)) and p) for p in prompt)
    if prompt is None or not valid:
        raise BadRequest("prompt: is needed: a text, a list of token ids, or a list of either", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"prompt: a request may have {MAX_PROMPTS} prompts at most, not {len(prompt)}", "prompt")
    return list(prompt)
