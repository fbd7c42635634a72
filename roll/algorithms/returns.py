r"""Discounted sums along the tokens of a response, without a Python loop over them.

A recursion y_t = x_t + c y_{t+1} is solved in blocks of K tokens: inside a block it is a product with the K x K matrix
c^(s-t), and the block ends form the same recursion with c^K, L/K long.  Rows whose mask has holes (tool output between
the policy's turns) are first packed to the left, so that the recursion runs from masked token to masked token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.ratios import has_holes

_BLOCK = 32


def reverse_discounted_sum(values: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along the last dimension: float (B, L) -> (B, L), dense (no mask)."""
    rows, length = values.shape
    if discount == 0.0 or length == 0:
        return values.clone()
    width = min(_BLOCK, length)
    blocks = -(-length // width)
    padded = torch.nn.functional.pad(values, (0, blocks * width - length)).view(rows, blocks, width)
    steps = torch.arange(width, device=values.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]
    powers = torch.where(distance >= 0, discount ** distance.clamp(min=0), 0.0).to(values.dtype)
    inside = padded @ powers
    if blocks > 1:
        # What flows into a block is the complete sum at the start of the next one.
        starts = reverse_discounted_sum(inside[:, :, 0], float(discount**width))
        inflow = (discount ** (width - steps)).to(values.dtype)
        inside[:, :-1].addcmul_(starts[:, 1:, None], inflow)
    return inside.view(rows, blocks * width)[:, :length]


@dataclass(frozen=True)
class _Packing:
    """Moves the masked tokens of every row to the left, and back."""

    mask: Tensor
    source: Tensor
    """int64 (T,): flat positions of the masked tokens, row by row."""
    packed_mask: Tensor
    """bool (B, W): where they stand in the packed layout, in the same order."""

    @classmethod
    def of(cls, mask: Tensor) -> _Packing:
        counts = mask.sum(-1, dtype=torch.int32)
        columns = torch.arange(int(counts.max()), dtype=torch.int32, device=mask.device)
        return cls(mask, mask.flatten().nonzero().squeeze(-1), columns < counts.unsqueeze(-1))

    def pack(self, values: Tensor) -> Tensor:
        packed = values.new_zeros(self.packed_mask.shape)
        return packed.masked_scatter_(self.packed_mask, values.flatten().index_select(0, self.source))

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.new_zeros(self.mask.shape).masked_scatter_(self.mask, packed.masked_select(self.packed_mask))


def discounted_returns(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = R_t + gamma G_{next masked token}: float (B, L) -> (B, L), 0 outside the mask."""
    if gamma != 1.0 and bool(has_holes(mask)):
        packing = _Packing.of(mask)
        return packing.unpack(reverse_discounted_sum(packing.pack(token_level_rewards), gamma))
    rewards = torch.where(mask, token_level_rewards, 0.0)
    return torch.where(mask, reverse_discounted_sum(rewards, gamma), 0.0)


def generalized_advantages(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each row; arXiv 1506.02438 eq. 16.

    delta_t = R_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambd A_{t+1}, where t+1 is the next *masked* token:
    value and running sum are carried across tool output.  The value after the last token is 0.

    Args:
        token_level_rewards, values: float (B, L); what stands outside the mask is ignored.
        mask: bool (B, L).
        gamma, lambd: in [0, 1].

    Returns:
        (advantages, returns = advantages + values), float (B, L), 0 outside the mask.
    """
    kept_values = torch.where(mask, values, 0.0)
    if bool(has_holes(mask)):
        packing = _Packing.of(mask)
        packed = _dense_gae(packing.pack(token_level_rewards), packing.pack(values), gamma, lambd)
        advantages = packing.unpack(packed)
    else:
        rewards = torch.where(mask, token_level_rewards, 0.0)
        advantages = torch.where(mask, _dense_gae(rewards, kept_values, gamma, lambd), 0.0)
    return advantages, advantages + kept_values


def _dense_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> Tensor:
    """GAE of rows without holes. Right padding must be 0; what it computes left of a row's tokens is meaningless."""
    delta = rewards - values
    delta[:, :-1].add_(values[:, 1:], alpha=gamma)
    return reverse_discounted_sum(delta, gamma * lambd)
