"""Keys and values: a row of fixed length for each running sample, and a store of sequences whose samples have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps for each token."""

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
    """Where one decoding step of ``size`` rows writes and reads.

    Args:
        positions: int64 (size,), on the cache's device: where each row's new token goes.
        lengths: on the host, how many tokens each row that counts has with the new one; rows past its end only fill up
            the batch, and their positions lie past every length.
    """

    def __init__(self, cache: SlotCache, positions: torch.Tensor, lengths: np.ndarray) -> None:
        self._data = cache.data
        self.size = len(positions)
        self.end = int(lengths.max())
        self._ragged = bool((lengths != self.end).any())
        self.positions = positions
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


_WORTHWHILE = 16  # a shorter beginning is computed again sooner than copied


@dataclass(slots=True, eq=False)
class _Entry:
    token_ids: np.ndarray
    keys_values: torch.Tensor


class PrefixStore:
    """Holds what the weights of the moment have made of token sequences.

    Args:
        max_tokens: of all sequences together; those used longest ago leave first. 0: nothing is held.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: list[_Entry] = []
        """The one used last is the last."""
        self.num_tokens = 0
        self.num_reused = 0
        """Tokens that need not be computed, since the store was made."""

    def accepts(self, length: int) -> bool:
        """Whether a sequence of this length can be held."""
        return _WORTHWHILE <= length <= self._max_tokens

    def put(self, token_ids: Sequence[int], keys_values: torch.Tensor) -> None:
        """Hold a sequence; one that is a beginning of it leaves.

        Args:
            keys_values: (num_layers, 2, num_kv_heads, length, head_dim) of its tokens; copied.
        """
        new = np.asarray(token_ids, dtype=np.int64)
        for entry in [entry for entry in self._entries if _common(entry.token_ids, new) == len(entry.token_ids)]:
            self._drop(entry)
        while self.num_tokens + len(new) > self._max_tokens:
            self._drop(self._entries[0])
        self._entries.append(_Entry(new, keys_values.clone()))
        self.num_tokens += len(new)

    def longest(self, token_ids: Sequence[int]) -> torch.Tensor | None:
        """Keys and values of the longest beginning of a prompt that is there, (num_layers, 2, num_kv_heads, length,
        head_dim); never of the whole prompt, whose last token must be computed for its logits."""
        if not self._entries:
            return None
        prompt = np.asarray(token_ids[:-1], dtype=np.int64)
        lengths = [_common(entry.token_ids, prompt) for entry in self._entries]
        length = max(lengths)
        if length < _WORTHWHILE:
            return None
        entry = self._entries.pop(lengths.index(length))
        self._entries.append(entry)
        self.num_reused += length
        return entry.keys_values[:, :, :, :length]

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.num_tokens = 0

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.num_tokens -= len(entry.token_ids)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginning."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter
