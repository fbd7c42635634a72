"""AdamW by PyTorch's fused kernel, with its moments on the device, in host memory, or in 8 bits.

8-bit moments (Dettmers et al., 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861) are codes, indices
into a table of numbers between -1 and 1, and for each block of 256 values a float32 scale, its largest absolute value.
The table has 1, and for values with a sign -1, so a decoded block has the same scale and therefore the same codes: a
checkpoint may hold decoded values.  (The tables of bitsandbytes and torchao end at -0.993.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw as torch_adamw

from roll.checkpoint.tensors import MOMENTS
from roll.config.roles import EIGHT_BIT_BLOCK, TrainingArguments
from roll.platforms import current_platform
from roll.strategies.training.optimizer import local_tensor

MIN_8BIT_SIZE = 4096
"""Elements from which on a tensor's moments are kept in 8 bits, as in bitsandbytes."""
SCALES = "_scales"
"""Suffix of the state key that holds a moment's scales."""
SMALLEST_SCALE = 2.0**-100
"""A lower bound, below which decoded numbers would be denormal and lose precision; that of a block of zeros, too."""
_BITS = 7
"""Of a code, without its sign bit."""


def table(signed: bool) -> list[float]:
    """The numbers of the codes in ascending order: the paper's dynamic tree quantization, or without signs its dynamic
    quantization, which has one more bit of fraction."""
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
    """Encodes and decodes tensors on one device, with or without signs."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        numbers = torch.tensor(table(signed), dtype=torch.float64, device=device)
        bounds = (numbers[1:] + numbers[:-1]) / 2
        if not signed:
            # AdamW divides by the root of what is positive: as 0 it would leave epsilon alone (the "zero point
            # problem" of Li et al., 2023, Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507).
            bounds[0] = 0.0
        self._numbers, self._bounds = numbers.float(), pad(bounds.float(), (0, 1), value=torch.inf)
        # Between numbers with the same first 16 bits there is at most one bound. Looking up the code of the smallest of
        # them and comparing once is several times as fast as a binary search.
        first = torch.arange(2**16, dtype=torch.int32, device=device)
        least = (first << 16) + (first >> 15) * 0xFFFF
        self._first_codes = torch.bucketize(least.view(torch.float32), self._bounds[:-1], out_int32=True)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of the nearest numbers (uint8, flat, padded to whole blocks) and scales (float32, one a block). Without
        signs a positive value never becomes 0."""
        flat = values.flatten().float()
        cut = -len(flat) % EIGHT_BIT_BLOCK
        blocks = (pad(flat, (0, cut)) if cut else flat).view(-1, EIGHT_BIT_BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_SCALE)
        blocks = (blocks / scales).flatten()
        codes = self._first_codes.index_select(0, (blocks.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        codes = codes.add_(blocks > self._bounds.index_select(0, codes)).to(torch.uint8)
        return codes, scales.flatten()

    def decode(self, codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
        """The values, in the shape and type of ``like``."""
        numbers = self._numbers.index_select(0, codes.int()).view(-1, EIGHT_BIT_BLOCK).mul_(scales[:, None])
        return numbers.flatten()[: like.numel()].view(like.shape).to(like.dtype)


def adamw(groups: list[dict[str, Any]], args: TrainingArguments, on_host: bool = False) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101) by the fused kernel, which does a step in one pass over
    memory, on CPU as on CUDA. ``on_host``: with its moments in host memory."""
    return adamw_class(args, on_host)(
        groups, lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, fused=True
    )


def adamw_class(args: TrainingArguments, on_host: bool) -> type[torch.optim.AdamW]:
    """The class of AdamW that keeps its moments as ``args.optimizer`` and ``on_host`` say."""
    if args.optimizer.name == "adamw_8bit":
        return AdamW8bit
    return HostAdamW if on_host else torch.optim.AdamW


class AdamWByParameter(torch.optim.AdamW, ABC):
    """AdamW that keeps its moments elsewhere or in another form, and steps one parameter at a time: its moments become
    tensors on the device, and plain AdamW's kernel makes the update."""

    @abstractmethod
    def moment(self, parameter: Tensor, kind: str) -> Tensor:
        """A copy of this rank's part of a moment, as the kernel takes it."""

    @abstractmethod
    def set_moment(self, parameter: Tensor, kind: str, values: Tensor) -> None:
        """The inverse of :meth:`moment`; ``values`` may be on the host, and float32 whatever the parameter's type."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        current_platform().synchronize()  # whoever reads moments next may do so on the host

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        own, state = local_tensor(parameter.detach()), self.state[parameter]
        if not state:
            # The fused kernel counts on the device, the others on the host.
            state["step"] = torch.zeros((), device=own.device if group["fused"] else None)
            average, squares = torch.zeros_like(own), torch.zeros_like(own)
        else:
            average, squares = (self.moment(parameter, kind) for kind in MOMENTS)
        beta1, beta2 = group["betas"]
        torch_adamw(
            [own],
            [local_tensor(gradient)],
            [average],
            [squares],
            [],
            [state["step"]],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for kind, values in zip(MOMENTS, (average, squares), strict=True):
            self.set_moment(parameter, kind, values)


class HostAdamW(AdamWByParameter):
    """AdamW with moments in (page-locked) host memory.

    An update by the host's cores would carry a gradient and a weight over the bus in place of two moments each way, but
    move twice the bytes in host memory and hold a copy of the weights there.
    """

    def moment(self, parameter: Tensor, kind: str) -> Tensor:
        # Copies also where the device is the host, so that every host runs, and tests, the same lines.
        return self.state[parameter][kind].to(local_tensor(parameter).device, non_blocking=True, copy=True)

    def set_moment(self, parameter: Tensor, kind: str, values: Tensor) -> None:
        state, own = self.state[parameter], local_tensor(parameter.detach())
        if kind not in state:
            state[kind] = torch.empty(own.shape, dtype=own.dtype, pin_memory=current_platform().pin_memory)
        state[kind].copy_(values, non_blocking=True)


class AdamW8bit(AdamWByParameter):
    """AdamW with moments in 8 bits, except those of small tensors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # One table per optimizer, not per process: a process may also rehearse runs on fake tensors.
        self._codes: dict[tuple[str, torch.device], EightBits] = {}

    def moment(self, parameter: Tensor, kind: str) -> Tensor:
        state, own = self.state[parameter], local_tensor(parameter.detach())
        if (scales := state.get(kind + SCALES)) is None:
            return state[kind].clone()
        return self._codes_of(kind, own.device).decode(state[kind], scales, like=own)

    def set_moment(self, parameter: Tensor, kind: str, values: Tensor) -> None:
        state, own = self.state[parameter], local_tensor(parameter.detach())
        if own.numel() < MIN_8BIT_SIZE:
            made = {kind: values.to(own.device, own.dtype, copy=True)}
        else:
            codes, scales = self._codes_of(kind, own.device).encode(values.to(own.device))
            made = {kind: codes, kind + SCALES: scales}
        for key, tensor in made.items():
            state[key] = state[key].copy_(tensor) if key in state else tensor

    def _codes_of(self, kind: str, device: torch.device) -> EightBits:
        if (kind, device) not in self._codes:
            self._codes[kind, device] = EightBits(signed=kind == MOMENTS[0], device=device)
        return self._codes[kind, device]


def moment(optimizer: torch.optim.Optimizer, parameter: Tensor, kind: str) -> Tensor:
    """This rank's part of a moment that the optimizer has, decoded, in whatever memory it is kept."""
    if isinstance(optimizer, AdamW8bit):
        return optimizer.moment(parameter, kind)
    return local_tensor(optimizer.state[parameter][kind])


def set_moment(optimizer: torch.optim.Optimizer, parameter: Tensor, kind: str, values: Tensor) -> None:
    """Set this rank's part of a moment, in the form that the optimizer gives it in its first step."""
    values = values.view(local_tensor(parameter.detach()).shape)
    if isinstance(optimizer, AdamWByParameter):
        optimizer.set_moment(parameter, kind, values)
    else:
        optimizer.state[parameter][kind] = made = torch.zeros_like(parameter)
        local_tensor(made).copy_(values)
