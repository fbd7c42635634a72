"""What the engine knows of its running samples: arrays on the host with one row a sample, active rows at the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.strategies.generation import FinishReason, GenerationOutput, GenerationRequest, PartialSample
from roll.strategies.stop_strings import StopStringMatcher

_NO_TOKEN = -1


@dataclass(slots=True)
class RunningSample:
    """The part of a sample's state that is not in the arrays."""

    request: GenerationRequest
    sample_index: int
    matcher: StopStringMatcher | None
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, first token that was sampled with it)."""
    stale: bool = False
    """Its keys and values are those of other weights than the engine has."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens of each position, where the request asks for them."""

    def note_version(self, version: int, num_tokens: int) -> None:
        """Tokens from number ``num_tokens`` on are sampled with weights ``version``."""
        if self.version_starts and self.version_starts[-1][1] == num_tokens:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, num_tokens))

    def output(self, token_ids: list[int], log_probs: list[float], reason: FinishReason) -> GenerationOutput:
        starts = [start for _, start in self.version_starts] + [len(token_ids)]
        spans = [
            (version, start, end)
            for (version, start), end in zip(self.version_starts, starts[1:], strict=True)
            if end > start
        ]
        return GenerationOutput(
            self.request.request_id,
            self.sample_index,
            token_ids,
            log_probs,
            reason,
            weight_versions=spans,
            top_log_probs=self.top_log_probs,
        )


@dataclass
class RunningRows:
    """Rows [0, size) are running samples; a leaving row's place is taken by the last one.

    Arrays of shape (capacity,): ``lengths`` (tokens of prompt and response, the last of which is not in the cache yet),
    ``generated``, ``last_tokens``, and the sampling settings.  ``tokens`` and ``log_probs`` (capacity, max_model_len)
    hold the responses; ``stop_ids`` (capacity, any) is padded with -1.
    """

    capacity: int
    max_model_len: int
    size: int = 0
    samples: list[RunningSample] = field(default_factory=list)
    num_matchers: int = 0
    epoch: int = 0
    """Changes whenever rows come, go or change places."""

    def __post_init__(self) -> None:
        n = self.capacity
        self.lengths = np.zeros(n, np.int64)
        self.generated = np.zeros(n, np.int64)
        self.last_tokens = np.zeros(n, np.int64)
        self.min_new = np.zeros(n, np.int64)
        self.max_new = np.zeros(n, np.int64)
        self.stream_keys = np.zeros(n, np.uint64)
        self.temperature = np.ones(n, np.float32)
        self.top_k = np.zeros(n, np.int64)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.repetition_penalty = np.ones(n, np.float32)
        self.num_top = np.zeros(n, np.int64)
        self.stop_ids = np.full((n, 1), _NO_TOKEN, np.int64)
        self.tokens = np.zeros((n, self.max_model_len), np.int32)
        self.log_probs = np.zeros((n, self.max_model_len), np.float32)

    def append(
        self,
        sample: RunningSample,
        stream_key: int,
        stop_ids: Sequence[int],
        carried: PartialSample | None = None,
    ) -> None:
        """Start a sample in the next row, behind its prompt and the tokens that it has already (``carried``); these
        are in the cache, its next token is not sampled yet."""
        row, params = self.size, sample.request.params
        assert row < self.capacity, "no free row"
        prompt_length = len(sample.request.prompt_token_ids)
        self.generated[row] = self._carry_over(sample, carried) if carried is not None else 0
        self.lengths[row] = prompt_length + self.generated[row]
        self.min_new[row] = params.min_new_tokens
        self.max_new[row] = min(params.max_new_tokens, self.max_model_len - prompt_length)
        self.stream_keys[row] = stream_key
        greedy = params.temperature == 0
        # A greedy row is the most likely token of the plain distribution: nothing else may change it.
        self.temperature[row] = 0 if greedy else params.temperature
        self.top_k[row] = 0 if greedy else max(params.top_k, 0)
        self.top_p[row] = 1 if greedy else params.top_p
        self.min_p[row] = 0 if greedy else params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.num_top[row] = params.top_log_probs
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((self.capacity, len(stop_ids)), _NO_TOKEN, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.samples.append(sample)
        self.num_matchers += sample.matcher is not None
        self.size += 1
        self.epoch += 1

    def _carry_over(self, sample: RunningSample, carried: PartialSample) -> int:
        """Put down what a sample has already in the row behind the last; how many tokens that is."""
        count = len(carried.token_ids)
        self.tokens[self.size, :count] = carried.token_ids
        self.log_probs[self.size, :count] = carried.log_probs
        sample.version_starts = [(version, start) for version, start, _ in carried.weight_versions]
        sample.top_log_probs = list(carried.top_log_probs)
        return count

    def token_ids(self, row: int) -> list[int]:
        """Prompt and response of a row."""
        return [*self.samples[row].request.prompt_token_ids, *self.tokens[row, : self.generated[row]].tolist()]

    def record(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Add one sampled token to every row."""
        rows, at = np.arange(self.size), self.generated[: self.size]
        self.tokens[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.last_tokens[: self.size] = tokens
        self.generated[: self.size] += 1
        self.lengths[: self.size] += 1

    def stopped(self) -> np.ndarray:
        """Bool (size,): the last token is a stop token, or completes a stop string, and enough tokens are there."""
        n = self.size
        stopped = (self.stop_ids[:n] == self.last_tokens[:n, None]).any(1)
        if self.num_matchers:
            for row, sample in enumerate(self.samples):
                if sample.matcher is not None and sample.matcher.push(int(self.last_tokens[row])):
                    stopped[row] = True
        return stopped & (self.generated[:n] >= self.min_new[:n])

    def full(self) -> np.ndarray:
        """Bool (size,): no further token is allowed."""
        return self.generated[: self.size] >= self.max_new[: self.size]

    def output(self, row: int, reason: FinishReason) -> GenerationOutput:
        count = int(self.generated[row])
        return self.samples[row].output(self.tokens[row, :count].tolist(), self.log_probs[row, :count].tolist(), reason)

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows (sorted, unique); the last rows that stay take their places.

        Returns:
            destination, source: the moves that were made, which the cache must make too.
        """
        new_size = self.size - len(rows)
        leaving = np.zeros(self.size, bool)
        leaving[rows] = True
        destination = rows[rows < new_size]
        source = np.arange(new_size, self.size)[~leaving[new_size:]]
        longest = int(self.generated[source].max(initial=0))
        for array in self._per_row_arrays():
            array[destination] = array[source]
        for history in (self.tokens, self.log_probs):
            history[destination, :longest] = history[source, :longest]
        self.num_matchers -= sum(self.samples[row].matcher is not None for row in rows)
        for to, origin in zip(destination, source, strict=True):
            self.samples[to] = self.samples[origin]
        del self.samples[new_size:]
        self.size = new_size
        self.epoch += 1
        return destination, source

    def _per_row_arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.lengths,
            self.generated,
            self.last_tokens,
            self.min_new,
            self.max_new,
            self.stream_keys,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.num_top,
            self.stop_ids,
        )
