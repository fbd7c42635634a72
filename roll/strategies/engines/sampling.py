"""Sampling by the settings of requests: random streams, filters, penalties, and the draw of a token by one number.

What a sample draws depends on its seed and position, not on its neighbours. A stream is a 64-bit key; its t-th number
is the t-th output of SplitMix64 started at that key (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"), which needs no state but t.
"""

from __future__ import annotations

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream_key(seed: int, sample_index: int) -> int:
    """The key of sample ``sample_index`` of a request seeded with ``seed``; 0 <= key < 2**64."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (sample_index + 1) * _GOLDEN) & _MASK)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[b]`` of stream ``keys[b]``: float64 (B,), in [0, 1), multiples of 2**-53. ``keys`` are uint64
    (B,), ``positions`` int64 (B,), from 0."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_BLOCK = 64  # a row is searched in two stages: over sums of blocks, then inside one block
_SHORT_ROW = 512  # up to here one sum over the row is as fast
_CANDIDATES = 1024  # top-p without top-k: sorted this many first, the whole vocabulary only where they do not do


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of seen tokens by the penalty (Keskar et al. 2019, CTRL).
    ``logits`` are float32 (B, V), ``seen`` bool (B, V), ``penalty`` float32 (B,)."""
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def filter_threshold(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """The lowest logit that may be sampled, float32 (B,).

    Args:
        logits: float32 (B, V), temperature applied.
        top_k: int64 (B,), 0 is off; tokens that tie with the k-th stay (as do ties at the border of top-p).
        top_p: float32 (B,); the fewest most likely tokens whose probabilities reach top_p stay, at least one.
        min_p: float32 (B,); tokens of at least min_p times the highest probability stay.
    """
    threshold = logits.new_full(logits.shape[:1], -torch.inf)
    if min_p is not None:
        threshold = logits.amax(-1) + min_p.log()
    if top_k is None:
        if top_p is None:
            return threshold
        kept = logits.masked_fill(logits < threshold[:, None], -torch.inf)
        normaliser = kept.logsumexp(-1, keepdim=True)
        for count in (min(_CANDIDATES, logits.shape[1]), logits.shape[1]):
            best = kept.topk(count, dim=-1).values
            probs = (best - normaliser).exp()
            if count == logits.shape[1] or bool((probs.sum(-1) > top_p).all()):
                break
        return torch.maximum(threshold, _border(best, probs, top_p))
    vocab_size = logits.shape[1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    best = logits.topk(int(k.max()), dim=-1).values
    threshold = torch.maximum(threshold, best.gather(1, (k - 1)[:, None])[:, 0])
    if top_p is None:
        return threshold
    probs = best.masked_fill(best < threshold[:, None], -torch.inf).softmax(-1)
    return torch.maximum(threshold, _border(best, probs, top_p))


def _border(best: torch.Tensor, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The value in ``best`` (B, k, descending) at which the sum of ``probs`` reaches ``top_p``."""
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    count = (before < top_p[:, None]).sum(-1).clamp(min=1)
    # With top_p = 1 a cumulative sum that rounding has brought to 1 early must not drop the last tokens.
    border = best.gather(1, (count - 1)[:, None])[:, 0]
    return torch.where(top_p < 1, border, best.new_full((), -torch.inf))


def invert_cumulative(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds ``draws`` times the row's sum; never one of probability 0.

    Long rows are summed in blocks and the sums are added in float64, so that a vocabulary of 150,000 is searched
    without the error of a long float32 sum, and only one block is looked at token by token.

    Args:
        probs: float32 (B, V), not necessarily normalised. draws: float64 (B,), in [0, 1).

    Returns:
        int64 (B,).
    """
    batch, vocab_size = probs.shape
    if vocab_size <= _SHORT_ROW:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
    if vocab_size % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab_size % _BLOCK))
    blocks = probs.view(batch, -1, _BLOCK)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    target = draws[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)
    block_sum = sums.gather(1, block).double()
    # How far into the block, as a share of it; below 1 whatever was rounded.
    share = (1 - (cumulative.gather(1, block) - target) / block_sum).clamp_(0, 1 - 2.0**-53)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(inside, share * inside[:, -1:], right=True)
    return (block * _BLOCK + offset)[:, 0]


class RowSettings:
    """The settings of a batch's rows on the device; None or False where no row uses one. ``top_k`` is int64
    (B,), 0 is off; the others are float32 (B,).

    Args:
        temperature, top_p, min_p, penalty: float32 (B,).
        top_k: int64 (B,), 0 is off.
    """

    def __init__(
        self,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        penalty: np.ndarray,
        device: torch.device,
    ) -> None:
        def column(values: np.ndarray, neutral: float) -> torch.Tensor | None:
            return None if (values == neutral).all() else torch.from_numpy(values.copy()).to(device)

        greedy = temperature == 0
        self.all_greedy, self.greedy = bool(greedy.all()), column(greedy, False)
        self.temperature = column(np.where(greedy, np.float32(1), temperature), 1)
        self.top_k, self.top_p, self.min_p = column(top_k, 0), column(top_p, 1), column(min_p, 0)
        self.penalty = column(penalty, 1)

    def filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V): logits over the temperature, -inf for what the filters leave out."""
        scaled = logits if self.temperature is None else logits / self.temperature[:, None]
        if self.top_k is None and self.top_p is None and self.min_p is None:
            return scaled
        threshold = filter_threshold(scaled, self.top_k, self.top_p, self.min_p)
        return scaled.masked_fill(scaled < threshold[:, None], -torch.inf)

    def drawn(self, logits: torch.Tensor, probs: torch.Tensor, keys: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """int64 (B,): a token a row, by number ``positions[b]`` of stream ``keys[b]``; the best of ``logits`` where the
        row is greedy."""
        draws = torch.from_numpy(uniforms(keys, positions)).to(probs.device)
        # The search may end past a row that is not finite. Any valid token will do: its log-prob is not finite either.
        tokens = invert_cumulative(probs, draws).clamp_(0, probs.shape[1] - 1)
        return tokens if self.greedy is None else torch.where(self.greedy, logits.argmax(-1), tokens)
