r"""Log-probabilities and entropies of given tokens when the output matrix is cut over its rows.

Each of n tensor-parallel ranks holds V / n rows of the output matrix, so V / n logits z_j of a token.  With
m = max_j z_j, s = sum_j exp(z_j - m), u = sum_j exp(z_j - m) z_j and q = sum_j exp(z_j - m)^2, all over all ranks,

    log p(y)  = z_y - m - log s
    entropy   = m + log s - u / s
    sum_j p_j^2 = q / s^2                       (without gradient)

so ranks exchange five numbers a token, never logits.  The gradients of :mod:`roll.models.log_probs` need the local
logits and these numbers only.  Tokens are taken in chunks, computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.models.log_probs import HeadMemory


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    memory: HeadMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of ``targets[i]`` under ``softmax((W @ hidden[i]) / temperature)``, entropy and sum of squares.

    Args:
        hidden: (N, H), the same on all ranks of ``group``; N may be 0. Its gradient is this rank's share: the sum over
            ranks is the caller's.
        weight: (V / n, H): this rank's rows, in rank order. Rows from ``vocab_size`` on are padding.
        targets: int64 (N,), in [0, ``vocab_size``).
        group: the n ranks. All call at the same time, in forward and backward.
        temperature: greater than 0.

    Returns:
        float32 (N,) log-probs, entropies (nats) and sums of squared probabilities, the same on all ranks; the first two
        carry gradients.
    """
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    memory = memory or HeadMemory.for_device(hidden.device)
    start = group.rank() * weight.shape[0]
    own = max(0, min(weight.shape[0], vocab_size - start))
    chunk = memory.chunk_tokens(weight.shape[0])
    return _VocabParallelLogProbs.apply(hidden, weight, targets - start, own, group, temperature, chunk)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 (n, own) logits of one chunk."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        own: int,
        group: ProcessGroup,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy, squares, log_normalizer = (torch.empty_like(log_probs) for _ in range(3))
        for first in range(0, hidden.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = _logits(hidden[rows], weight[:own], temperature)
            peak = logits.amax(1) if own else logits.new_full((logits.shape[0],), -torch.inf)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            mine, index = _own_targets(targets[rows], own)
            of_target = logits.gather(1, index)[:, 0] * mine if own else logits.new_zeros(logits.shape[0])
            powers = (logits - peak[:, None]).exp_()
            sums = torch.stack([powers.sum(1), (powers * logits).sum(1), of_target, powers.square_().sum(1)])
            dist.all_reduce(sums, group=group)
            log_normalizer[rows] = peak + sums[0].log()
            log_probs[rows] = sums[2] - log_normalizer[rows]
            entropy[rows] = log_normalizer[rows] - sums[1] / sums[0]
            squares[rows] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.own, ctx.temperature, ctx.chunk = own, temperature, chunk
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Any, ...]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for first in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            table = _logits(hidden[rows], weight[: ctx.own], ctx.temperature) - log_normalizer[rows, None]
            factor = torch.zeros_like(table)
            if grad_entropy is not None:
                factor -= (table + entropy[rows, None]) * grad_entropy[rows, None]
            if grad_log_probs is not None:
                factor -= grad_log_probs[rows, None]
            grad_logits = table.exp_().mul_(factor)
            if grad_log_probs is not None and ctx.own:
                mine, index = _own_targets(targets[rows], ctx.own)
                grad_logits.scatter_add_(1, index, (grad_log_probs[rows] * mine)[:, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad_logits, weight[: ctx.own], out=grad_hidden[rows])
            grad_weight[: ctx.own].addmm_(grad_logits.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None, None, None


def _own_targets(targets: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """bool (n,) which targets are among this rank's rows, and int64 (n, 1) indices that are valid in any case."""
    mine = (targets >= 0) & (targets < own)
    return mine, targets.clamp(0, max(0, own - 1))[:, None]
