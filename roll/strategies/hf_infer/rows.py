"""Running samples as arrays on the host, active rows at the front, and the draw of a token for each of them.

Order of the settings: repetition penalty, ban of stop tokens before ``min_new_tokens``, JSON schema, temperature,
min-p, top-k, top-p (on what min-p and top-k left, renormalised). A token is drawn by inverting the cumulative
distribution at one uniform number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from roll.strategies.engines.requests import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialSample,
    StopStringMatcher,
    filter_threshold,
    invert_cumulative,
    penalise_repetition,
    uniforms,
)
from roll.strategies.hf_infer.grammar import Grammar

_NO_TOKEN = -1


@dataclass(slots=True)
class RunningSample:
    """The part of a sample's state that is not in the arrays."""

    request: GenerationRequest
    sample_index: int
    matcher: StopStringMatcher | None
    grammar: Grammar | None = None
    """State of the JSON schema that the response follows."""
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, first token that was sampled with it)."""
    stale: bool = False
    """Its keys and values are those of other weights than the engine has."""
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most probable tokens of each position, if the request wants them."""
    routes: np.ndarray | None = None
    """Experts of every token so far, prompt included, where they are recorded."""

    def note_version(self, version: int, num_tokens: int) -> None:
        """Tokens from number ``num_tokens`` on are sampled with weights ``version``."""
        if self.version_starts and self.version_starts[-1][1] == num_tokens:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, num_tokens))


@dataclass
class RunningRows:
    """Rows [0, size) are running samples; a leaving row's place is taken by the last one.

    Arrays of shape (capacity,): ``lengths`` (tokens of prompt and response, the last of which is not in the cache yet),
    ``generated``, ``last_tokens``, ``offsets`` (of rotary positions), and the sampling settings.  ``tokens`` and
    ``log_probs`` (capacity, max_model_len) hold the responses; ``stop_ids`` (capacity, any) is padded with -1.
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
        self.offsets = np.zeros(n, np.int64)
        self.stop_ids = np.full((n, 1), _NO_TOKEN, np.int64)
        self.tokens = np.zeros((n, self.max_model_len), np.int32)
        self.log_probs = np.zeros((n, self.max_model_len), np.float32)
        self.routes: np.ndarray | None = None
        """(capacity, max_model_len, layers, k), of prompt and response."""

    def put_routes(self, row: int, of_prompt: np.ndarray, carried: PartialSample | None) -> None:
        """Set the routes of a row's first tokens. Tokens sampled elsewhere keep the routes they were sampled with: a
        replay must repeat those, not what the current weights choose."""
        if self.routes is None:
            self.routes = np.zeros((self.capacity, self.max_model_len, *of_prompt.shape[1:]), of_prompt.dtype)
        count = int(self.lengths[row])
        self.routes[row, :count] = of_prompt[:count]
        if carried is not None and carried.routes is not None:
            self.routes[row, : len(carried.routes)] = carried.routes

    def add_routes(self, chosen: np.ndarray) -> None:
        """Add the routes of the first rows' last tokens, the inputs of this step."""
        assert self.routes is not None
        size = len(chosen)
        self.routes[np.arange(size), self.lengths[:size] - 1] = chosen

    def append(
        self,
        sample: RunningSample,
        stream_key: int,
        stop_ids: Sequence[int],
        carried: PartialSample | None = None,
        offset: int = 0,
    ) -> None:
        """Start a sample in the next row, after its prompt and the tokens that it has already (``carried``); these
        are in the cache, its next token is not sampled yet. ``offset``: of its rotary positions."""
        row, params = self.size, sample.request.params.normalised()
        assert row < self.capacity, "no free row"
        prompt_length = len(sample.request.prompt_token_ids)
        self.generated[row] = 0
        if carried is not None:
            count = self.generated[row] = len(carried.token_ids)
            self.tokens[row, :count] = carried.token_ids
            self.log_probs[row, :count] = carried.log_probs
            sample.version_starts = [(version, start) for version, start, _ in carried.weight_versions]
            sample.top_log_probs = list(carried.top_log_probs)
        self.lengths[row] = prompt_length + self.generated[row]
        self.min_new[row] = params.min_new_tokens
        self.max_new[row] = min(params.max_new_tokens, self.max_model_len - prompt_length)
        self.stream_keys[row] = stream_key
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.num_top[row] = params.top_log_probs
        self.offsets[row] = offset
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

    def token_ids(self, row: int) -> list[int]:
        """Prompt and response of a row."""
        return [*self.samples[row].request.prompt_token_ids, *self.tokens[row, : self.generated[row]].tolist()]

    def record(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Add one sampled token to every row."""
        rows, at = np.arange(self.size), self.generated[: self.size]
        self.tokens[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.last_tokens[: self.size] = tokens
        for row, grammar in self.grammars():
            grammar.push(int(tokens[row]))
        self.generated[: self.size] += 1
        self.lengths[: self.size] += 1

    def grammars(self) -> list[tuple[int, Grammar]]:
        """Rows whose responses follow a schema."""
        return [(row, sample.grammar) for row, sample in enumerate(self.samples) if sample.grammar is not None]

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
        count, sample = int(self.generated[row]), self.samples[row]
        if self.routes is not None:
            # The last token has not been an input.
            sample.routes = self.routes[row, : max(0, len(sample.request.prompt_token_ids) + count - 1)].copy()
        bounds = pairwise([*sample.version_starts, (0, count)])
        return GenerationOutput(
            sample.request.request_id,
            sample.sample_index,
            self.tokens[row, :count].tolist(),
            self.log_probs[row, :count].tolist(),
            reason,
            weight_versions=[(version, start, end) for (version, start), (_, end) in bounds if end > start],
            top_log_probs=sample.top_log_probs,
            routes=sample.routes,
        )

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
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name not in ("tokens", "log_probs", "routes"):
                array[destination] = array[source]
        for history in (self.tokens, self.log_probs):
            history[destination, :longest] = history[source, :longest]
        if self.routes is not None:
            deepest = int(self.lengths[destination].max(initial=0))
            self.routes[destination, :deepest] = self.routes[source, :deepest]
        self.num_matchers -= sum(self.samples[row].matcher is not None for row in rows)
        for to, origin in zip(destination, source, strict=True):
            self.samples[to] = self.samples[origin]
        del self.samples[new_size:]
        self.size = new_size
        self.epoch += 1
        return destination, source


class Sampler:
    """Samples for the active rows of ``rows``; keeps which tokens each row has seen where a repetition penalty asks.

    Args:
        masked_token_ids: never sampled: their probability is 0.
        in_logs: log-probs are computed as a trainer does, not as logarithms of probabilities.
    """

    def __init__(
        self,
        rows: RunningRows,
        vocab_size: int,
        device: torch.device,
        masked_token_ids: Sequence[int] = (),
        in_logs: bool = False,
    ) -> None:
        self._in_logs = in_logs
        self._masked = torch.tensor(masked_token_ids, device=device) if masked_token_ids else None
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._seen: torch.Tensor | None = None
        self._settings = _Settings(rows, device)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """A sample has started in ``row``."""
        if self._rows.repetition_penalty[row] == 1:
            return
        if self._seen is None:
            shape = (self._rows.capacity, self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self._seen[row] = False
        self._seen[row, torch.tensor(prompt, device=self._device)] = True

    def move(self, destination: np.ndarray, source: np.ndarray) -> None:
        """Rows have changed places."""
        if self._seen is not None:
            self._seen[torch.from_numpy(destination)] = self._seen[torch.from_numpy(source)]

    def sample(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token for every active row.

        Args:
            logits: (size, vocab_size), any float dtype; may be overwritten.

        Returns:
            tokens int64 (size,), log-probs float64 (size,), on the host.
        """
        rows = self._rows
        if self._settings.epoch != rows.epoch:
            self._settings = _Settings(rows, self._device)
        settings = self._settings
        logits = logits.float()
        if self._masked is not None:
            logits[:, self._masked] = -torch.inf
        if settings.penalty is not None:
            assert self._seen is not None
            logits = penalise_repetition(logits, self._seen[: rows.size], settings.penalty)
        early = rows.generated[: rows.size] < rows.min_new[: rows.size]
        if early.any():
            row, column = np.nonzero((rows.stop_ids[: rows.size] >= 0) & early[:, None])
            banned = torch.from_numpy(rows.stop_ids[row, column]).to(self._device)
            logits[torch.from_numpy(row).to(self._device), banned] = -torch.inf
        for at, grammar in rows.grammars():
            logits[at, torch.from_numpy(grammar.banned()).to(self._device)] = -torch.inf
        if settings.all_greedy:
            distribution = logits.log_softmax(-1)
            log_probs, tokens = distribution.max(-1)
        else:
            tokens, probs, logs = self._draw(logits, settings)
            index = tokens[:, None]
            log_probs = (probs.gather(1, index).log() if logs is None else logs.gather(1, index))[:, 0]
            distribution = probs
        if settings.most_top:
            self._record_top(distribution if settings.all_greedy else distribution.log(), settings.most_top)
        if settings.penalty is not None and self._seen is not None:
            self._seen[torch.arange(rows.size, device=self._device), tokens] = True
        # One transfer; ids and float32 log-probs are exact in float64.
        host = torch.stack((tokens.double(), log_probs.double())).cpu().numpy()
        return host[0].astype(np.int64), host[1]

    def _draw(
        self, logits: torch.Tensor, settings: _Settings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens, probabilities (size, vocab_size), and with ``in_logs`` their logarithms."""
        rows = self._rows
        scaled = logits if settings.temperature is None else logits / settings.temperature[:, None]
        if settings.filters:
            threshold = filter_threshold(scaled, settings.top_k, settings.top_p, settings.min_p)
            scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
        logs = scaled.log_softmax(-1) if self._in_logs else None
        probs = scaled.softmax(-1) if logs is None else logs.exp()
        draws = uniforms(rows.stream_keys[: rows.size], rows.generated[: rows.size])
        # The search may end past a row that is not finite. Any valid token will do: its log-prob is not finite either.
        tokens = invert_cumulative(probs, torch.from_numpy(draws).to(self._device)).clamp_(0, self._vocab_size - 1)
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
        return tokens, probs, logs

    def _record_top(self, log_probs: torch.Tensor, count: int) -> None:
        """Record the most probable tokens of the rows that ask for them."""
        values, tokens = log_probs.topk(min(count, self._vocab_size), dim=-1)
        value_rows, token_rows = values.tolist(), tokens.tolist()
        for row in np.flatnonzero(self._rows.num_top[: self._rows.size]):
            wanted = int(self._rows.num_top[row])
            top = list(zip(token_rows[row][:wanted], value_rows[row][:wanted], strict=True))
            self._rows.samples[row].top_log_probs.append(top)


class _Settings:
    """The active rows' settings on the device; None or False where no row uses one."""

    def __init__(self, rows: RunningRows, device: torch.device) -> None:
        n = rows.size
        self.epoch = rows.epoch

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[:n].copy()).to(device)

        temperature = rows.temperature[:n]
        greedy = temperature == 0
        self.all_greedy = bool(greedy.all())
        self.greedy = on_device(greedy) if greedy.any() else None
        plain = bool(((temperature == 1) | greedy).all())
        self.temperature = None if plain else on_device(np.where(greedy, np.float32(1), temperature))
        self.top_k = on_device(rows.top_k) if (rows.top_k[:n] > 0).any() else None
        self.top_p = on_device(rows.top_p) if (rows.top_p[:n] < 1).any() else None
        self.min_p = on_device(rows.min_p) if (rows.min_p[:n] > 0).any() else None
        self.filters = self.top_k is not None or self.top_p is not None or self.min_p is not None
        penalised = bool((rows.repetition_penalty[:n] != 1).any())
        self.penalty = on_device(rows.repetition_penalty) if penalised else None
        self.most_top = int(rows.num_top[:n].max(initial=0))
