"""Running samples, active rows at the front: arrays on the host, keys and values in rows of fixed length on the device,
and the draw of a token for each of them.

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
from llguidance import LLMatcher

from roll.strategies.engines.requests import FinishReason, GenerationOutput, GenerationRequest, StopStringMatcher
from roll.strategies.engines.sampling import RowSettings, penalise_repetition
from roll.strategies.hf_infer.drafts import Draftable

_NO_TOKEN = -1


@dataclass(slots=True)
class RunningSample:
    """The part of a sample's state that is not in the arrays."""

    request: GenerationRequest
    sample_index: int
    matcher: StopStringMatcher | None
    grammar: LLMatcher | None = None  # state of the JSON schema that the response follows
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, first token that was sampled with it)."""
    stale: bool = False  # its keys and values are those of other weights than the engine has
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    draftable: Draftable | None = None  # where drafts are made for it

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
    ``generated``, ``recorded`` (in the last step), ``last_tokens``, ``offsets`` (of rotary positions), and the sampling
    settings.  ``tokens`` and ``log_probs`` (capacity, max_model_len) hold the responses; ``stop_ids`` (capacity, any)
    is padded with -1.
    """

    capacity: int
    max_model_len: int
    size: int = 0
    samples: list[RunningSample] = field(default_factory=list)
    epoch: int = 0  # changes whenever rows come, go or change places

    def __post_init__(self) -> None:
        n = self.capacity
        self.lengths, self.generated, self.recorded, self.last_tokens = (np.zeros(n, np.int64) for _ in range(4))
        self.min_new, self.max_new, self.num_top, self.offsets, self.top_k = (np.zeros(n, np.int64) for _ in range(5))
        self.temperature, self.top_p, self.min_p, self.repetition_penalty = (np.ones(n, np.float32) for _ in range(4))
        self.stream_keys = np.zeros(n, np.uint64)
        self.stop_ids = np.full((n, 1), _NO_TOKEN, np.int64)
        self.tokens = np.zeros((n, self.max_model_len), np.int32)
        self.log_probs = np.zeros((n, self.max_model_len), np.float32)
        self.routes: np.ndarray | None = None  # (capacity, max_model_len, layers, k), of prompt and response

    def put_routes(self, row: int, of_prompt: np.ndarray, carried: GenerationOutput | None) -> None:
        """Set the routes of a row's first tokens. Tokens sampled elsewhere keep the routes they were sampled with: a
        replay must repeat those, not what the current weights choose."""
        if self.routes is None:
            self.routes = np.zeros((self.capacity, self.max_model_len, *of_prompt.shape[1:]), of_prompt.dtype)
        count = int(self.lengths[row])
        self.routes[row, :count] = of_prompt[:count]
        if carried is not None and carried.routes is not None:
            self.routes[row, : len(carried.routes)] = carried.routes

    def append(
        self,
        sample: RunningSample,
        stream_key: int,
        stop_ids: Sequence[int],
        carried: GenerationOutput | None = None,
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
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            getattr(self, name)[row] = getattr(params, name)
        self.num_top[row] = params.top_log_probs
        self.offsets[row] = offset
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((self.capacity, len(stop_ids)), _NO_TOKEN, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.samples.append(sample)
        self.size += 1
        self.epoch += 1

    def token_ids(self, row: int) -> list[int]:
        """Prompt and response of a row."""
        return [*self.samples[row].request.prompt_token_ids, *self.tokens[row, : self.generated[row]].tolist()]

    def record(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Add a sampled token to each of ``rows``. Returns bool, as many: it is a stop token, or completes a stop
        string, and enough tokens are there."""
        at = self.generated[rows]
        self.tokens[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.last_tokens[rows] = tokens
        for counted in (self.generated, self.recorded, self.lengths):
            counted[rows] += 1
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(1)
        for number, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            sample = self.samples[row]
            if sample.grammar is not None:
                sample.grammar.consume_token(token)
            if sample.matcher is not None and sample.matcher.push(token):
                stopped[number] = True
        return stopped & (at + 1 >= self.min_new[rows])

    def output(self, row: int, reason: FinishReason) -> GenerationOutput:
        count, sample, routes = int(self.generated[row]), self.samples[row], None
        if self.routes is not None:
            # The last token has not been an input.
            routes = self.routes[row, : max(0, len(sample.request.prompt_token_ids) + count - 1)].copy()
        bounds = pairwise([*sample.version_starts, (0, count)])
        return GenerationOutput(
            sample.request.request_id,
            sample.sample_index,
            self.tokens[row, :count].tolist(),
            self.log_probs[row, :count].tolist(),
            reason,
            weight_versions=[(version, start, end) for (version, start), (_, end) in bounds if end > start],
            top_log_probs=sample.top_log_probs,
            routes=routes,
        )

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows (sorted, unique); the last rows that stay take their places. Returns destination and source of
        these moves, which the cache must make too."""
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
        for to, origin in zip(destination, source, strict=True):
            self.samples[to] = self.samples[origin]
        del self.samples[new_size:]
        self.size = new_size
        self.epoch += 1
        return destination, source


@dataclass(frozen=True)
class CacheShape:
    """Size of a model's keys and values for each token.

    ``num_layers`` keep them; ``head_dim`` is the longest of their vectors, others are padded with zeros.
    ``states``: for each sample, shape and dtype of every tensor that other layers keep.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    states: tuple[tuple[torch.Size, torch.dtype], ...] = ()


class SlotCache:
    """Keys and values, allocated once.

    ``data``: (num_layers, 2, num_rows, num_kv_heads, max_len, head_dim); index 1 is key (0) or value (1).
    ``states``: (num_rows, ...) each, see :class:`CacheShape`.
    """

    def __init__(
        self, shape: CacheShape, num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.max_len = max_len
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, max_len, shape.head_dim)
        self.data = torch.zeros(size, dtype=dtype, device=device)
        self.states = [torch.zeros(num_rows, *own, dtype=kind, device=device) for own, kind in shape.states]

    def write_prompts(
        self, first_row: int, keys_values: torch.Tensor, counts: Sequence[int], states: Sequence[torch.Tensor] = ()
    ) -> None:
        """Copy prompts into the rows from ``first_row`` on: ``counts[0]`` rows for the first prompt, and so forth.
        ``keys_values`` and ``states`` as in :class:`~roll.strategies.hf_infer.decoder.PromptStates`."""
        length = keys_values.shape[4]
        for prompt, count in enumerate(counts):
            self.data[:, :, first_row : first_row + count, :, :length] = keys_values[:, :, prompt, None]
            for held, new in zip(self.states, states, strict=True):
                held[first_row : first_row + count] = new[prompt]
            first_row += count

    def move(self, destination: np.ndarray, source: np.ndarray, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``source`` over rows ``destination`` (the two do not meet)."""
        # By runs of adjacent rows (a group often ends together): ten times as fast as indexing by lists of rows.
        breaks = np.flatnonzero((np.diff(destination) != 1) | (np.diff(source) != 1)) + 1
        for to, origin in zip(np.split(destination, breaks), np.split(source, breaks), strict=True):
            target = self.data[:, :, to[0] : to[-1] + 1, :, :length]
            target.copy_(self.data[:, :, origin[0] : origin[-1] + 1, :, :length])
            for state in self.states:
                state[to[0] : to[-1] + 1] = state[origin[0] : origin[-1] + 1]


class DecodeSlots:
    """Cache positions that one decoding step of ``size`` rows writes and reads.

    Args:
        positions: int64 (size,), on the cache's device: where each row's new token goes.
        lengths: on the host, how many tokens each row that counts has with the new one; rows past its end only fill up
            the batch, and their positions lie past every length.
        offsets: int64 (size,), on the cache's device: what a row's rotary position is ahead of its cache position;
            None: nothing, as in prompts of text.
        multiple: so many places, or a multiple, are read; the cache has as many.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions: torch.Tensor,
        lengths: np.ndarray,
        offsets: torch.Tensor | None = None,
        multiple: int = 1,
    ) -> None:
        self._data, self.states = cache.data, cache.states
        self.count, self.size = len(lengths), len(positions)
        self.end = -(-int(lengths.max()) // multiple) * multiple
        self._ragged = bool((lengths != self.end).any())
        self.positions = positions
        self.rotary_positions = positions if offsets is None else positions + offsets
        num_heads, max_len = cache.shape.num_kv_heads, cache.max_len
        first = torch.arange(0, self.size * num_heads * max_len, max_len, device=positions.device)
        self._flat_index = (first.view(self.size, num_heads) + positions[:, None]).view(-1)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values (size, num_kv_heads, head_dim) of a layer; return those of all tokens,
        as two views (size, num_kv_heads, end, head_dim)."""
        held = []
        for part, new in zip(self._data[layer], (keys, values), strict=True):
            head_dim = part.shape[-1]
            part.view(-1, head_dim).index_copy_(0, self._flat_index, new.reshape(-1, head_dim).to(part.dtype))
            held.append(part[: self.size, :, : self.end])
        return held[0], held[1]

    def bias(self, window: int | None = None) -> torch.Tensor | None:
        """(size, end): 0 where a row has a token, the lowest number elsewhere; None when all rows are equally long. Of
        a ``window`` the last tokens alone are seen."""
        is_seen_whole = window is None or self.end <= window
        if not self._ragged and is_seen_whole:
            return None
        places = torch.arange(self.end, device=self.positions.device)
        past = places > self.positions[:, None]
        if window is not None and not is_seen_whole:
            past |= places <= self.positions[:, None] - window
        bias = torch.zeros(past.shape, dtype=self._data.dtype, device=past.device)
        return bias.masked_fill_(past, torch.finfo(bias.dtype).min)


class Places:
    """Where a pass samples: after each row's last token, and after each token of its draft.

    ``rows``: int64 (places,), the row of each, in order; ``positions``: which token of the response it is sampled;
    ``starts``: (rows + 1,), the first place of each row, and the number of all.
    """

    def __init__(self, generated: np.ndarray, drafts: Sequence[Sequence[int]] = ()) -> None:
        size = len(generated)
        lengths = np.zeros(size, np.int64)
        lengths[: len(drafts)] = [len(draft) for draft in drafts]
        self.starts = np.concatenate(([0], np.cumsum(lengths + 1)))
        self.rows = np.repeat(np.arange(size), lengths + 1)
        self.positions = generated[self.rows] + np.arange(len(self.rows)) - self.starts[self.rows]


class Sampler:
    """Samples for the active rows of ``rows``; keeps which tokens each row has seen where a repetition penalty asks.

    Args:
        masked: tokens of probability 0.
        in_logs: compute log-probs as a trainer does, not as logarithms of probabilities.
    """

    def __init__(
        self, rows: RunningRows, vocab_size: int, device: torch.device, masked: Sequence[int], in_logs: bool
    ) -> None:
        self._rows, self._vocab_size, self._device, self._in_logs = rows, vocab_size, device, in_logs
        self._masked = torch.tensor(masked, device=device) if masked else None
        self._seen: torch.Tensor | None = None
        self._epoch = -1  # epoch of `rows` that the settings are of
        self._settings: RowSettings

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """A sample with a repetition penalty has started in ``row``."""
        if self._seen is None:
            shape = (self._rows.capacity, self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self._seen[row] = False
        self._seen[row, torch.tensor(prompt, device=self._device)] = True

    def move(self, destination: np.ndarray, source: np.ndarray) -> None:
        """Rows have changed places."""
        if self._seen is not None:
            self._seen[torch.from_numpy(destination)] = self._seen[torch.from_numpy(source)]

    def sample(self, logits: torch.Tensor, places: Places) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token at every place: tokens int64 (places,), log-probs float64 (places,), on the host. ``logits``:
        (places, vocab_size), any float dtype; may be overwritten."""
        rows, at, positions = self._rows, places.rows, places.positions
        is_one_each = len(at) == rows.size
        if not is_one_each or self._epoch != rows.epoch:
            self._epoch = rows.epoch if is_one_each else -1
            top_p, min_p, penalty = rows.top_p[at], rows.min_p[at], rows.repetition_penalty[at]
            self._settings = RowSettings(rows.temperature[at], rows.top_k[at], top_p, min_p, penalty, self._device)
        settings = self._settings
        logits = logits.float()
        if self._masked is not None:
            logits[:, self._masked] = -torch.inf
        if settings.penalty is not None:
            assert self._seen is not None
            seen = self._seen[: rows.size] if is_one_each else self._seen[torch.from_numpy(at).to(self._device)]
            logits = penalise_repetition(logits, seen, settings.penalty)
        early = positions < rows.min_new[at]
        if early.any():
            stop_ids = rows.stop_ids[at]
            place, column = np.nonzero((stop_ids >= 0) & early[:, None])
            banned = torch.from_numpy(stop_ids[place, column]).to(self._device)
            logits[torch.from_numpy(place).to(self._device), banned] = -torch.inf
        for row, sample in enumerate(rows.samples):
            if sample.grammar is not None:
                # Of the tokens that cannot come next; after a complete text only its end can.
                banned_ids = np.frombuffer(sample.grammar.compute_logit_bias(), np.uint8)[: self._vocab_size] == 0
                logits[places.starts[row], torch.from_numpy(banned_ids).to(self._device)] = -torch.inf
        most_top = int(rows.num_top[: rows.size].max(initial=0))
        if settings.all_greedy:
            table = logits.log_softmax(-1)
            log_probs, tokens = table.max(-1)
        else:
            scaled = settings.filtered(logits)
            logs = scaled.log_softmax(-1) if self._in_logs else None
            probs = scaled.softmax(-1) if logs is None else logs.exp()
            tokens = settings.drawn(logits, probs, rows.stream_keys[at], positions)
            index = tokens[:, None]
            log_probs = (probs.gather(1, index).log() if logs is None else logs.gather(1, index))[:, 0]
            table = probs.log() if most_top else probs
        if most_top:
            self._record_top(table, most_top, places)
        if settings.penalty is not None and self._seen is not None:
            # A row with drafts has no penalty, and what is marked in it is not looked at.
            self._seen[torch.from_numpy(at).to(self._device), tokens] = True
        # One transfer; ids and float32 log-probs are exact in float64.
        host = torch.stack((tokens.double(), log_probs.double())).cpu().numpy()
        return host[0].astype(np.int64), host[1]

    def _record_top(self, log_probs: torch.Tensor, count: int, places: Places) -> None:
        """Record the most probable tokens of the rows that ask for them."""
        values, tokens = log_probs.topk(min(count, self._vocab_size), dim=-1)
        value_rows, token_rows = values.tolist(), tokens.tolist()
        for row in np.flatnonzero(self._rows.num_top[: self._rows.size]):
            wanted, place = int(self._rows.num_top[row]), places.starts[row]
            top = list(zip(token_rows[place][:wanted], value_rows[place][:wanted], strict=True))
            self._rows.samples[row].top_log_probs.append(top)
