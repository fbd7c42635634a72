"""Tensors in 8 bits: of each value a code, an index into a table of numbers between -1 and 1, and of each block of 256
values a float32 scale, its largest absolute value (Dettmers et al., 2022, 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861).

The table has 1, and where values have signs -1, so that a decoded block has the same scale, and by that the same codes:
a checkpoint may hold decoded numbers.  (The tables of bitsandbytes and torchao end at -0.993, and torchao's
``AdamW8bit`` compiles its step for minutes.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Values that share a scale, as in bitsandbytes; the paper's blocks have 2,048."""
SMALLEST_SCALE = 2.0**-100
"""Above it no decoded number is denormal, so that all have float32's precision; a block of zeros has it too."""
_BITS = 7
"""Of a code, without that of the sign."""


def table(signed: bool) -> list[float]:
    """The numbers of the codes, rising: those of the paper's dynamic tree quantization, or without signs those of its
    dynamic quantization, which have a bit more of fraction."""
    positive = []
    for zeros in range(_BITS):
        # Zeros before a code's first one are powers of a tenth; the bits after it count even parts of [0.1, 1].
        parts = 2 ** (_BITS - 1 - zeros + (not signed))
        positive += [10.0**-zeros * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    positive.sort()
    if not signed:
        return [0.0, *positive, 1.0]
    positive[-1] = 1.0  # .993 by the rule, which has no code for 1
    return [*(-number for number in reversed(positive)), 0.0, *positive]


class EightBits:
    """Codes of tensors on one device, with or without signs."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        numbers = torch.tensor(table(signed), dtype=torch.float64, device=device)
        bounds = (numbers[1:] + numbers[:-1]) / 2
        if not signed:
            # AdamW divides by the root of what is positive: as 0 it would leave epsilon alone (the "zero point
            # problem" of Li et al., 2023, Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507).
            bounds[0] = 0.0
        self._numbers, self._bounds = numbers.float(), pad(bounds.float(), (0, 1), value=torch.inf)
        # Numbers whose first 16 bits are the same have at most one bound between them: the code of the least of them,
        # by these bits, and one comparison are several times as fast as a binary search.
        first = torch.arange(2**16, dtype=torch.int32, device=device)
        least = (first << 16) + (first >> 15) * 0xFFFF
        self._first_codes = torch.bucketize(least.view(torch.float32), self._bounds[:-1], out_int32=True)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (uint8, flat, for whole blocks) of the nearest numbers, and scales; a positive value without sign is
        never 0."""
        flat = values.flatten().float()
        cut = -len(flat) % BLOCK
        blocks = (pad(flat, (0, cut)) if cut else flat).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_SCALE)
        blocks = (blocks / scales).flatten()
        codes = self._first_codes.index_select(0, (blocks.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        codes = codes.add_(blocks > self._bounds.index_select(0, codes)).to(torch.uint8)
        return codes, scales.flatten()

    def decode(self, codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
        """The values, in the shape and type of ``like``."""
        numbers = self._numbers.index_select(0, codes.int()).view(-1, BLOCK).mul_(scales[:, None])
        return numbers.flatten()[: like.numel()].view(like.shape).to(like.dtype)
