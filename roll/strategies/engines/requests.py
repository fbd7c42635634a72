"""Requests of a generation engine and their outputs: sampling parameters, checks of a request, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from roll.config.reading.fields import LOWEST_TEMPERATURE
from roll.protocol.vision import VisionInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A model's log-probs of a text, each token given those before it."""

    log_probs: list[float]  # log-probs of every token but the first, at temperature 1
    top: list[list[tuple[int, float]]]  # the most probable tokens at the same positions, as many as requested
    ranks: list[int] = field(default_factory=list)
    """Ranks of the text's own tokens in the vocabulary; 1: the most probable."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request. ``temperature`` 0 means greedy; ``top_k`` <= 0 and ``top_p`` 1 mean off."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    top_log_probs: int = 0  # number of most probable tokens reported at each position, with their log-probs
    seed: int | None = None
    """Sample i draws from the stream (seed, i), independently of the rest of the batch; None: a seed of the engine."""
    json_schema: str | None = None
    """JSON schema, as a text, that the response follows: every token is sampled among those that can continue it."""

    def normalised(self) -> SamplingParams:
        """With 0 for no ``top_k``, and without filters for a greedy sample: it is the most likely token of the plain
        distribution, whatever else is set."""
        if self.temperature == 0:
            return replace(self, top_k=0, top_p=1.0, min_p=0.0)
        return replace(self, top_k=max(self.top_k, 0))

    def ends(self, end_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The tokens that end a sample: the model's, then the request's own, each once."""
        return tuple(dict.fromkeys((*end_token_ids, *self.stop_token_ids)))


VersionSpan = tuple[int, int, int]  # (weight version, start, end) over the tokens of a response


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``num_samples`` continuations of one prompt; the prompt is computed once for all of them.

    A request may have been in flight before. A sample in ``partial`` is continued after what it has; limits, stop
    conditions, the repetition penalty and the random stream count the whole response, so an interrupted sample becomes
    what it would have become uninterrupted. Samples in ``finished`` are not generated again.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    num_samples: int = 1
    partial: Mapping[int, GenerationOutput] = field(default_factory=dict)
    """By sample index, beginnings of responses, whichever engine sampled them; samples in neither ``partial`` nor
    ``finished`` start from the prompt."""
    finished: tuple[GenerationOutput, ...] = ()  # samples that are done already
    conversation: str | None = None
    """Names the conversation that the prompt is the next turn of, for routers that keep one at its engine."""
    vision: VisionInputs | None = None
    """Images of the prompt, whose placeholders ``prompt_token_ids`` has, expanded; None: a prompt of text."""

    @property
    def unfinished_samples(self) -> list[int]:
        """Indices of the samples that are still to be generated, in order."""
        done = {output.sample_index for output in self.finished}
        return [index for index in range(self.num_samples) if index not in done]


@dataclass(slots=True)
class GenerationOutput:
    """One finished sample, or the beginning of one (``abort``). A stop token that ended the sample is the last of
    ``token_ids``."""

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    """Log-prob of each token under the distribution it was sampled from (temperature, top-p, top-k applied)."""
    finish_reason: FinishReason
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Spans over ``token_ids``: the weights that each token was sampled with."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most probable tokens with their log-probs at each position that this engine sampled, in descending order and
    under the same distribution as ``log_probs``; empty where ``SamplingParams.top_log_probs`` is 0."""
    routes: np.ndarray | None = None
    """(tokens of prompt and response but the last, layers, k), experts that each went to when it was the input
    (:mod:`roll.models.experts`); None: nobody has recorded them."""


def interrupted(
    request: GenerationRequest, aborted: Iterable[GenerationOutput], finished: Iterable[GenerationOutput]
) -> GenerationRequest:
    """Make of ``request`` one with which any engine continues where it was stopped, from its unfinished samples (whole
    responses so far) and its finished ones, those that it came with included."""
    begun = {output.sample_index: output for output in aborted if output.token_ids}
    return replace(request, partial=begun, finished=tuple(sorted(finished, key=lambda output: output.sample_index)))


def continued(begun: GenerationOutput, output: GenerationOutput) -> GenerationOutput:
    """The whole response of a sample that was continued: what it came with, then the tokens of ``output``."""
    spans, shift = list(begun.weight_versions), len(begun.token_ids)
    for version, start, end in output.weight_versions:
        if spans and version == spans[-1][0]:  # the interruption itself is no change of weights
            spans[-1] = (version, spans[-1][1], end + shift)
        elif end > start:
            spans.append((version, start + shift, end + shift))
    return replace(
        output,
        token_ids=[*begun.token_ids, *output.token_ids],
        log_probs=[*begun.log_probs, *output.log_probs],
        top_log_probs=[*begun.top_log_probs, *output.top_log_probs],
        weight_versions=spans,
    )


def visible_text(text: str, params: SamplingParams) -> str:
    """Return the response as rewards and people see it: it ends before its stop string, or with it if
    ``include_stop_str_in_output`` is set. The token ids keep the whole stop string either way."""
    if not (found := [(text.find(stop), stop) for stop in params.stop_strings if stop in text]):
        return text
    position, stop = min(found, key=lambda place: (place[0], -len(place[1])))
    return text[: position + len(stop) * params.include_stop_str_in_output]


def check_request(request: GenerationRequest, taken: Collection[str], max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError for a request that the engine cannot serve. ``taken``: ids of requests that are unfinished.
    ``max_model_len``: most tokens of prompt and response together."""
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
    highest = max(request.params.stop_token_ids, default=-1)
    if highest >= vocab_size:
        raise ValueError(f"{name}: stop_token_ids run up to {highest}, must be below {vocab_size}")
    most = min(request.params.max_new_tokens, max_model_len - len(prompt))
    for index, partial in request.partial.items():
        if not 1 <= len(partial.token_ids) < most:
            rule = f"has {len(partial.token_ids)} tokens, must have 1 to {most - 1}"
            raise ValueError(f"{name}: partial sample {index} {rule}")


HIGHEST_TEMPERATURE = 1e4  # all tokens are alike beyond it
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
        # A complete JSON text can only end.
        ("min_new_tokens", not (params.json_schema and params.min_new_tokens), "0 with response_format"),
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
            # A client's text may be megabytes long.
            raise ValueError(f"{name}: {key} is {repr(getattr(params, key))[:MAX_SHOWN]}, must be {rule}")


_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that do not make a character yet
_CONTEXT_TOKENS = 5  # decoders drop a leading space or merge accents with the text before


class StopStringMatcher:
    """Decodes one sample token by token and says when one of its stop strings is complete.

    Only text that was generated counts: a stop string that begins in the prompt does not match.

    Args:
        decode: token ids to text, special tokens included.
        stop_strings: none of them empty.
        prompt_token_ids: the sample's prompt (its end is decoded along, so that spacing comes out right).
        begun: tokens of the response that the sample comes with.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_strings: Sequence[str],
        prompt_token_ids: Sequence[int],
        begun: Sequence[int] = (),
    ) -> None:
        self._decode, self._stop_strings = decode, tuple(stop_strings)
        self._longest = max(len(text) for text in stop_strings)
        self._pending = [int(token) for token in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._num_decoded = len(self._pending)
        self._tail = ""
        for token in begun:
            self.push(token)

    def push(self, token_id: int) -> bool:
        """Append a token; True when it completes a stop string."""
        self._pending.append(token_id)
        before = self._decode(self._pending[: self._num_decoded])
        text = self._decode(self._pending)[len(before) :]
        whole, start = self._tail + text.rstrip(_REPLACEMENT), len(self._tail)
        found = any(whole.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stop_strings)
        if text and not text.endswith(_REPLACEMENT):
            self._tail = (self._tail + text)[-(self._longest - 1) :] if self._longest > 1 else ""
            self._pending = self._pending[-_CONTEXT_TOKENS:]
            self._num_decoded = len(self._pending)
        return found


def longest_sequence(max_model_len: int | None, config: PretrainedConfig, model_path: str | None) -> int:
    """Most tokens of prompt and response together: ``strategy_config.max_model_len``, else (None) as many as the model
    has positions. Raises ValueError: more than those, or no number at all."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if max_model_len is None:
        if longest is None:
            raise ValueError(
                "strategy_config.max_model_len: null, and the model names no longest sequence; give a number"
            )
        return int(longest)
    if longest is not None and max_model_len > longest:
        raise ValueError(
            f"strategy_config.max_model_len: {max_model_len} is more than the {longest} positions of {model_path}; "
            f"give at most {longest}"
        )
    return max_model_len
