r"""Returns: discounted sums along the tokens of a response, and along the turns of multi-turn rollouts.

A loop over tokens, last to first, is the usual way (y_t = x_t + c y_{t+1}).  Here blocks of 32 tokens are solved at
once: with S_t the product of the factors from the block's first token up to t, S_t y_t is the sum of S_s x_s over the
tokens s >= t of the block, a product with a triangular matrix of ones, plus what flows in from the next block.  The
loop is over blocks: 1,024 x 1,024 tokens take a twelfth of the time.

A trajectory has several rows where it is a tree of branches, where each call is a row, and where its conversation was
restarted.  A later token is then not always further right.  :class:`TrajectoryLayout` packs all sampled tokens of a
trajectory into one row in the order of sampling, so that recursions over time and statistics over trajectories are
those of single responses, and unpacks the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.aggregation import Groups, segment_starts

_BLOCK = 32
# Products of factors within a block stay above this, so that dividing by them stays within the range of float32.
_LEAST_SCALING = 1e-18


def reverse_discounted_sum(values: Tensor, discount: float, mask: Tensor | None = None) -> Tensor:
    """y_t = x_t + f y_{t+1} along the last dimension, f the discount, or 1 where token t+1 is outside the mask.

    So only masked tokens discount, and values on unmasked tokens count as if they were on the last masked one before.

    Args:
        values: float (B, L), L >= 1, which may be overwritten.
        discount: in [0, 1].
        mask: (B, L) of the type of ``values``, 1 or 0; None: all tokens discount.

    Returns:
        float (B, L).
    """
    rows, length = values.shape
    # A small discount underflows within a block, and S_t divides at the end: then the plain loop, token by token.
    width = min(_BLOCK, length) if discount**_BLOCK > _LEAST_SCALING else 1
    missing = -length % width
    if missing:
        values, mask = pad(values, (0, missing)), None if mask is None else pad(mask, (0, missing))
    blocks = values.view(rows, values.shape[1] // width, width)
    if mask is None:
        scaling = (discount ** torch.arange(width, device=values.device, dtype=torch.float64)).to(values.dtype)
        inflow = torch.full_like(blocks[:, 1:, 0], discount**width).T
    else:
        factors = torch.add(mask.new_ones(()), mask, alpha=discount - 1.0).view(blocks.shape)  # the discount, or 1
        inflow = factors[:, 1:, 0].T.clone()
        factors[:, :, 0] = 1.0
        scaling = factors.cumprod_(-1)
        inflow *= scaling[:, :-1, -1].T
    sums = blocks.mul_(scaling) @ values.new_ones(width, width).tril_()
    starts = sums[:, :, 0].T.clone(memory_format=torch.contiguous_format)
    for block in reversed(range(len(inflow))):
        starts[block].addcmul_(inflow[block], starts[block + 1])
    sums[:, :-1] += (inflow * starts[1:]).T[..., None]
    return sums.div_(scaling).view(values.shape)[:, :length]


def discounted_returns(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = R_t + gamma G_{next masked token}: float (B, L) -> (B, L), 0 outside the mask."""
    return _masked_sums(torch.where(mask, token_level_rewards, 0.0), mask, gamma)


def generalized_advantages(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each row; arXiv 1506.02438 eq. 16.

    delta_t = R_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambd A_{t+1}, where t+1 is the next *masked* token:
    value and running sum are carried across tool output.  The value after the last token is 0.

    Args:
        token_level_rewards, values: float32 or float64 (B, L); anything outside the mask is ignored.
        mask: bool (B, L).
        gamma, lambd: in [0, 1].

    Returns:
        (advantages, returns = advantages + values), float (B, L), 0 outside the mask.
    """
    values = torch.where(mask, values, 0.0)
    delta = torch.where(mask, token_level_rewards, 0.0).sub_(values)
    # Where tool output follows token t, gamma V_{t+1} is added to its last token, which no discount separates from t.
    delta[:, :-1].add_(values[:, 1:], alpha=gamma)
    advantages = _masked_sums(delta, mask, gamma * lambd)
    return advantages, values.add_(advantages)


def _masked_sums(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Discounted sums on masked tokens, 0 elsewhere; ``values`` may be overwritten."""
    if not values.numel():
        return values
    # Bytes are compared, and become floats, several times faster than booleans.
    tokens = mask.view(torch.uint8)
    runs = torch.count_nonzero(tokens[:, 1:] > tokens[:, :-1]) + torch.count_nonzero(tokens[:, :1])
    has_gaps = bool(runs > torch.count_nonzero(tokens.amax(-1)))
    weights = tokens.to(values.dtype)
    return reverse_discounted_sum(values, discount, weights if has_gaps and discount != 1.0 else None).mul_(weights)


@dataclass(frozen=True)
class Turns:
    """The turns of each row, K at most."""

    index: Tensor
    """int64 (B, L): of masked tokens their turn, from 0 on; meaningless elsewhere."""
    mask: Tensor
    """bool (B, L)."""
    starts: Tensor
    """bool (B, L): first tokens of turns."""

    @classmethod
    def of(cls, mask: Tensor, turn_ids: Tensor | None = None) -> Turns:
        """Find the turns of a response mask (B, L), by ids (B, L) where no token need lie between two turns."""
        starts = segment_starts(mask, turn_ids)
        return cls((starts.cumsum(-1) - 1).clamp(min=0), mask, starts)

    @cached_property
    def exists(self) -> Tensor:
        """bool (B, K)."""
        counts = self.starts.sum(-1, keepdim=True)
        most = int(counts.max()) if counts.numel() else 0
        return torch.arange(max(most, 1), device=self.mask.device) < counts

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each turn: float (B, L) -> (B, K)."""
        kept = torch.where(self.mask, values, 0.0)
        return kept.new_zeros(self.exists.shape).scatter_add_(1, self.index, kept)

    def first(self, values: Tensor) -> Tensor:
        """Values on the first token of each turn: float (B, L) -> (B, K), 0 where there is no turn."""
        return self.sum(torch.where(self.starts, values, 0.0))

    def spread(self, per_turn: Tensor) -> Tensor:
        """Give every masked token the number of its turn: float (B, K) -> (B, L), 0 elsewhere."""
        return torch.where(self.mask, per_turn.gather(1, self.index), 0.0)

    def returns(self, rewards: Tensor, gamma: float) -> Tensor:
        """Discounted return from each turn on, by token rewards (B, L), ``gamma`` a turn: float (B, K)."""
        return torch.where(self.exists, reverse_discounted_sum(self.sum(rewards), gamma), 0.0)


@dataclass(frozen=True)
class TrajectoryLayout:
    """B rows of length L as T trajectories of at most W sampled tokens."""

    trajectories: Groups
    """Which rows belong together."""
    sources: Tensor
    """int64 (N,): places of the sampled tokens in the flattened rows, trajectory by trajectory in order of time."""
    targets: Tensor
    """int64 (N,): places of the same in the flattened trajectories."""
    shape: torch.Size
    """(B, L)."""
    lengths: Tensor
    """int64 (T,): sampled tokens."""
    packed_shape: tuple[int, int]
    """(T, W)."""

    @classmethod
    def of(cls, mask: Tensor, trajectory_ids: Tensor, turn_ids: Tensor) -> TrajectoryLayout:
        """Order the sampled tokens of each trajectory by turn, and within a turn by position.

        Args:
            mask: bool (B, L), tokens that were sampled; each in one row only.
            trajectory_ids: int64 (B,).
            turn_ids: int (B, L), ascending in time within a trajectory; a turn's tokens are in one row.
        """
        trajectories = Groups.of(trajectory_ids)
        rows, columns = mask.nonzero(as_tuple=True)
        owner, turn = trajectories.index[rows], turn_ids[rows, columns].long()
        turns = int(turn.max()) + 1 if len(turn) else 1
        # One key for trajectory and turn; the stable sort leaves positions within a turn in ascending order.
        order = torch.argsort(owner * turns + turn, stable=True)
        lengths = torch.zeros_like(trajectories.counts).index_add_(0, owner, torch.ones_like(owner))
        width = max(int(lengths.max()), 1) if len(lengths) else 1
        begins = lengths.cumsum(0) - lengths
        place = torch.arange(len(order), device=mask.device) - begins[owner[order]]
        sources = (rows * mask.shape[1] + columns)[order]
        targets = owner[order] * width + place
        return cls(trajectories, sources, targets, mask.shape, lengths, (len(lengths), width))

    @cached_property
    def mask(self) -> Tensor:
        """bool (T, W)."""
        return torch.arange(self.packed_shape[1], device=self.lengths.device) < self.lengths[:, None]

    def pack(self, column: Tensor, elsewhere: float = 0) -> Tensor:
        """(B, L) -> (T, W)."""
        packed = column.new_full((self.packed_shape[0] * self.packed_shape[1],), elsewhere)
        packed[self.targets] = column.flatten()[self.sources]
        return packed.view(self.packed_shape)

    def unpack(self, packed: Tensor) -> Tensor:
        """(T, W) -> (B, L), 0 where nothing was sampled."""
        column = packed.new_zeros(self.shape.numel())
        column[self.sources] = packed.flatten()[self.targets]
        return column.view(self.shape)
