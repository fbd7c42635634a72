r"""From per-token losses to a micro-batch's share of the loss of the whole optimizer step.

With :math:`l_{it}` the loss of token t of sample i, :math:`m_{it}` the mask, :math:`n_i` the masked tokens of sample i,
and T (tokens), N (samples with a masked token), T_g (tokens of prompt g) and P (prompts with a masked token) counted
over *all* ranks and micro-batches of the optimizer step:

=========================  ==================================================  =====================================
mode                       loss                                                source
=========================  ==================================================  =====================================
token-mean                 sum_it m l / T                                      DAPO, arXiv 2503.14476 eq. 8
seq-mean-token-mean        sum_i (1/n_i) sum_t m l / N                         GRPO, arXiv 2402.03300 eq. 3
seq-mean-token-sum         sum_i sum_t m l / N                                 REINFORCE
seq-mean-token-sum-norm    sum_i sum_t m l / (N * norm_length)                 Dr. GRPO, arXiv 2503.20783 app. A
prompt-mean                sum_g (1/T_g) sum_{i in g, t} m l / P               mean over prompts of their token means
token-sum                  sum_it m l                                          no denominator
=========================  ==================================================  =====================================

A sample is a row, or all rows of a trajectory where one has several (``sequence_tokens``).

Every mode is a weight per row times the masked row sum, so the mask multiplies the numerator in each of them, and the
sum of the shares over micro-batches and ranks is the global loss.  A mode is a function ``(mask, denominators) ->
weights``, bool (B, L) to float64 (B,), or ``(mask, denominators, group_ids) -> weights`` with int64 (B,) that index
:attr:`LossDenominators.group_tokens`; one with a parameter ``sequence_tokens`` is given n_i by that name, int64 (B,);
:data:`aggregation_modes` knows them by name, and any other by dotted path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.masked import Keep, kept, row_blocks
from roll.algorithms.registry import Registry


@dataclass(frozen=True)
class LossDenominators:
    """Sums over all ranks and micro-batches of one optimizer step."""

    tokens: float
    """Masked tokens."""
    samples: float
    """Rows with at least one masked token; trajectories, where they have several rows."""
    norm_length: float | None = None
    """The constant length of ``seq-mean-token-sum-norm``, in tokens (``loss_norm_length``)."""
    group_tokens: Tensor | None = None
    """float64 (G,): masked tokens of each prompt; None where the mode does not ask for groups."""


def denominators_of(mask: Tensor, sequence_tokens: Tensor | None = None) -> Tensor:
    """This rank's part, to be summed over ranks: bool (B, L) -> float64 (2,) = (tokens, samples).

    With ``sequence_tokens`` int64 (B,), each row is the share of a sample that its tokens are of the trajectory's.
    """
    if sequence_tokens is None:
        return torch.stack([mask.sum(), mask.any(-1).sum()]).double()
    tokens = mask.sum(-1).double()
    return torch.stack([tokens.sum(), (tokens / sequence_tokens.clamp(min=1)).sum()])


def denominators_from(summed: Tensor, norm_length: float | None = None) -> LossDenominators:
    """The inverse of :func:`denominators_of` after the sum over ranks: one transfer from the device."""
    tokens, samples = summed.tolist()
    # Both are counts: the shares of a trajectory's rows add up to 1 but for rounding.
    return LossDenominators(tokens, float(round(samples)), norm_length)


def group_tokens_of(mask: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """This rank's part of :attr:`LossDenominators.group_tokens`, to be summed over ranks.

    Args:
        mask: bool (B, L).
        group_ids: int64 (B,), 0 to ``num_groups`` - 1, the same number for a prompt on every rank.
    """
    tokens = mask.sum(-1).double()
    return torch.zeros(num_groups, dtype=torch.float64, device=mask.device).index_add_(0, group_ids, tokens)


RowWeights = Callable[..., Tensor]
aggregation_modes: Registry[RowWeights] = Registry("loss_agg_mode")


def register_aggregation(name: str) -> Callable[[RowWeights], RowWeights]:
    """Decorator: make a mode selectable as ``loss_agg_mode: name``."""
    return aggregation_modes.decorator(name)


@register_aggregation("token-mean")
def token_mean(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / T."""
    return _ones(mask) / max(denominators.tokens, 1.0)


@register_aggregation("seq-mean-token-mean")
def seq_mean_token_mean(
    mask: Tensor, denominators: LossDenominators, *, sequence_tokens: Tensor | None = None
) -> Tensor:
    """1 / (n_i N)."""
    tokens = mask.sum(-1) if sequence_tokens is None else sequence_tokens
    return _ones(mask) / (tokens.clamp(min=1) * max(denominators.samples, 1.0))


@register_aggregation("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / N."""
    return _ones(mask) / max(denominators.samples, 1.0)


@register_aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / (N norm_length). Raises ``ValueError`` where there is no length."""
    if not denominators.norm_length or denominators.norm_length <= 0:
        raise ValueError(
            "loss_agg_mode 'seq-mean-token-sum-norm' needs a positive norm_length, got "
            f"{denominators.norm_length}; the configured response length is the usual choice"
        )
    return _ones(mask) / (max(denominators.samples, 1.0) * denominators.norm_length)


@register_aggregation("prompt-mean")
def prompt_mean(mask: Tensor, denominators: LossDenominators, group_ids: Tensor) -> Tensor:
    """1 / (T_g P)."""
    assert denominators.group_tokens is not None
    tokens = denominators.group_tokens.to(mask.device)
    return 1.0 / (tokens[group_ids].clamp(min=1) * torch.count_nonzero(tokens).clamp(min=1))


@register_aggregation("token-sum")
def token_sum(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1."""
    return _ones(mask)


@cache
def needs_groups(mode: str) -> bool:
    """True where the mode's function takes the ids of groups."""
    return len(_parameters(mode) - {"sequence_tokens"}) > 2


@cache
def _parameters(mode: str) -> frozenset[str]:
    return frozenset(inspect.signature(aggregation_modes.resolve(mode)).parameters)


def _ones(mask: Tensor) -> Tensor:
    return torch.ones(mask.shape[0], dtype=torch.float64, device=mask.device)


AGGREGATION_MODES = aggregation_modes.names


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    denominators: LossDenominators,
    sample_weights: Tensor | None = None,
    keep: Keep | None = None,
    group_ids: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """The micro-batch's share of the global loss, a scalar.

    Args:
        loss: float (B, L), per token; what stands outside the mask is ignored.
        mask: bool (B, L).
        mode: one of :data:`AGGREGATION_MODES`, or the dotted path of a function of one's own.
        denominators: of the whole optimizer step.
        sample_weights: optional float (B,), multiplied onto each row's loss; the denominators stay as they are.
        keep: of the mask and the type of ``loss``, where the caller has one.
        group_ids: int64 (B,), indices into ``denominators.group_tokens``, for modes that ask for groups.
        sequence_tokens: int64 (B,), masked tokens of all rows of a row's trajectory; None: rows are samples.

    An empty mask gives 0 with zero gradient.  Raises ``ValueError`` for an unknown mode, or one that asks for groups
    where there are none.
    """
    arguments = (mask, denominators)
    if needs_groups(mode):
        if group_ids is None or denominators.group_tokens is None:
            raise ValueError(f"loss_agg_mode {mode!r} needs group_ids: which rows answer the same prompt")
        arguments = (*arguments, group_ids)  # type: ignore[assignment]
    by_name = {"sequence_tokens": sequence_tokens} if "sequence_tokens" in _parameters(mode) else {}
    weights = aggregation_modes.resolve(mode)(*arguments, **by_name).to(loss.dtype)
    if sample_weights is not None:
        weights = weights * sample_weights
    row_sums: Tensor = _MaskedRowSums.apply(loss, keep or Keep(mask, loss.dtype))
    return row_sums @ weights


class _MaskedRowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, keep: Keep) -> Tensor:
        ctx.keep = keep
        return torch.cat([kept(values, bits).sum(-1) for values, bits in row_blocks(loss, keep.bits)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.keep(gradients[0].unsqueeze(-1)), None
