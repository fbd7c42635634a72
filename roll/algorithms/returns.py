r"""Discounted sums along the tokens of a response, without a Python loop over them.

A recursion y_t = x_t + c y_{t+1} is solved in blocks of K tokens: inside a block it is a product with the K x K matrix
c^(s-t), and the block ends form the same recursion with c^K, L/K long.  Where the mask has holes (tool output between
the policy's turns) only masked tokens discount, so the exponent is a count n of masked tokens, which differs by row:
c^(n_s - n_t) = c^(n_s) / c^(n_t), a product with the matrix of ones between two scalings.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from roll.algorithms.aggregation import Keep, has_holes, row_blocks

_BLOCK = 32
_DEEPEST_EXPONENT = 2.0
"""Scalings stay above exp(-2) where a block has several tokens: their rounding is that of the exponent times 6e-8."""
_DEEPEST_OF_BLOCKS = 600.0
"""Of the scalings between blocks, in float64: exp(-600) is 1e-261."""


@lru_cache(maxsize=64)
def _powers(width: int, discount: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """c^(s-t) within a block, (width, width) and 0 where s < t; and what flows in from behind it, c^(width-t)."""
    with torch.inference_mode(False):
        steps = torch.arange(width, device=device, dtype=torch.float64)
        distance = steps[:, None] - steps[None, :]
        powers = torch.where(distance >= 0, discount ** distance.clamp(min=0), 0.0)
        return powers.to(dtype), (discount ** (width - steps)).to(dtype)


@lru_cache(maxsize=64)
def _suffix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones where s >= t: (width, width)."""
    with torch.inference_mode(False):
        return torch.ones(width, width, dtype=dtype, device=device).tril_()


def _product(blocks: Tensor, matrix: Tensor, out: Tensor | None) -> Tensor:
    """(B, N, K) times (K, K), into ``out`` (B, N * K) where there is one."""
    if out is None:
        return blocks @ matrix
    return torch.mm(blocks.view(-1, blocks.shape[-1]), matrix, out=out.view(-1, blocks.shape[-1])).view(blocks.shape)


def reverse_discounted_sum(values: Tensor, discount: float, out: Tensor | None = None) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along the last dimension: float (B, L) -> (B, L), dense (no mask).

    Args:
        out: contiguous float (B, L) that may be used for the result.
    """
    rows, length = values.shape
    if discount == 0.0 or length == 0:
        return values.clone()
    width = min(_BLOCK, length)
    blocks = -(-length // width)
    missing = blocks * width - length
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    powers, inflow = _powers(width, discount, values.dtype, values.device)
    inside = _product(padded.view(rows, blocks, width), powers, None if missing else out)
    if blocks > 1:
        # What flows into a block is the complete sum at the start of the next one.
        starts = reverse_discounted_sum(inside[:, :, 0], float(discount**width))
        inside[:, :-1].addcmul_(starts[:, 1:, None], inflow)
    return inside.view(rows, blocks * width)[:, :length]


def masked_discounted_sum(values: Tensor, mask: Tensor, discount: float, out: Tensor | None = None) -> Tensor:
    """y_t = sum over s >= t of discount^n x_s, n the masked tokens in (t, s]: float (B, L) -> (B, L).

    Only masked tokens discount.  What stands on an unmasked token counts for the tokens left of it as if it stood on
    the last masked one before it.
    """
    rows, length = values.shape
    if discount == 1.0 or length == 0:
        return reverse_discounted_sum(values, discount, out)
    # 0 has no inverse; what 1e-12 lets through is far below the rounding of float32.
    exponent = math.log(max(discount, 1e-12))
    is_shallow = -exponent * length < _DEEPEST_OF_BLOCKS
    width = min(_BLOCK, length, max(int(_DEEPEST_EXPONENT / -exponent), 1))
    blocks = -(-length // width)
    missing = blocks * width - length
    if missing:
        values, mask = (torch.nn.functional.pad(t, (0, missing)) for t in (values, mask))
    counts = mask.view(torch.uint8).view(rows, blocks, width).cumsum(-1, dtype=torch.uint8)
    weights = counts.to(values.dtype).mul_(exponent).exp_()
    suffix = _suffix(width, values.dtype, values.device)
    inside = _product(values.view(rows, blocks, width).mul_(weights), suffix, None if missing else out)
    if blocks > 1:
        whole = weights[..., -1]
        starts = _starts(inside[..., 0], counts[..., -1], exponent) if is_shallow else _scan(inside[..., 0], whole)
        inside[:, :-1].add_((whole[:, :-1] * starts[:, 1:]).unsqueeze(-1))
    return inside.div_(weights).view(rows, blocks * width)[:, :length]


def _starts(values: Tensor, counts: Tensor, exponent: float) -> Tensor:
    """y_b = x_b + c^(n_b) y_{b+1} between two scalings, as inside a block: float (B, N), int (B, N) -> (B, N).

    In float64, whose range is that of whole rows.
    """
    tokens = counts.double()
    weights = tokens.cumsum(-1).sub_(tokens).mul_(exponent).exp_()
    suffix = _suffix(tokens.shape[-1], tokens.dtype, tokens.device)
    return (values * weights).matmul(suffix).div_(weights).to(values.dtype)


def _scan(values: Tensor, factors: Tensor) -> Tensor:
    """y_b = x_b + f_b y_{b+1} along the last dimension, in log2 of its length steps: float (B, N), (B, N) -> (B, N)."""
    step = 1
    while step < values.shape[1]:
        reached = values.clone()
        reached[:, :-step].addcmul_(factors[:, :-step], values[:, step:])
        factors = torch.cat([factors[:, :-step] * factors[:, step:], factors[:, -step:]], 1)
        values, step = reached, 2 * step
    return values


def discounted_returns(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = R_t + gamma G_{next masked token}: float (B, L) -> (B, L), 0 outside the mask."""
    has_gaps, sums = _has_gaps(mask, gamma), torch.empty_like(token_level_rewards)
    for rewards, rows, result in row_blocks(token_level_rewards, mask, sums):
        keep = Keep(rows, rewards.dtype)
        _recursion(keep(rewards), rows, gamma, has_gaps, result)
        keep.in_place(result)
    return sums


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
    discount = gamma * lambd
    has_gaps, advantages, returns = _has_gaps(mask, discount), torch.empty_like(values), torch.empty_like(values)
    for of_rewards, of_values, rows, result, target in row_blocks(
        token_level_rewards, values, mask, advantages, returns
    ):
        keep = Keep(rows, of_values.dtype)
        kept_values = keep(of_values)
        delta = keep(of_rewards).sub_(kept_values)
        # The hole before a turn gets gamma times the value of the turn's first token: of all tokens left of it, it is
        # the last one of the turn before that has it undiscounted, as its delta asks for.
        delta[:, :-1].add_(kept_values[:, 1:], alpha=gamma)
        _recursion(delta, rows, discount, has_gaps, result)
        keep.in_place(result)
        torch.add(kept_values, result, out=target)
    return advantages, returns


def _has_gaps(mask: Tensor, discount: float) -> bool:
    """Some row has unmasked tokens between masked ones, and they make a difference."""
    return discount != 1.0 and any(bool(has_holes(rows)) for (rows,) in row_blocks(mask))


def _recursion(values: Tensor, mask: Tensor, discount: float, has_gaps: bool, out: Tensor) -> None:
    """Write each masked token's discounted sum to ``out``; what stands left of a row's first one is meaningless."""
    if has_gaps:
        sums = masked_discounted_sum(values, mask, discount, out)
    else:
        sums = reverse_discounted_sum(values, discount, out)
    if sums.data_ptr() != out.data_ptr():
        out.copy_(sums)
