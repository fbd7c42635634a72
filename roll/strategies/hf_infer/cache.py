"""Keys and values: a row of fixed length for each running sample, and the prefix cache.

Layers of linear attention keep no token, but a state of fixed size, which each sample has one of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


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


_BLOCK = 16  # tokens; a shorter prefix is recomputed sooner than copied


@dataclass(slots=True, eq=False)
class CachedSequence:
    """``token_ids``: int64 (length,); ``keys_values``: (num_layers, 2, num_kv_heads, length, head_dim)."""

    token_ids: np.ndarray
    keys_values: torch.Tensor
    blocks: list[int]  # numbers of its whole blocks, see :func:`_chained`

    def common(self, token_ids: np.ndarray) -> int:
        """Length of the common prefix."""
        shorter = min(len(self.token_ids), len(token_ids))
        different = np.flatnonzero(self.token_ids[:shorter] != token_ids[:shorter])
        return int(different[0]) if len(different) else shorter


class PrefixCache:
    """Keys and values of ended samples, for prompts that begin with them (the next turn of a conversation).

    A table of blocks of tokens, each chained to those before it, leads to the sequence that holds a prefix, so a
    look-up costs the length of a prompt, however many sequences there are. ``max_tokens``: capacity of all sequences
    together; the least recently used leave first. 0: nothing is held.
    """

    def __init__(self, max_tokens: int) -> None:
        self.lengths = range(_BLOCK, max_tokens + 1)  # lengths of sequences that can be held
        self._sequences: OrderedDict[CachedSequence, None] = OrderedDict()  # the last one was used last
        self._table: dict[int, CachedSequence] = {}  # a block to the sequence with it that was put last
        self.num_tokens = 0  # tokens of all sequences
        self.num_reused = 0  # tokens that did not have to be computed, since the cache was made

    def find(self, token_ids: Sequence[int]) -> tuple[CachedSequence, int] | None:
        """The sequence with the longest prefix of a prompt, and how many of its tokens that is: never all of the
        prompt, since its last one must be computed for its logits. Valid until the next :meth:`put`."""
        prompt = np.asarray(token_ids, dtype=np.int64)
        if (found := self._holder(prompt, _chained(prompt))) is None:
            return None
        known = min(found.common(prompt), len(prompt) - 1)
        if known < _BLOCK:
            return None
        self._sequences.move_to_end(found)
        return found, known

    def put(self, token_ids: Sequence[int], keys_values: torch.Tensor) -> None:
        """Hold a sequence, with a copy of its ``keys_values`` (num_layers, 2, num_kv_heads, length, head_dim), in the
        place of one that is a prefix of it, if there is one."""
        new = np.asarray(token_ids, dtype=np.int64)
        blocks = _chained(new)
        prefix = self._holder(new, blocks)
        known = 0 if prefix is None else prefix.common(new)
        if prefix is not None and known == len(new):
            self._sequences.move_to_end(prefix)
            return
        if prefix is not None and known == len(prefix.token_ids):
            self._drop(prefix)
        while self.num_tokens + len(new) >= self.lengths.stop:
            self._drop(next(iter(self._sequences)))
        sequence = CachedSequence(new, keys_values.clone(), blocks)
        self._sequences[sequence] = None
        self.num_tokens += len(new)
        self._table.update(dict.fromkeys(blocks, sequence))

    def clear(self) -> None:
        """Drop everything."""
        self._sequences.clear()
        self._table.clear()
        self.num_tokens = 0

    def _holder(self, token_ids: np.ndarray, blocks: Sequence[int]) -> CachedSequence | None:
        """The sequence that has the most of these blocks, or any with their beginning."""
        return next((self._table[block] for block in reversed(blocks) if block in self._table), None)

    def _drop(self, sequence: CachedSequence) -> None:
        del self._sequences[sequence]
        self.num_tokens -= len(sequence.token_ids)
        for block in sequence.blocks:
            if self._table.get(block) is sequence:
                del self._table[block]


def _chained(token_ids: np.ndarray) -> list[int]:
    """A number for every whole block, made of its tokens and all before them; tokens are compared as well
    before a prefix is used."""
    data, size, number = token_ids.tobytes(), _BLOCK * token_ids.itemsize, 0
    blocks = []
    for start in range(0, len(data) - size + 1, size):
        number = hash((number, data[start : start + size]))
        blocks.append(number)
    return blocks
