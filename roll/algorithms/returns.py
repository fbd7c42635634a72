r"""Discounted sums along the tokens of a response, without a Python loop over them.

A recursion y_t = x_t + c y_{t+1} is solved in blocks of K tokens: inside a block it is a product with the K x K matrix
c^(s-t), and the block ends form the same recursion with c^K, L/K long.  Where the mask has holes (tool output between
the policy's turns) only masked tokens discount, so the exponent is a count n of masked tokens, which differs by row:
c^(n_s - n_t) = c^(n_s) / c^(n_t), a product with the matrix of ones between two scalings.  The scalings are looked up,
eight tokens at a time: exponentials and running counts of every token would take more time than all else.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.aggregation import Keep, has_holes, kept_, row_blocks

_BLOCK = 32
_LEAST_SCALING = 1e-18
"""Smallest scaling of a block's last token, so that products stay within the range of float32."""
_LEAST_OF_BLOCKS = 1e-250
"""The same between blocks, in float64."""


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


@lru_cache(maxsize=16)
def _scalings_of_bytes(discount: float, dtype: torch.dtype) -> np.ndarray:
    """c^n for eight tokens, n the masked ones of their block up to each: float (25 * 256, 8).

    Row 256 k + b is for the bits b of the mask, the first token's lowest, where k tokens before them are masked.
    """
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    counts = torch.arange(_BLOCK - 7)[:, None, None] + bits.cumsum(-1)
    powers: np.ndarray = (discount ** counts.double()).to(dtype).view(-1, 8).numpy()
    return powers


def _scalings(mask: Tensor, discount: float, dtype: torch.dtype) -> Tensor:
    """c^n, n the masked tokens of a block up to each: bool (B, N * 32) -> float (B, N, 32)."""
    bits = np.packbits(mask.cpu().numpy(), -1, bitorder="little")
    # The masked tokens in the bytes of a block before each of its four: one product adds them up.
    before = (np.bitwise_count(bits).view("<u4") * np.uint32(0x01010100)).view(np.uint8)
    rows = before.astype(np.intp)
    rows *= 256
    rows += bits
    scalings = torch.from_numpy(_scalings_of_bytes(discount, dtype).take(rows, 0))
    return scalings.view(len(mask), -1, _BLOCK).to(mask.device)


def masked_discounted_sum(values: Tensor, mask: Tensor, discount: float, out: Tensor | None = None) -> Tensor:
    """y_t = sum over s >= t of discount^n x_s, n the masked tokens in (t, s]: float (B, L) -> (B, L).

    Only masked tokens discount.  The value of an unmasked token counts for the tokens left of it as if it were on the
    last masked one before it.  ``values`` may be overwritten; ``out`` as for :func:`reverse_discounted_sum`.
    """
    rows, length = values.shape
    if discount == 1.0 or length == 0:
        return reverse_discounted_sum(values, discount, out)
    if discount**_BLOCK < _LEAST_SCALING:
        return _scan(values, torch.where(mask, values.new_tensor(discount), 1.0).roll(-1, 1))
    missing = -length % _BLOCK
    if missing:
        values, mask = (torch.nn.functional.pad(t, (0, missing)) for t in (values, mask))
    scalings = _scalings(mask, discount, values.dtype)
    suffix = _suffix(_BLOCK, values.dtype, values.device)
    inside = _product(values.view(scalings.shape).mul_(scalings), suffix, None if missing else out)
    whole = scalings[..., -1]
    starts = (_starts if discount**length > _LEAST_OF_BLOCKS else _scan)(inside[..., 0], whole)
    inside[:, :-1].add_((whole[:, :-1] * starts[:, 1:]).unsqueeze(-1))
    return inside.div_(scalings).view(rows, -1)[:, :length]


def _starts(values: Tensor, factors: Tensor) -> Tensor:
    """y_b = x_b + f_b y_{b+1} between two scalings, as inside a block: float (B, N), (B, N) -> (B, N)."""
    scalings = factors.double().cumprod(-1).div_(factors)
    suffix = _suffix(scalings.shape[-1], scalings.dtype, scalings.device)
    return (values * scalings).matmul(suffix).div_(scalings).to(values.dtype)


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
        # The returns' memory holds the values until they are added to: one tensor less in the cache.
        kept_(of_values, keep.bits, target)
        delta = keep(of_rewards).sub_(target)
        # The hole before a turn gets gamma times the value of the turn's first token: of all tokens left of it, it is
        # the last one of the turn before that has it undiscounted, as its delta asks for.
        delta[:, :-1].add_(target[:, 1:], alpha=gamma)
        _recursion(delta, rows, discount, has_gaps, result)
        keep.in_place(result)
        target.add_(result)
    return advantages, returns


def _has_gaps(mask: Tensor, discount: float) -> bool:
    """Some row has unmasked tokens between masked ones, and they make a difference."""
    return discount != 1.0 and any(bool(has_holes(rows)) for (rows,) in row_blocks(mask))


def _recursion(values: Tensor, mask: Tensor, discount: float, has_gaps: bool, out: Tensor) -> None:
    """Write each masked token's discounted sum to ``out``; values left of a row's first one are meaningless."""
    if has_gaps:
        sums = masked_discounted_sum(values, mask, discount, out)
    else:
        sums = reverse_discounted_sum(values, discount, out)
    if sums.data_ptr() != out.data_ptr():
        out.copy_(sums)
