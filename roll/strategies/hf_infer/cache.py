"""The prefix cache: keys and values of ended samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
