r"""Discounted sums along the tokens of a response, without a Python loop over them.

A recursion y_t = x_t + c y_{t+1} is solved in blocks of K tokens: inside a block it is a product with the K x K matrix
c^(s-t), and the block ends form the same recursion with c^K, L/K long.  Where the mask has holes (tool output between
the policy's turns) only masked tokens discount, so the exponent is a count n of masked tokens, which differs by row:
c^(n_s - n_t) = c^(n_s) / c^(n_t), a product with the matrix of ones between two scalings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll.algorithms.aggregation import Keep, has_holes

_BLOCK = 32
_DEEPEST_EXPONENT = 2.0
"""Scalings stay above exp(-2) where a block has several tokens: their rounding is that of the exponent times 6e-8."""


def reverse_discounted_sum(values: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along the last dimension: float (B, L) -> (B, L), dense (no mask)."""
    rows, length = values.shape
    if discount == 0.0 or length == 0:
        return values.clone()
    width = min(_BLOCK, length)
    blocks = -(-length // width)
    missing = blocks * width - length
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    steps = torch.arange(width, device=values.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]
    powers = torch.where(distance >= 0, discount ** distance.clamp(min=0), 0.0).to(values.dtype)
    inside = padded.view(rows, blocks, width) @ powers
    if blocks > 1:
        # What flows into a block is the complete sum at the start of the next one.
        starts = reverse_discounted_sum(inside[:, :, 0], float(discount**width))
        inflow = (discount ** (width - steps)).to(values.dtype)
        inside[:, :-1].addcmul_(starts[:, 1:, None], inflow)
    return inside.view(rows, blocks * width)[:, :length]


def masked_discounted_sum(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """y_t = sum over s >= t of discount^n x_s, n the masked tokens in (t, s]: float (B, L) -> (B, L).

    Only masked tokens discount.  What stands on an unmasked token counts for the tokens left of it as if it stood on
    the last masked one before it.
    """
    rows, length = values.shape
    if discount == 1.0 or length == 0:
        return reverse_discounted_sum(values, discount)
    # 0 has no inverse; what 1e-12 lets through is far below the rounding of float32.
    exponent = math.log(max(discount, 1e-12))
    width = min(_BLOCK, length, max(int(_DEEPEST_EXPONENT / -exponent), 1))
    blocks = -(-length // width)
    missing = blocks * width - length
    if missing:
        values, mask = (torch.nn.functional.pad(t, (0, missing)) for t in (values, mask))
    counts = mask.view(torch.uint8).view(rows, blocks, width).cumsum(-1, dtype=torch.uint8)
    weights = counts.to(values.dtype).mul_(exponent).exp_()
    suffix = torch.ones(width, width, dtype=values.dtype, device=values.device).tril_()
    inside = values.view(rows, blocks, width).mul_(weights) @ suffix
    if blocks > 1:
        starts, whole = (edge.t().contiguous().unbind() for edge in (inside[..., 0], weights[..., -1]))
        inflow = [torch.zeros_like(starts[-1])]
        for block in range(blocks - 2, -1, -1):
            inflow.append(whole[block] * starts[block + 1])
            starts[block].add_(inflow[-1])
        inside += torch.stack(inflow[::-1], -1).unsqueeze(-1)
    return inside.div_(weights).view(rows, blocks * width)[:, :length]


def discounted_returns(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = R_t + gamma G_{next masked token}: float (B, L) -> (B, L), 0 outside the mask."""
    keep = Keep(mask, token_level_rewards.dtype)
    return keep.in_place(_recursion(keep(token_level_rewards), mask, gamma))


def generalized_advantages(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each row; arXiv 1506.02438 eq. 16.

    delta_t = R_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambd A_{t+1}, where t+1 is the next *masked* token:
    value and running sum are carried across tool output.  The value after the last token is 0.

    Args:
        token_level_rewards, values: float32 or float64 (B, L); what stands outside the mask is ignored.
        mask: bool (B, L).
        gamma, lambd: in [0, 1].

    Returns:
        (advantages, returns = advantages + values), float (B, L), 0 outside the mask.
    """
    keep = Keep(mask, values.dtype)
    kept_values = keep(values)
    delta = keep(token_level_rewards).sub_(kept_values)
    # The hole before a turn gets gamma times the value of the turn's first token: of all tokens left of it, it is the
    # last one of the turn before that has it undiscounted, as its delta asks for.
    delta[:, :-1].add_(kept_values[:, 1:], alpha=gamma)
    advantages = keep.in_place(_recursion(delta, mask, gamma * lambd))
    return advantages, kept_values.add_(advantages)


def _recursion(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """The discounted sum of each masked token; what stands left of a row's first one is meaningless."""
    if discount != 1.0 and bool(has_holes(mask)):
        return masked_discounted_sum(values, mask, discount)
    return reverse_discounted_sum(values, discount)
