r"""Whole distributions of response tokens, in chunks: the most probable tokens of a model, and its divergence from
target distributions.

No more than one chunk's logits exist at a time.  The backward pass computes a chunk again and differentiates
it there, so that neither logits nor probabilities (N, V) are kept.

A model is compared with a target over buckets: the target's k tokens, and one for the rest of the vocabulary. Its mass
is summed directly: one minus the others' would cancel to 0, or below, where it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roll.models.kernels import matmul
from roll.models.layouts import TargetDistributions, TopTokens

Named = dict[str, Tensor]
# Outputs of the comparison with a target.
COMPARED = ("divergence", "model_mass", "target_mass", "agreement")
ChunkOutputs = Callable[[Tensor, slice], tuple[Named, Named]]
"""From the logits (n, V) of the tokens in a slice to (n,) tensors by name: with gradient, and without."""


class Vocabulary:
    """The tokens that a matrix of logits (n, V) is about: all of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def table(self, logits: Tensor, temperature: float) -> Tensor:
        """(n, V) log-probs, with gradient."""
        return torch.log_softmax(logits / temperature, dim=-1)

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n, k) log-probs of tokens (n, k)."""
        return table.gather(1, ids)

    def rest(self, table: Tensor, ids: Tensor) -> Tensor:
        """(n,): log of the mass of the tokens that are not among ``ids``."""
        mass = table.exp().scatter(1, ids, 0.0).sum(-1)
        return mass.clamp(min=torch.finfo(mass.dtype).tiny).log()  # -87 at least in float32, where 0 would give -inf

    def summed(self, part: Tensor) -> Tensor:
        """A sum over the tokens here, over all of them."""
        return part

    def best(self, table: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
        """Log-probs (n, count), descending, and ids of the most probable tokens below ``limit``."""
        log_probs, ids = table[:, :limit].topk(count, dim=-1)
        return log_probs, ids

    def is_best(self, table: Tensor, ids: Tensor, of_ids: Tensor) -> Tensor:
        """bool (n,): ``ids``, with log-probs ``of_ids``, are the most probable tokens."""
        return table.argmax(-1) == ids


def top_tokens(
    vocabulary: Vocabulary,
    logits_of: Callable[[slice], Tensor],
    num_tokens: int,
    chunk: int,
    temperature: float,
    wanted: TopTokens,
) -> Named:
    """The most probable tokens of each distribution, and the mass of all others.

    Args:
        logits_of: the logits (n, V) of some of the ``num_tokens`` tokens.

    Returns:
        ``top_log_probs`` (N, k), descending; ``top_ids`` int32 (N, k); ``tail_log_prob`` (N,).
    """
    limit = min(wanted.limit, vocabulary.size)
    count = min(wanted.count or limit, limit)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    # Once without tokens too: the empty columns need their widths.
    for start in range(0, max(1, num_tokens), chunk):
        table = vocabulary.table(logits_of(slice(start, start + chunk)), temperature)
        log_probs, ids = vocabulary.best(table, count, limit)
        parts.append((log_probs, ids.int(), vocabulary.rest(table, ids)))
    log_probs, int_ids, tail = (torch.cat(column) for column in zip(*parts, strict=True))
    return {"top_log_probs": log_probs, "top_ids": int_ids, "tail_log_prob": tail}


def compared(
    vocabulary: Vocabulary,
    logits: Tensor,
    rows: slice,
    targets: Tensor,
    temperature: float,
    outputs: Collection[str],
    comparisons: Collection[TargetDistributions],
) -> tuple[Named, Named]:
    """Outputs of one chunk: log-probs, entropies if wanted, and for each target, under ``<name>/``, the
    ``divergence``, with gradient; ``model_mass`` and ``target_mass`` of the target's k tokens and ``agreement`` (1
    where both sides' most probable tokens are the same), without."""
    table = vocabulary.table(logits, temperature)
    learned = {"log_probs": vocabulary.at(table, targets[rows, None])[:, 0]}
    noted: Named = {}
    if "entropy" in outputs:
        learned["entropy"] = -vocabulary.summed((table.exp() * table).sum(-1))
    if "sum_of_squares" in outputs:
        noted["sum_of_squares"] = vocabulary.summed(table.detach().exp().square().sum(-1))
    for whole in comparisons:
        target, same = whole.at(rows), whole.temperature == temperature
        of_model = table if same else vocabulary.table(logits, target.temperature)
        q, p = vocabulary.at(of_model, target.ids), target.log_probs.to(table.dtype)
        best = vocabulary.is_best(of_model.detach(), target.ids[:, 0], q.detach()[:, 0])
        noted[f"{target.name}/model_mass"] = q.detach().exp().sum(-1)
        noted[f"{target.name}/target_mass"] = p.exp().sum(-1)
        noted[f"{target.name}/agreement"] = best.to(table.dtype)
        has_tail = target.ids.shape[1] < vocabulary.size
        if has_tail:
            q = torch.cat([q, vocabulary.rest(of_model, target.ids)[:, None]], dim=1)
            p = torch.cat([p, target.tail[:, None].to(p.dtype)], dim=1)
        learned[f"{target.name}/divergence"] = target.divergence(q, p, has_tail)
    return learned, noted


def chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logits_of: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    outputs: ChunkOutputs,
    chunk: int,
) -> Named:
    """``outputs`` of all tokens, differentiable by hidden (N, H), weight (V, H) and bias, with one chunk's logits at a
    time.

    Args:
        logits_of: hidden (n, H), weight and bias to new logits (n, V), which may be changed in place.
    """
    names: list[str] = []
    values = _Chunked.apply(hidden, weight, bias, logits_of, outputs, chunk, names)
    return dict(zip(names, values, strict=True))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, logits_of, outputs, chunk, names):  # type: ignore[no-untyped-def]
        parts = []
        # Once even without tokens: the names and number of the outputs come from a pass.
        for start in range(0, max(1, hidden.shape[0]), chunk):
            rows = slice(start, start + chunk)
            learned, noted = outputs(logits_of(hidden[rows], weight, bias), rows)
            parts.append([*learned.values(), *noted.values()])
        names.extend([*learned, *noted])
        ctx.save_for_backward(hidden, weight, bias)
        ctx.logits_of, ctx.outputs, ctx.chunk, ctx.learned = logits_of, outputs, chunk, len(learned)
        whole = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*whole[len(learned) :])
        ctx.set_materialize_grads(False)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        hidden, weight, bias = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        wanted = [index for index, grad in enumerate(grads[: ctx.learned]) if grad is not None]
        for start in range(0, hidden.shape[0] if wanted else 0, ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = ctx.logits_of(hidden[rows], weight, bias).requires_grad_()
            with torch.enable_grad():
                values = list(ctx.outputs(logits, rows)[0].values())
                (grad_logits,) = torch.autograd.grad(
                    [values[index] for index in wanted], logits, [grads[index][rows] for index in wanted]
                )
            # As autograd's own backward of a product: in the compute dtype, whatever the logits were computed in.
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = matmul(grad_logits, weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(0))
        return grad_hidden, grad_weight, grad_bias, *(None,) * 4
