"""Keys and values: a row of fixed length for each running sample, and the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class CacheShape:
    """Size of a model's keys and values for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class SlotCache:
    """Keys and values, allocated once.

    ``data``: (num_layers, 2, num_rows, num_kv_heads, max_len, head_dim); index 1 is key (0) or value (1).
    """

    def __init__(
        self, shape: CacheShape, num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.max_len = max_len
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, max_len, shape.head_dim)
        self.data = torch.zeros(size, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write_prompts(self, first_row: int, keys_values: torch.Tensor, counts: Sequence[int]) -> None:
        """Copy prompts into the rows from ``first_row`` on: ``counts[0]`` rows for the first prompt, and so forth.

        Args:
            keys_values: (num_layers, 2, num_prompts, num_kv_heads, longest prompt, head_dim).
        """
        length = keys_values.shape[4]
        for prompt, count in enumerate(counts):
            self.data[:, :, first_row : first_row + count, :, :length] = keys_values[:, :, prompt, None]
            first_row += count

    def read(self, row: int, length: int) -> torch.Tensor:
        """The first ``length`` tokens of a row, a view: (num_layers, 2, num_kv_heads, length, head_dim)."""
        return self.data[:, :, row, :, :length]

    def move(self, destination: np.ndarray, source: np.ndarray, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``source`` over rows ``destination`` (the two do not meet)."""
        # Slices of neighbouring rows (a group often ends together): ten times as fast as indexing by lists of rows.
        breaks = np.flatnonzero((np.diff(destination) != 1) | (np.diff(source) != 1)) + 1
        for to, origin in zip(np.split(destination, breaks), np.split(source, breaks), strict=True):
            target = self.data[:, :, to[0] : to[-1] + 1, :, :length]
            target.copy_(self.data[:, :, origin[0] : origin[-1] + 1, :, :length])


class DecodeSlots:
    """Cache positions that one decoding step of ``size`` rows writes and reads.

    Args:
        positions: int64 (size,), on the cache's device: where each row's new token goes.
        lengths: on the host, how many tokens each row that counts has with the new one; rows past its end only fill up
            the batch, and their positions lie past every length.
        offsets: int64 (size,), on the cache's device: what a row's rotary position is ahead of its cache position;
            None: nothing, as in prompts of text.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions: torch.Tensor,
        lengths: np.ndarray,
        offsets: torch.Tensor | None = None,
    ) -> None:
        self._data = cache.data
        self.size = len(positions)
        self.end = int(lengths.max())
        self._ragged = bool((lengths != self.end).any())
        self.positions = positions
        self.rotary_positions = positions if offsets is None else positions + offsets
        num_heads, max_len = cache.shape.num_kv_heads, cache.max_len
        first = torch.arange(0, self.size * num_heads * max_len, max_len, device=positions.device)
        self._flat_index = (first.view(self.size, num_heads) + positions[:, None]).view(-1)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values (size, num_kv_heads, head_dim) of a layer; return those of all tokens.

        Returns:
            Two views (size, num_kv_heads, end, head_dim).
        """
        held = []
        for part, new in zip(self._data[layer], (keys, values), strict=True):
            head_dim = part.shape[-1]
            part.view(-1, head_dim).index_copy_(0, self._flat_index, new.reshape(-1, head_dim))
            held.append(part[: self.size, :, : self.end])
        return held[0], held[1]

    def bias(self) -> torch.Tensor | None:
        """(size, end): 0 where a row has a token, the lowest number elsewhere; None when all rows are equally long."""
        if not self._ragged:
            return None
        past = torch.arange(self.end, device=self.positions.device) > self.positions[:, None]
        bias = torch.zeros(past.shape, dtype=self._data.dtype, device=past.device)
        return bias.masked_fill_(past, torch.finfo(bias.dtype).min)


_WORTHWHILE = 16  # tokens; a shorter prefix is recomputed sooner than copied
_GROWTH = 1.25  # factor for a full buffer


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence of ``length`` tokens in buffers that have room for more.

    ``token_ids``: int64 (capacity,); ``keys_values``: (num_layers, 2, num_kv_heads, capacity, head_dim).
    """

    token_ids: np.ndarray
    keys_values: torch.Tensor
    length: int

    @property
    def capacity(self) -> int:
        return len(self.token_ids)

    def common(self, token_ids: np.ndarray) -> int:
        """Length of the common prefix of the sequence and ``token_ids``."""
        shorter = min(self.length, len(token_ids))
        different = np.flatnonzero(self.token_ids[:shorter] != token_ids[:shorter])
        return int(different[0]) if len(different) else shorter


class PrefixCache:
    """Keys and values of prompts and ended samples, for prompts that begin with them (the next turn of a conversation).

    A sequence that goes on is appended to in place, so a turn copies its new tokens, and the whole sequence only into
    the rows that it is decoded in.

    Args:
        max_tokens: capacity of all sequences together; the least recently used leave first. 0: nothing is held.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: list[_Entry] = []
        """The most recently used is the last."""
        self.num_reused = 0
        """Tokens that did not have to be computed, since the cache was made."""

    @property
    def num_tokens(self) -> int:
        """Tokens that there is room for in all sequences."""
        return sum(entry.capacity for entry in self._entries)

    def accepts(self, length: int) -> bool:
        """True for a sequence of a length that can be held."""
        return _WORTHWHILE <= length <= self._max_tokens

    def put(self, token_ids: Sequence[int], keys_values: torch.Tensor) -> None:
        """Hold a sequence: append it to the longest entry that is a prefix of it, and drop the other prefixes.

        Args:
            keys_values: (num_layers, 2, num_kv_heads, length, head_dim) of its tokens; copied.
        """
        new = np.asarray(token_ids, dtype=np.int64)
        common = [entry.common(new) for entry in self._entries]
        if len(new) in common:
            self._touch(self._entries[common.index(len(new))])
            return
        prefixes = [entry for entry, count in zip(self._entries, common, strict=True) if count == entry.length]
        longest = max(prefixes, key=lambda entry: entry.length, default=None)
        self._entries = [entry for entry in self._entries if entry is longest or entry not in prefixes]
        known = longest.length if longest is not None else 0
        entry = self._with_room(longest, known, new, keys_values)
        entry.keys_values[:, :, :, known : len(new)] = keys_values[:, :, :, known:]

    def extended(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, int] | None:
        """Room for the keys and values of a prompt, with its longest prefix in the cache filled in.

        Returns:
            keys_values (num_layers, 2, num_kv_heads, length of the prompt, head_dim), whose last tokens the caller has
            to fill in; and how many tokens are there, never all of them: the last one must be computed for its logits.
            None: no prefix is long enough.
        """
        prompt = np.asarray(token_ids, dtype=np.int64)
        common = [min(entry.common(prompt), len(prompt) - 1) for entry in self._entries]
        known = max(common, default=0)
        if known < _WORTHWHILE:
            return None
        self.num_reused += known
        found = self._entries[common.index(known)]
        if known < found.length or not self.accepts(len(prompt)):
            # The entry's tokens behind the prefix belong to another sequence, which may be in use.
            self._touch(found)
            room = found.keys_values.new_empty(_shape(found.keys_values, len(prompt)))
            room[:, :, :, :known] = found.keys_values[:, :, :, :known]
            return room, known
        entry = self._with_room(found, known, prompt, found.keys_values)
        return entry.keys_values[:, :, :, : len(prompt)], known

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()

    def _with_room(self, entry: _Entry | None, known: int, token_ids: np.ndarray, like: torch.Tensor) -> _Entry:
        """``entry``, or a new one, as the most recently used, with ``token_ids`` and room for their keys and values."""
        length = len(token_ids)
        if entry is not None:
            self._entries.remove(entry)
        if entry is None or entry.capacity < length:
            # A longer buffer each time, so that all copies of a growing sequence cost a constant times its length.
            spare = self._max_tokens - self.num_tokens
            capacity = length if entry is None else max(length, min(int(entry.capacity * _GROWTH), spare))
            grown = _Entry(np.empty(capacity, np.int64), like.new_empty(_shape(like, capacity)), length)
            if entry is not None:
                grown.keys_values[:, :, :, :known] = entry.keys_values[:, :, :, :known]
            entry = grown
        entry.token_ids[:length], entry.length = token_ids, length
        while self.num_tokens + entry.capacity > self._max_tokens:
            self._entries.pop(0)
        self._entries.append(entry)
        return entry

    def _touch(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)


def _shape(keys_values: torch.Tensor, length: int) -> tuple[int, ...]:
    return (*keys_values.shape[:3], length, keys_values.shape[4])
