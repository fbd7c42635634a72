"""The tokens whose score is a reward, and where it is read: the same in training and wherever a reward model scores.

A value belongs to the state in which a token is sampled, so to the tokens before it.  One token is therefore added
behind each sequence, which no model computes; the score of the sequence is the value at that place, so the model's
output at the **last attended token**, whatever id that is (a padding id among them).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FILLER = 0
"""Id of the added token and of padding; no result depends on it."""


def scoring_batch(
    sequences: Sequence[Sequence[int]],
    shared: Sequence[int] | None = None,
    places: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Right-padded rows of each sequence and one token more: ``input_ids`` int64, ``attention_mask``, ``response_mask``
    and ``score_mask`` bool (B, L).

    Args:
        shared: tokens at the beginning of each sequence that adjacent ones may have in common, which strategies then
            compute once; None: all are computed for each.
        places: of each sequence the numbers of tokens after which scores are read; None: after all of them.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    positions = torch.arange(int(lengths.max()) + 1)
    input_ids = torch.full((len(sequences), len(positions)), FILLER, dtype=torch.long)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    ends = positions == lengths[:, None]
    if places is not None:
        ends = torch.zeros_like(ends)
        for row, after in zip(ends, places, strict=True):
            row[torch.tensor(after, dtype=torch.long)] = True
    attention_mask = positions <= lengths[:, None]
    first = ends if shared is None else attention_mask & (positions >= torch.tensor(shared)[:, None])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": first | ends,
        "score_mask": ends,
    }


def end_scores(values: Tensor, score_mask: Tensor) -> Tensor:
    """(B,): the only score of each row; 0 for rows without one.

    Args:
        values: (B, L).
        score_mask: bool (B, L), one place a row.
    """
    return (values * score_mask).sum(1)
