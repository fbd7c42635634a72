"""Attention patterns of a flat run of tokens: which tokens see which.

Rows one after another (:class:`PackedSequences`), or a tree in which the beginnings that rows have in common are there
once (:class:`PrefixTree`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

Ints = NDArray[np.int64]

# Fewer tokens are not worth an attention call of their own, unless they are the prompt of both rows.
MIN_SHARED = 64


@dataclass(frozen=True)
class VarlenCall:
    """Arguments of a kernel that attends from each of S sequences of queries to a sequence of keys. The last query of a
    sequence sees its last key, the one before it all keys but that, and so on."""

    lengths: tuple[tuple[int, int], ...]
    """Queries and keys of each sequence."""
    query_offsets: Tensor
    """int32 (S + 1,), where each begins, and the number of queries."""
    key_offsets: Tensor
    """int32 (S + 1,), the same of keys."""
    keys: Tensor | None = None
    """int64, the token of each key; None: keys are those of the tokens, in order."""


@dataclass(frozen=True)
class PackedSequences:
    """A flat run of N tokens as sequences that follow one another and do not see each other."""

    lengths: tuple[int, ...]
    """Tokens of each; their sum is N."""
    offsets: Tensor
    """int32 (sequences + 1,), where each begins, and N."""

    def padded(self, count: int) -> PackedSequences:
        """With ``count`` more tokens, a sequence of their own."""
        total = self.offsets[-1:] + count
        return PackedSequences((*self.lengths, count), torch.cat([self.offsets, total])) if count else self

    @property
    def varlen(self) -> VarlenCall:
        return VarlenCall(tuple((length, length) for length in self.lengths), self.offsets, self.offsets)


Pieces = tuple[tuple[int, int], ...]
"""Beginnings of runs, one after another: the index of each run, and how many of its tokens."""


@dataclass(frozen=True)
class Run:
    """Adjacent tokens that see those before them in the run, and all of ``before``."""

    length: int
    before: Pieces = ()
    """The tokens that precede the run in its rows; empty for a root."""

    @property
    def context(self) -> int:
        """Tokens of ``before``."""
        return sum(length for _, length in self.before)


@dataclass(frozen=True)
class RunBatch:
    """Runs, padded to R tokens after contexts of K tokens. Indices of padding point at token 0: harmless,
    since its result is discarded."""

    own: Tensor
    """int64 (n, R), indices into the N tokens."""
    contexts: Tensor
    """int64 (C, K), indices into the N tokens: what comes before runs, each once. K is 0 for roots."""
    context_of_run: Tensor
    """int64 (n,)."""
    context_lengths: Tensor
    """int64 (n,)."""
    mask: Tensor | None = None
    """bool (n or 1, 1, R, K + R): what a token may see of its context and of its own run; None: causal."""


@dataclass(frozen=True)
class PrefixTree:
    """A flat run of N tokens, each of which sees what comes before it in the rows that share it, and nothing else."""

    runs: tuple[Run, ...]
    """In the order of the N tokens, which are theirs. A run comes after those that it sees."""
    rows: Tensor
    """int64 (N,), how many rows share each token."""
    row_lengths: Tensor
    """int64 (N,), the tokens of the longest of those rows, the last one, which predicts nothing, included."""
    only_prompts: bool
    """Nothing is shared but prompts of groups: every run is a root, or comes after one."""
    num_padding: int = 0
    """Tokens at the end that belong to no run; their results are discarded."""

    def padded(self, count: int) -> PrefixTree:
        """With ``count`` more padding tokens."""
        rows, lengths = pad(self.rows, (0, count)), pad(self.row_lengths, (0, count))
        return replace(self, rows=rows, row_lengths=lengths, num_padding=self.num_padding + count)

    @cached_property
    def most_parts(self) -> int:
        """The most runs that come directly after one other run."""
        ends = [run.before[-1][0] for run in self.runs if run.before]
        return max(Counter(ends).values(), default=0)

    @cached_property
    def varlen(self) -> VarlenCall:
        """A sequence for each run, whose keys are its context and itself, and one for the padding."""
        runs = [*self.runs, Run(self.num_padding)] if self.num_padding else self.runs
        paths = [places_of((*run.before, (index, run.length)), self._starts) for index, run in enumerate(runs)]
        lengths = [run.length for run in runs], [len(path) for path in paths]
        offsets = [self._tensor(np.cumsum([0, *counts]).astype(np.int32)) for counts in lengths]
        keys = self._tensor(np.concatenate(paths))
        return VarlenCall(tuple(zip(*lengths, strict=True)), offsets[0], offsets[1], keys)

    def is_whole(self, run: Run) -> bool:
        """The run is computed by causal attention of its context and itself, of which only its own results are kept.

        That costs half the square of the context, a mask half the square of the run.
        """
        return run.context < run.length and not (self.only_prompts and run.before)

    @property
    def longest(self) -> int:
        """The most keys of a run."""
        return max((run.context + run.length for run in self.runs), default=0)

    def seen(self, index: int, window: int | None) -> Tensor:
        """:func:`visible` for a run after its context, kept for the next layers."""
        found = self._seen.get((index, window))
        if found is None:
            run = self.runs[index]
            found = self._seen[index, window] = visible(run.length, run.context, window, self.rows.device)
        return found

    @cached_property
    def _seen(self) -> dict[tuple[int, int | None], Tensor]:
        return {}

    @cached_property
    def batches(self) -> tuple[RunBatch, ...]:
        """The runs: prompts, and the responses to them; of other trees those of like sizes, up to a power of two."""
        return tuple(self._batch(members) for members in self._members)

    @cached_property
    def restore(self) -> Tensor:
        """int64 (N,), the place of each token in the batches, flattened one after another."""
        places, offset = np.zeros(self.rows.numel(), dtype=np.int64), 0
        for members, batch in zip(self._members, self.batches, strict=True):
            for index in members:
                run, start = self.runs[index], self._starts[index]
                begin = offset + (run.context if batch.mask is None else 0)
                places[start : start + run.length] = np.arange(begin, begin + run.length)
                offset += batch.own.shape[1]
        return self._tensor(places)

    @cached_property
    def _members(self) -> list[list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for index, run in enumerate(self.runs):
            sizes = (run.context + run.length,) if self.is_whole(run) else (run.length, run.context)
            kind = (bool(run.before),) if self.only_prompts else tuple(size.bit_length() for size in sizes)
            found.setdefault(kind, []).append(index)
        return [found[kind] for kind in sorted(found)]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((run.length for run in self.runs), initial=0))

    def _batch(self, members: list[int]) -> RunBatch:
        runs = [self.runs[index] for index in members]
        own = [np.arange(run.length) + self._starts[index] for index, run in zip(members, runs, strict=True)]
        befores: list[Pieces] = [run.before for run in runs]
        if self.is_whole(runs[0]):
            own = [np.append(places_of(run.before, self._starts), part) for run, part in zip(runs, own, strict=True)]
            befores = [()] * len(runs)
        distinct = list(dict.fromkeys(befores))
        contexts = [places_of(before, self._starts) for before in distinct]
        of_run = np.array([distinct.index(before) for before in befores])
        lengths = np.array([len(contexts[place]) for place in of_run])
        batch = RunBatch(
            own=self._tensor(_rows_of(own)),
            contexts=self._tensor(_rows_of(contexts)),
            context_of_run=self._tensor(of_run),
            context_lengths=self._tensor(lengths),
        )
        if self.is_whole(runs[0]):
            return batch
        (width, length), device = (batch.contexts.shape[1], batch.own.shape[1]), self.rows.device
        # One mask for all where no context is padded.
        counts = batch.context_lengths[: None if lengths.min() < width else 1, None, None]
        context = (torch.arange(width, device=device) < counts).expand(-1, length, -1)
        triangle = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(len(counts), -1, -1)
        return replace(batch, mask=torch.cat([context, triangle], dim=2)[:, None])

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.tensor(values, device=self.rows.device)


AttentionPattern = PrefixTree | PackedSequences
"""Attention pattern of a flat run of tokens: which tokens see which."""


class Uncopied:
    """A pattern as an argument of layers: a unit of FSDP2 rebuilds every dataclass among its arguments, and what a
    pattern keeps for the next layers would be lost with it."""

    def __init__(self, pattern: AttentionPattern) -> None:
        self.pattern = pattern


def visible(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """bool (length, context + length): the keys that each of the last ``length`` tokens of a sequence sees; with a
    window itself and the ``window - 1`` before it."""
    mask = torch.ones((length, context + length), dtype=torch.bool, device=device).tril_(context)
    return mask if window is None else mask.triu_(context + 1 - window)


def _rows_of(parts: Sequence[Ints]) -> Ints:
    """The parts as rows, padded with 0 to the longest."""
    rows = np.zeros((len(parts), max(map(len, parts))), dtype=np.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


def places_of(pieces: Pieces, starts: Sequence[int]) -> Ints:
    """The indices of tokens, from the first index of each run."""
    return np.concatenate(
        [np.zeros(0, dtype=np.int64), *(np.arange(length) + starts[index] for index, length in pieces)]
    )


def common_beginnings(keys: Tensor, response_mask: Tensor) -> Ints:
    """int64 (B, B): tokens at their beginnings that two rows can share; 0 for a row with itself or without a response.

    A common prompt is shared, whatever its length; anything that is longer by :data:`MIN_SHARED` tokens is too.  The
    last response token of a row predicts nothing and is not among its tokens.

    Args:
        keys: int64 (B, L), ids, or what else tells tokens apart.
        response_mask: bool (B, L); its first column is ignored.
    """
    ids, mask = keys.int().cpu().numpy(), response_mask.cpu().numpy().astype(bool)
    first, last = ends_of_responses(mask)
    # In sorted order, two rows have in common what all neighbours between them have.
    order = sorted(np.flatnonzero(last).tolist(), key=lambda row: ids[row].tobytes())
    ordered = ids[order]
    differs = np.pad(ordered[1:] != ordered[:-1], ((0, 0), (0, 1)), constant_values=True)
    neighbours = differs.argmax(1)
    alike = np.zeros((len(ids), len(ids)), dtype=np.int64)
    for place, row in enumerate(order[:-1]):
        alike[row, order[place + 1 :]] = np.minimum.accumulate(neighbours[place:])
    alike = np.minimum(alike + alike.T, np.minimum.outer(last, last))
    prompts = np.where((first[:, None] == first) & (alike >= first), np.minimum(alike, first), 0)
    return np.where(alike >= prompts + MIN_SHARED, alike, prompts)


def ends_of_responses(mask: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """int64 (B,) each: the columns of the first and the last response token of each row, not counting the first column;
    0 for a row without one."""
    mask = mask.copy()
    mask[:, :1] = False
    first, last = mask.argmax(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    return first, np.where(mask.any(1), last, 0)


def sharers(common: Ints) -> tuple[list[int], list[int]]:
    """For each row the earlier row that it shares most tokens with, and their number; of :func:`common_beginnings`."""
    earlier = np.tril(common, -1)
    return earlier.argmax(1).tolist(), earlier.max(1, initial=0).tolist()


def runs_of_rows(
    first: Ints, last: Ints, parents: Sequence[int], shared: Sequence[int], only_prompts: bool
) -> tuple[list[Run], list[Ints]]:
    """The runs of a tree, and the indices of each row's tokens in it.

    A row is a run that leaves an earlier one, or goes on where that one ends and makes it longer.  Where only prompts
    are shared each is a run by itself, so that what comes after them is of like sizes.
    """
    runs: list[Run] = []
    paths: list[Pieces] = []
    for row, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        path = _cut(paths[parents[row]], shared[row]) if shared[row] else ()
        if only_prompts and end and not path:
            runs.append(Run(begin))
            path = ((len(runs) - 1, begin),)
        own = end - sum(length for _, length in path)
        if own and path and not only_prompts and runs[path[-1][0]].length == path[-1][1]:
            index, length = path[-1]
            runs[index] = replace(runs[index], length=length + own)
            path = (*path[:-1], (index, length + own))
        elif own:
            runs.append(Run(own, path))
            path = (*path, (len(runs) - 1, own))
        paths.append(path)
    starts = list(accumulate((run.length for run in runs), initial=0))
    return runs, [places_of(path, starts) for path in paths]


def _cut(pieces: Pieces, count: int) -> Pieces:
    """The first ``count`` tokens of ``pieces``."""
    ends = accumulate((length for _, length in pieces), initial=0)
    cut = ((index, min(length, count - begin)) for (index, length), begin in zip(pieces, ends, strict=False))
    return tuple((index, length) for index, length in cut if length > 0)
