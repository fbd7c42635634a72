"""How the rows of a micro-batch are laid out for the model, and where each computed value belongs.

A batch has one row a sample: ``[prompt | response | padding]``.  A layout says which token ids the model really gets,
which hidden state predicts which response token, and where in the batch the result is written.  Two layouts are here:

* :func:`row_layout`: the rows as they are, without the columns that predict nothing;
* :func:`shared_prompt_layout`: adjacent rows with the same prompt become one sequence
  ``[prompt | response 1 | response 2 | ...]``, in which each response sees the prompt and itself only and has the
  positions that it would have behind its own copy of the prompt.  Log-probs and gradients are the same, and the prompt
  is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """What the model computes for one micro-batch of B rows and length L: S sequences of length T."""

    input_ids: Tensor
    """int64 (S, T)."""
    position_ids: Tensor | None
    """int64 (S, T), or None for 0..T-1 in every sequence."""
    attention_mask: Tensor | None
    """bool (S, 1, T, T), True where the query (third axis) may see the key (fourth), or None for plain causal."""
    predictors: Tensor
    """int64 (N,), indices into the flattened (S * T) hidden states: the one that predicts each response token."""
    targets: Tensor
    """int64 (N,), the response tokens themselves."""
    destinations: Tensor
    """int64 (N,), indices of the response tokens in the flattened (B * L) batch."""

    def to(self, device: torch.device) -> TokenLayout:
        if self.input_ids.device == device:
            return self
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)

    def scatter(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Put (N,) values at their places in a (B, L) tensor of zeros; gradients flow back to ``values``."""
        flat = values.new_zeros(shape[0] * shape[1])
        return flat.scatter(0, self.destinations, values).view(shape)


def row_layout(input_ids: Tensor, response_mask: Tensor) -> TokenLayout:
    """The rows as they are. Right padding needs no mask: nothing before it can see it.

    Args:
        input_ids: int64 (B, L), right-padded.
        response_mask: bool (B, L); its first column is ignored (nothing predicts the first token).
    """
    targets_at = response_mask[:, 1:].nonzero()
    rows, columns = targets_at[:, 0], targets_at[:, 1]
    width = int(columns.max()) + 1 if len(columns) else 1
    return TokenLayout(
        input_ids=input_ids[:, :width],
        position_ids=None,
        attention_mask=None,
        predictors=rows * width + columns,
        targets=input_ids[rows, columns + 1],
        destinations=rows * input_ids.shape[1] + columns + 1,
    )


def shared_prompt_layout(input_ids: Tensor, response_mask: Tensor) -> TokenLayout:
    """Adjacent rows with the same prompt as one sequence.

    A row's prompt is everything before its first response token; what follows (in multi-turn work the environment's
    tokens too) is its response part.  Rows without a response token take no part.  Without any two rows that share a
    prompt this is :func:`row_layout`, whose attention needs no mask.

    Args: as :func:`row_layout`.
    """
    response_mask = response_mask.clone()
    response_mask[:, 0] = False
    rows = response_mask.any(1).nonzero()[:, 0]
    ids, mask = input_ids[rows], response_mask[rows]
    length = ids.shape[1]
    columns = torch.arange(length, device=ids.device)
    first = mask.int().argmax(1)
    last = length - 1 - mask.flip(1).int().argmax(1)
    leads = _leads_a_group(ids, first, columns)
    if bool(leads.all()):
        return row_layout(input_ids, response_mask)

    group = leads.cumsum(0) - 1
    num_groups = int(group[-1]) + 1
    # The last response token predicts nothing, so a response part has last - first tokens.
    part_lengths = last - first
    ends = part_lengths.cumsum(0)
    starts = ends - part_lengths
    offsets = first + starts - starts[leads][group]
    width = int((offsets + part_lengths).max())

    # slots[b, t]: where token t of row b stands in the flattened (num_groups * width) layout.
    in_prompt = columns < first[:, None]
    within = torch.where(in_prompt, columns, offsets[:, None] + columns - first[:, None])
    slots = group[:, None] * width + within
    laid_out = (in_prompt & leads[:, None]) | (~in_prompt & (columns < last[:, None]))

    new_ids = ids.new_zeros(num_groups * width)
    positions = torch.zeros_like(new_ids)
    part = torch.full_like(new_ids, -1)
    # Parts are numbered by row (from 1; any numbers that differ will do), a prompt is part 0, padding part -1.
    part_of_row = torch.arange(1, len(rows) + 1, device=ids.device)[:, None]
    new_ids[slots[laid_out]] = ids[laid_out]
    positions[slots[laid_out]] = columns.expand_as(ids)[laid_out]
    part[slots[laid_out]] = torch.where(in_prompt, 0, part_of_row)[laid_out]

    row_index, column_index = mask.nonzero(as_tuple=True)
    return TokenLayout(
        input_ids=new_ids.view(num_groups, width),
        position_ids=positions.view(num_groups, width),
        attention_mask=_part_mask(part.view(num_groups, width)),
        predictors=slots[row_index, column_index - 1],
        targets=ids[row_index, column_index],
        destinations=rows[row_index] * length + column_index,
    )


def _leads_a_group(ids: Tensor, first: Tensor, columns: Tensor) -> Tensor:
    """bool (B,): False for a row whose prompt is that of the row before it."""
    leads = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    same_tokens = (ids[1:] == ids[:-1]) | (columns >= first[1:, None])
    leads[1:] = (first[1:] != first[:-1]) | ~same_tokens.all(1)
    return leads


def _part_mask(part: Tensor) -> Tensor:
    """bool (S, 1, T, T) from the part number (S, T) of each token: the prompt (0) and one's own part, up to oneself.

    Padding (-1) sees the prompt and the padding before it, so that no softmax is over nothing.
    """
    query, key = part[:, None, :, None], part[:, None, None, :]
    causal = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool, device=part.device).tril()
    return ((key == 0) | (key == query)) & causal
