"""Multi-turn rollouts: the turns of a row, and trajectories whose tokens are spread over several rows.

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

from roll.algorithms.aggregation import Groups, segment_starts
from roll.algorithms.returns import reverse_discounted_sum


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
