"""Statistics over the masked part of a tensor, and the aggregation of per-token losses: a micro-batch's share of the
loss of the whole optimizer step.

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

A sample is a row, or all rows of a trajectory that has several (``sequence_tokens``).

Every mode is a weight per row times the masked row sum, so the mask multiplies the numerator in each of them, and the
sum of the shares over micro-batches and ranks is the global loss.  A mode is a function ``(mask, denominators) ->
weights``, bool (B, L) to float64 (B,), or ``(mask, denominators, group_ids) -> weights`` with int64 (B,) that index
:attr:`LossDenominators.group_tokens`; a parameter ``sequence_tokens`` receives n_i, int64 (B,).
:data:`aggregation_modes` has them by name, and loads any other by its dotted path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from roll.algorithms.registry import Registry


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked ``values``, a scalar; 0 for an empty mask."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked tokens of each row: (B, L) -> (B,); 0 for an empty row."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Bring the masked values to zero mean and unit (Bessel-corrected) variance; 0 outside the mask.

    With fewer than two masked values nothing can be estimated and they are returned as they are.
    """
    count = mask.sum()
    # Sums in float64: equal values then give exactly 0, not rounding errors divided by a variance of nothing.
    mean = torch.where(mask, values, 0.0).sum(dtype=torch.float64) / count.clamp(min=1)
    centred = torch.where(mask, values - mean.to(values.dtype), 0.0)
    variance = centred.square().sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    whitened = centred * (variance + 1e-8).rsqrt().to(values.dtype)
    # torch.where instead of a Python branch: reading the count would make the host wait for the device.
    return torch.where(count > 1, whitened, torch.where(mask, values, 0.0))


@dataclass(frozen=True)
class Groups:
    """Groups of rows; the rows of a group need not be adjacent."""

    index: Tensor
    """int64 (B,): the group of each row, 0..G-1."""
    counts: Tensor
    """int64 (G,): rows of each group, all >= 1."""

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """Group rows by arbitrary int64 ids (B,)."""
        _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, counts)

    @property
    def sizes(self) -> Tensor:
        """int64 (B,): the size of each row's group."""
        return self.counts[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group: (B,) -> (G,), in the dtype of ``values``."""
        return torch.zeros_like(self.counts, dtype=values.dtype).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each group: (B,) -> (G,)."""
        return self.sum(values) / self.counts

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and Bessel-corrected deviation of each group: (B,) -> (G,) each; that of a group of one is 0."""
        mean = self.mean(values)
        squares = self.sum((values - mean[self.index]).square_())
        return mean, squares.div_((self.counts - 1).clamp_(min=1)).sqrt_()


def segment_starts(mask: Tensor, turn_ids: Tensor | None = None) -> Tensor:
    """bool (B, L): the first token of each run of masked tokens; of each turn in it, where there are ``turn_ids``."""
    # A turn may follow another without a token of the environment between them: only ids tell these apart.
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1] if turn_ids is None else ~mask[:, :-1] | (turn_ids[:, 1:] != turn_ids[:, :-1])
    return starts


def level_log_ratio(log_ratio: Tensor, mask: Tensor, level: str, turn_ids: Tensor | None = None) -> Tensor:
    """Log-ratio of the unit that each token belongs to: (B, L) -> (B, L).

    ``token``: its own; ``segment``: mean over its turn, a run of masked tokens or, in it, of equal ``turn_ids``;
    ``geometric`` or ``seq``: mean over its response (GSPO, arXiv 2507.18071 eq. 7); ``sequence``: the sum over it;
    ``max``: the largest of its response.  Raises ``ValueError`` for another level.
    """
    if level == "token":
        return log_ratio
    if level == "max":
        largest = log_ratio.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) if mask.shape[-1] else log_ratio
        return torch.where(mask, largest, 0.0)
    if level == "segment":
        # 1.. on masked tokens; the tokens between two segments have the number of the first, and are masked out.
        segment = segment_starts(mask, turn_ids).flatten().cumsum(0)
        # One cell more than there are tokens: number 0 is for what lies before the first segment.
        zeros = log_ratio.new_zeros(mask.numel() + 1)
        totals = zeros.index_add(0, segment, torch.where(mask, log_ratio, 0.0).flatten())
        counts = zeros.index_add(0, segment, mask.flatten().to(log_ratio.dtype))
        means = totals / counts.clamp(min=1)
        return torch.where(mask, means[segment].view_as(log_ratio), 0.0)
    total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
    if level in ("geometric", "seq"):
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"unknown ratio level {level!r}; known: token, segment, geometric (seq), sequence, max")
    return torch.where(mask, total, 0.0)


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
    """float64 (G,): masked tokens of each prompt; None where the mode does not need groups."""
    rows: float = 0.0
    """Rows, those without a masked token as well."""


def denominators_of(mask: Tensor, sequence_tokens: Tensor | None = None) -> Tensor:
    """This rank's part, to be summed over ranks: bool (B, L) -> float64 (3,) = (tokens, samples, rows).

    With ``sequence_tokens`` int64 (B,), each row is the share of a sample that its tokens are of the trajectory's.
    """
    # Float64: the sum over ranks of tokens and rows stays exact beyond 2^24.
    rows = mask.new_tensor(len(mask), dtype=torch.float64)
    if sequence_tokens is None:
        return torch.stack([mask.sum().double(), mask.any(-1).sum().double(), rows])
    tokens = mask.sum(-1).double()
    return torch.stack([tokens.sum(), (tokens / sequence_tokens.clamp(min=1)).sum(), rows])


def denominators_from(
    summed: Tensor, norm_length: float | None = None, group_tokens: Tensor | None = None
) -> LossDenominators:
    """The inverse of :func:`denominators_of` after the sum over ranks: one transfer from the device."""
    tokens, samples, rows = summed.tolist()
    # Both are counts: the shares of a trajectory's rows add up to 1 but for rounding.
    return LossDenominators(tokens, float(round(samples)), norm_length, group_tokens, rows)


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
register_aggregation = aggregation_modes.register
"""Decorator ``(name)``: make a mode selectable as ``loss_agg_mode: name``."""


@register_aggregation("token-mean")
def token_mean(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / T."""
    return mask.new_ones(len(mask), dtype=torch.float64) / max(denominators.tokens, 1.0)


@register_aggregation("seq-mean-token-mean")
def seq_mean_token_mean(
    mask: Tensor, denominators: LossDenominators, *, sequence_tokens: Tensor | None = None
) -> Tensor:
    """1 / (n_i N)."""
    tokens = mask.sum(-1) if sequence_tokens is None else sequence_tokens
    return 1.0 / (tokens.double().clamp(min=1) * max(denominators.samples, 1.0))


@register_aggregation("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / N."""
    return mask.new_ones(len(mask), dtype=torch.float64) / max(denominators.samples, 1.0)


@register_aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """1 / (N norm_length). Raises ``ValueError`` where there is no length."""
    if not denominators.norm_length or denominators.norm_length <= 0:
        raise ValueError(
            "loss_agg_mode 'seq-mean-token-sum-norm' needs a positive norm_length, got "
            f"{denominators.norm_length}; the configured response length is the usual choice"
        )
    total = max(denominators.samples, 1.0) * denominators.norm_length
    return mask.new_ones(len(mask), dtype=torch.float64) / total


@register_aggregation("prompt-mean")
def prompt_mean(mask: Tensor, denominators: LossDenominators, group_ids: Tensor) -> Tensor:
    """1 / (T_g P)."""
    assert denominators.group_tokens is not None
    tokens = denominators.group_tokens.to(mask.device)
    return 1.0 / (tokens[group_ids].clamp(min=1) * torch.count_nonzero(tokens).clamp(min=1))


@register_aggregation("token-sum")
def token_sum(mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Weight 1: plain sum."""
    return mask.new_ones(len(mask), dtype=torch.float64)


@cache
def _mode(name: str) -> tuple[RowWeights, frozenset[str]]:
    """The function of a mode and the names of its parameters."""
    function = aggregation_modes.resolve(name)
    return function, frozenset(inspect.signature(function).parameters)


def needs_groups(mode: str) -> bool:
    """Return True if the mode's function takes the ids of groups."""
    return len(_mode(mode)[1] - {"sequence_tokens"}) > 2


def row_weights(
    mask: Tensor,
    mode: str,
    denominators: LossDenominators,
    group_ids: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """Weight of each row's masked sum in the loss of a mode, float64 (B,).

    Args:
        mask: bool (B, L).
        mode: one of :data:`~roll.config.algorithm.LOSS_AGG_MODES`, or the dotted path of a user's own function.
        denominators: of the whole optimizer step.
        group_ids: int64 (B,), indices into ``denominators.group_tokens``, for modes that need groups.
        sequence_tokens: int64 (B,), masked tokens of all rows of a row's trajectory; None: rows are samples.

    Raises ``ValueError`` for an unknown mode, or for one that needs groups when there are none.
    """
    function, parameters = _mode(mode)
    by_name = {"sequence_tokens": sequence_tokens} if "sequence_tokens" in parameters else {}
    if not needs_groups(mode):
        return function(mask, denominators, **by_name)
    if group_ids is None or denominators.group_tokens is None:
        raise ValueError(f"loss_agg_mode {mode!r} needs group_ids: which rows answer the same prompt")
    return function(mask, denominators, group_ids, **by_name)


def weighted_sum(loss: Tensor, mask: Tensor, weights: Tensor, sample_weights: Tensor | None = None) -> Tensor:
    """The micro-batch's share of the global loss, a scalar; an empty mask gives 0 with zero gradient.

    Args:
        loss: float (B, L), per token; anything outside the mask, NaN included, is ignored.
        mask: bool (B, L).
        weights: (B,), those of :func:`row_weights`.
        sample_weights: float (B,), multiplied onto each row's loss; the denominators stay as they are.
    """
    # torch.where, not a product: NaN * 0 is NaN, in the value and in the gradient.
    row_sums = torch.where(mask, loss, 0.0).sum(-1)
    if sample_weights is not None:
        weights = weights * sample_weights
    return row_sums @ weights.to(loss.dtype)
