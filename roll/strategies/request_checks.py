"""What every generation engine refuses of a request, before it reaches the model."""

from __future__ import annotations

from collections.abc import Collection

from roll.config.reading.fields import LOWEST_TEMPERATURE
from roll.strategies.generation import GenerationRequest, SamplingParams


def check_request(request: GenerationRequest, taken: Collection[str], max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError for a request that the engine cannot answer.

    Args:
        taken: ids of requests that are unfinished.
        max_model_len: most tokens of prompt and response together.
    """
    name, prompt = f"request {request.request_id!r}", request.prompt_token_ids
    if request.request_id in taken:
        raise ValueError(f"{name}: a request of this id is unfinished; ids must be unique")
    if request.num_samples < 1:
        raise ValueError(f"{name}: num_samples is {request.num_samples}, must be at least 1")
    if not 1 <= len(prompt) < max_model_len:
        raise ValueError(
            f"{name}: the prompt has {len(prompt)} tokens, must have 1 to {max_model_len - 1} "
            f"(max_model_len {max_model_len} holds prompt and response)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(
            f"{name}: prompt token ids run from {min(prompt)} to {max(prompt)}, must be in [0, {vocab_size})"
        )
    check_sampling_params(request.params, name)
    params = request.params
    if any(token >= vocab_size for token in params.stop_token_ids):
        raise ValueError(f"{name}: stop_token_ids run up to {max(params.stop_token_ids)}, must be below {vocab_size}")
    _check_progress(request, name, max_model_len - len(prompt))


def _check_progress(request: GenerationRequest, name: str, room: int) -> None:
    """Refuse a request whose partial and finished samples do not fit it; ``room``: tokens behind the prompt."""
    done = [output.sample_index for output in request.finished]
    begun = list(request.partial)
    if len(set(done + begun)) < len(done) + len(begun) or not set(done + begun) <= set(range(request.num_samples)):
        raise ValueError(
            f"{name}: samples {sorted(done)} are finished and {sorted(begun)} partial; each of the "
            f"{request.num_samples} samples, counted from 0, may be named once"
        )
    if len(done) == request.num_samples:
        raise ValueError(f"{name}: all of its samples are finished; there is nothing to generate")
    most = min(request.params.max_new_tokens, room)
    for index, partial in request.partial.items():
        length = len(partial.token_ids)
        if not 1 <= length < most:
            raise ValueError(f"{name}: partial sample {index} has {length} tokens, must have 1 to {most - 1}")
        covered = [position for _, start, end in partial.weight_versions for position in range(start, end)]
        if len(partial.log_probs) != length or covered != list(range(length)):
            raise ValueError(
                f"{name}: partial sample {index} has {length} tokens, {len(partial.log_probs)} log-probs and weight "
                f"versions of {len(covered)} tokens; every token needs both"
            )


HIGHEST_TEMPERATURE = 1e4
"""All tokens are alike beyond it."""
MAX_PENALTY = 100.0
MAX_STOP_TOKENS = 1024
MAX_SHOWN = 100
_INT32 = 1 << 31


def check_sampling_params(params: SamplingParams, name: str) -> None:
    """Raise ValueError for the first setting outside its range."""
    temperature, penalty = params.temperature, params.repetition_penalty
    rules: tuple[tuple[str, bool, str], ...] = (
        ("max_new_tokens", 1 <= params.max_new_tokens < _INT32, "at least 1, and below 2^31"),
        ("min_new_tokens", 0 <= params.min_new_tokens <= params.max_new_tokens, "in [0, max_new_tokens]"),
        (
            "temperature",
            temperature == 0 or LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE,
            f"0 (greedy) or in [{LOWEST_TEMPERATURE:g}, {HIGHEST_TEMPERATURE:g}]",
        ),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", -_INT32 <= params.top_k < _INT32, "below 2^31 (0 or less: off)"),
        ("min_p", 0 <= params.min_p <= 1, "in [0, 1]"),
        ("repetition_penalty", 1 / MAX_PENALTY <= penalty <= MAX_PENALTY, f"in [{1 / MAX_PENALTY:g}, {MAX_PENALTY:g}]"),
        ("top_log_probs", 0 <= params.top_log_probs < _INT32, "at least 0"),
        ("stop_strings", all(params.stop_strings), "non-empty strings"),
        ("stop_token_ids", all(token >= 0 for token in params.stop_token_ids), "at least 0"),
        ("stop_token_ids", len(params.stop_token_ids) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} token ids"),
        ("seed", params.seed is None or -(1 << 63) <= params.seed < 1 << 64, "an integer of 64 bits"),
    )
    for key, holds, rule in rules:
        if not holds:
            value = repr(getattr(params, key))
            raise ValueError(f"{name}: {key} is {value[:MAX_SHOWN]}, must be {rule}")
