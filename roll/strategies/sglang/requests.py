"""Requests and results, between this project's terms and SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.strategies.generation import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialSample,
    SamplingParams,
    VersionSpan,
)
from roll.strategies.stop_strings import StopStringMatcher


def sampling_settings(
    params: SamplingParams, end_token_ids: tuple[int, ...], most: int, num_prompt: int, num_begun: int, stream_key: int
) -> dict[str, Any]:
    """SGLang's ``sampling_params`` of one sample. It decides on the end; ``custom_params`` are for the sampler.

    Args:
        end_token_ids: end every sample, beside the request's own stop tokens.
        most: tokens of the whole response.
        num_prompt: tokens of the prompt.
        num_begun: tokens of the response that the sample comes with; SGLang counts them to its prompt.
        stream_key: of the sample's random numbers.
    """
    greedy = params.temperature == 0
    stops = list(dict.fromkeys((*end_token_ids, *params.stop_token_ids)))
    return {
        "max_new_tokens": most - num_begun,
        "stop_token_ids": stops,
        "custom_params": {
            "temperature": params.temperature,
            "top_k": 0 if greedy or params.top_k <= 0 else params.top_k,
            "top_p": 1.0 if greedy else params.top_p,
            "min_p": 0.0 if greedy else params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "min_new_tokens": params.min_new_tokens,
            "end_token_ids": stops,
            "num_prompt": num_prompt,
            "stream_key": f"{stream_key:x}",  # 64 bits without a sign
        },
    }


@dataclass(eq=False)
class Sample:
    """One sample in progress, and what has come of it."""

    request: GenerationRequest
    index: int
    begun: PartialSample | None
    """What it came with."""
    version: int
    """Of the weights that the next token is drawn with."""
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)
    """Behind those that it came with."""
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    earlier_versions: list[VersionSpan] = field(default_factory=list)
    """Spans over ``token_ids`` that are closed."""
    finish_reason: FinishReason | None = None

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take over the tokens that SGLang has reported by now, and its reason where they are all.

        Raises:
            RuntimeError: SGLang gave the sample up.
        """
        meta = chunk["meta_info"]
        reported, begin = meta.get("output_token_logprobs") or (), len(self.token_ids)
        for position in range(begin, len(reported)):
            log_prob, token_id, _ = reported[position]
            self.token_ids.append(int(token_id))
            self.log_probs.append(float(log_prob))
            if self.request.params.top_log_probs:
                likeliest = meta["output_top_logprobs"][position]
                self.top_log_probs.append([(int(token), float(value)) for value, token, _ in likeliest])
            if self.matcher is not None and self.matcher.push(int(token_id)):
                self.finish_reason = "stop"
                return
        reason = meta["finish_reason"]
        if reason is None:
            return
        if reason["type"] not in ("stop", "length"):
            name = f"sample {self.index} of request {self.request.request_id!r}"
            raise RuntimeError(f"sglang: {name} was given up: {reason.get('message', reason)}")
        self.finish_reason = reason["type"]

    def new_version(self, version: int) -> None:
        """The next tokens are those of other weights."""
        start = self.earlier_versions[-1][2] if self.earlier_versions else 0
        if len(self.token_ids) > start:
            self.earlier_versions.append((self.version, start, len(self.token_ids)))
        self.version = version

    def step_back(self) -> None:
        """Undo the end of a sample that nobody has heard of: its last token will be drawn again, and be the same."""
        self.finish_reason = None
        del self.token_ids[-1:], self.log_probs[-1:], self.top_log_probs[-1:]
        count = len(self.token_ids)
        spans = [(version, start, min(end, count)) for version, start, end in self.earlier_versions]
        self.earlier_versions = [span for span in spans if span[1] < count]

    def output(self) -> GenerationOutput:
        """The whole response, ``abort`` where it has not ended."""
        token_ids, log_probs, top = self.token_ids, self.log_probs, self.top_log_probs
        spans, shift = [], 0
        if self.begun is not None:
            token_ids = [*self.begun.token_ids, *token_ids]
            log_probs = [*self.begun.log_probs, *log_probs]
            top = [*self.begun.top_log_probs, *top]
            spans, shift = list(self.begun.weight_versions), len(self.begun.token_ids)
        last = self.earlier_versions[-1][2] if self.earlier_versions else 0
        for version, start, end in [*self.earlier_versions, (self.version, last, len(self.token_ids))]:
            if spans and version == spans[-1][0]:
                spans[-1] = (version, spans[-1][1], end + shift)
            elif end > start:
                spans.append((version, start + shift, end + shift))
        return GenerationOutput(
            self.request.request_id,
            self.index,
            list(token_ids),
            list(log_probs),
            self.finish_reason or "abort",
            spans or [(self.version, 0, 0)],
            list(top),
        )
