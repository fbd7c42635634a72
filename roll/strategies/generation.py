"""What a generation engine is: token ids in, token ids out, with the log-probability of each sampled token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from roll.config.roles import WorkerConfig
from roll.weight_sync.encoding import tensor_checksum
from roll.weight_sync.messages import Checksum

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. ``temperature`` 0 means greedy; ``top_k`` <= 0 and ``top_p`` 1 mean off."""

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
    top_log_probs: int = 0
    """So many of the likeliest tokens are reported at each position, with their log-probs."""
    seed: int | None = None
    """Sample i of the request draws from the stream (seed, i), whatever else is in the batch; None: engine's own."""


VersionSpan = tuple[int, int, int]
"""(weight version, start, end) over the tokens of a response."""


@dataclass(frozen=True, slots=True)
class PartialSample:
    """The beginning of a response, from wherever it was sampled: an engine goes on behind it."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """Of each token, as in :class:`GenerationOutput`."""
    weight_versions: Sequence[VersionSpan]
    """Spans over all of ``token_ids``, in order."""
    top_log_probs: Sequence[list[tuple[int, float]]] = ()
    """Of each token, where they were asked for."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``num_samples`` continuations of one prompt; the prompt is computed once for all of them.

    A request may have been under way before. A sample in ``partial`` is continued behind what it has; limits, stop
    conditions, the repetition penalty and the random stream count the whole response, so an interrupted sample becomes
    what it would have become uninterrupted. Samples in ``finished`` are not generated again.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    num_samples: int = 1
    partial: Mapping[int, PartialSample] = field(default_factory=dict)
    """By sample index; samples in neither ``partial`` nor ``finished`` start from the prompt."""
    finished: tuple[GenerationOutput, ...] = ()
    """Samples that are done already."""

    @property
    def unfinished_samples(self) -> list[int]:
        """Indices of the samples that are still to be generated, in order."""
        done = {output.sample_index for output in self.finished}
        return [index for index in range(self.num_samples) if index not in done]


@dataclass(slots=True)
class GenerationOutput:
    """One finished (or aborted) sample. A stop token that ended the sample is the last of ``token_ids``."""

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    """Of each token under the distribution it was sampled from (temperature, top-p, top-k applied)."""
    finish_reason: FinishReason
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Spans over ``token_ids``: the weights that each token was sampled with."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens with their log-probs at each position that this engine sampled, under the same distribution
    as ``log_probs``, the likeliest first; empty where ``SamplingParams.top_log_probs`` is 0."""


def interrupted(
    request: GenerationRequest, aborted: Iterable[GenerationOutput], finished: Iterable[GenerationOutput]
) -> GenerationRequest:
    """``request`` as it must be given to an engine, any engine, to be taken up where it was stopped.

    Args:
        aborted: its unfinished samples, whole responses so far.
        finished: its finished samples, those that it came with included.
    """
    begun = {
        output.sample_index: PartialSample(
            output.token_ids, output.log_probs, output.weight_versions, output.top_log_probs
        )
        for output in aborted
        if output.token_ids
    }
    return replace(request, partial=begun, finished=tuple(sorted(finished, key=lambda output: output.sample_index)))


def visible_text(text: str, params: SamplingParams) -> str:
    """The response as rewards and people see it: it ends before the stop string that ended it, or with it where
    ``include_stop_str_in_output`` asks for that. The token ids keep the whole stop string either way."""
    found = [(text.find(stop), stop) for stop in params.stop_strings if stop in text]
    if not found:
        return text
    position, stop = min(found, key=lambda place: (place[0], -len(place[1])))
    return text[: position + len(stop) * params.include_stop_str_in_output]


class GenerationStrategy(ABC):
    """An engine driven by repeated :meth:`step` calls from one thread."""

    def __init__(self, role: WorkerConfig, seed: int = 42) -> None:
        self.role = role
        self.seed = seed

    @abstractmethod
    def initialize(self) -> None:
        """Load the model of ``role`` and allocate the KV cache."""

    @abstractmethod
    def add_requests(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue the unfinished samples of requests, first come first served; partial samples are continued.

        Raises:
            ValueError: a prompt that leaves no room for a new token, parameters outside their range, or a partial
                sample that has nothing left to generate.
        """

    @abstractmethod
    def step(self) -> list[GenerationOutput]:
        """Advance every running sample by one token (admitting queued ones first); return those that finished."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Samples queued or running."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> list[GenerationOutput]:
        """Stop the given requests (None: all); return their unfinished samples with what they have so far, the tokens
        that they came with included."""

    def take_failures(self) -> dict[str, str]:
        """Requests that have failed by themselves since the last call, by id, and why: they are unfinished no more, and
        the others go on as if they had never been there."""
        return {}

    def recover(self) -> list[GenerationOutput]:
        """After :meth:`step` has raised: drop all samples and everything computed of them, so that what is added next
        finds a clean engine; what the samples had. An engine that cannot do it raises."""
        return self.abort()

    def running(self, request_ids: Iterable[str]) -> list[GenerationOutput]:
        """What :meth:`abort` would return of these requests, which go on; nothing from an engine that cannot tell."""
        return []

    @abstractmethod
    def start_weight_update(self, version: int) -> None: ...

    @abstractmethod
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over full tensors by Hugging Face name. The tensors may be read-only shared memory: copy, never keep."""

    @abstractmethod
    def finish_weight_update(self) -> Mapping[str, Checksum]:
        """Make the new weights current; return a checksum per tensor of what the engine now holds
        (:func:`roll.weight_sync.encoding.tensor_checksum`), by rank where ranks of it disagree.

        Samples that are running go on; their next tokens are the new weights'. What the engine has computed of their
        earlier tokens is computed again with the new weights, or kept, as its ``in_flight_update`` says.
        """

    def held_weights(self) -> Mapping[str, torch.Tensor] | None:
        """What the engine computes with, by Hugging Face name, where single elements of it may be changed in place in
        the course of an update; None: every update must bring whole layers."""
        return None

    def held_checksums(self, names: Sequence[str]) -> Mapping[str, Checksum]:
        """Checksums of tensors that earlier updates have brought, as the engine computes with them now."""
        held = self.held_weights()
        assert held is not None, "an engine that takes whole models only is sent all tensors"
        return {name: tensor_checksum(held[name]) for name in names if name in held}

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine computes with LoRA adapters of its own (:meth:`update_adapter`)."""
        return False

    def update_adapter(self, tensors: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> None:
        """In the course of an update: compute ``W x + scaling * B (A x)`` from now on, in place of the last adapter.

        Args:
            tensors: A (r, in) and B (out, r) by the name of W with ``#lora_A`` or ``#lora_B`` behind.
            scalings: by the name of W.
        """
        raise RuntimeError(f"{type(self).__name__} takes no adapters")

    def sleep(self) -> None:
        """Release device memory (KV cache, weights) where the platform can, while idle; undone by :meth:`wake`."""

    def wake(self, weights_only: bool = False) -> None:
        """Undo :meth:`sleep`; with ``weights_only`` as far as a weight update needs it, the rest by another call."""

    def shutdown(self) -> None:
        """Free everything; the engine is not used again."""
