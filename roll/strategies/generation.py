"""What a generation engine is: token ids in, token ids out, with the log-probability of each sampled token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from roll.config.roles import WorkerConfig

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
    seed: int | None = None
    """Sample i of the request draws from the stream (seed, i), whatever else is in the batch; None: engine's own."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``num_samples`` continuations of one prompt; the prompt is computed once for all of them."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    num_samples: int = 1


@dataclass(slots=True)
class GenerationOutput:
    """One finished (or aborted) sample. A stop token that ended the sample is the last of ``token_ids``."""

    request_id: str
    sample_index: int
    token_ids: list[int]
    log_probs: list[float]
    """Of each token under the distribution it was sampled from (temperature, top-p, top-k applied)."""
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    """Spans (version, start, end) over ``token_ids``: the weights that each token was sampled with."""


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
        """Queue requests, first come first served.

        Raises:
            ValueError: a prompt that leaves no room for a new token, or parameters outside their range.
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
        """Stop the given requests (None: all); return their unfinished samples with what they have so far."""

    @abstractmethod
    def start_weight_update(self, version: int) -> None: ...

    @abstractmethod
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over full tensors by Hugging Face name. The tensors may be read-only shared memory: copy, never keep."""

    @abstractmethod
    def finish_weight_update(self) -> dict[str, int]:
        """Make the new weights current; return a checksum per tensor of what the engine now holds
        (:func:`roll.weight_sync.checksum.tensor_checksum`)."""

    def sleep(self) -> None:
        """Release device memory (KV cache, weights) where the platform can, while idle; undone by :meth:`wake`."""

    def wake(self, weights_only: bool = False) -> None:
        """Undo :meth:`sleep`; with ``weights_only`` as far as a weight update needs it, the rest by another call."""

    def shutdown(self) -> None:
        """Free everything; the engine is not used again."""
