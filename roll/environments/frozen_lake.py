"""FrozenLake as text or pictures: reach the goal over ice without falling into a hole."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from roll.environments.grids import MOVES, Cell, GridGame, Sprite, moved

_INSTRUCTION = (
    "You are walking on a frozen lake. Reach the goal (G) without falling into a hole (O). P is you, _ is ice, X is "
    "you in a hole, √ is you on the goal.{slippery} The actions are Up, Down, Left and Right."
)
_SLIPPERY = " The ice is slippery: with probability 2/3 you slide to one side of where you meant to go."
_PICTURE_INSTRUCTION = (
    "You are walking on a frozen lake. Reach the goal (the green square) without falling into a hole (a black disc). "
    "You are the red disc; a cross marks you in a hole or on the goal.{slippery} The actions are Up, Down, Left and "
    "Right."
)
_ICE, _HOLE, _GOAL, _PLAYER = (190, 225, 245), (20, 20, 30), (40, 160, 60), (210, 40, 40)
_SPRITES = {
    0: Sprite(_ICE, "disc", _PLAYER),
    1: Sprite(_ICE),
    2: Sprite(_ICE, "disc", _HOLE),
    3: Sprite(_ICE, "square", _GOAL),
    4: Sprite(_HOLE, "cross", _PLAYER),
    5: Sprite(_GOAL, "cross", _PLAYER),
}
_SYMBOLS: dict[int | str, str] = {0: "P", 1: "_", 2: "O", 3: "G", 4: "X", 5: "√"}
_MAX_TRIES = 1000


@dataclass
class FrozenLake(GridGame):
    """A square lake with random start, goal and holes, drawn from the seed; the goal can always be reached in time.

    The reward is 1 at the goal, otherwise 0.
    """

    name: ClassVar[str] = "frozen_lake"
    sprites: ClassVar[Mapping[int, Sprite]] = _SPRITES
    gap: ClassVar[str] = " "
    size: int = 4
    p: float = 0.8  # probability that a cell is ice
    is_slippery: bool = False
    """Every move goes to one of its two sides with probability 1/3 each, as in gymnasium's FrozenLake."""
    min_distance: int = 1  # fewest moves from start to goal
    grid_lookup: Mapping[int | str, str] = field(default_factory=lambda: dict(_SYMBOLS))
    """Symbols by code: 0 player, 1 ice, 2 hole, 3 goal, 4 player in a hole, 5 player on the goal."""

    def __post_init__(self) -> None:
        self._check_options(self.grid_lookup)
        if self.size < 2:
            raise ValueError(f"size of frozen_lake must be at least 2, got {self.size}")
        if not 0 < self.p <= 1:
            raise ValueError(f"p of frozen_lake is the probability of ice, above 0 and at most 1, got {self.p}")
        if not 1 <= self.min_distance <= self.max_steps:
            raise ValueError(f"min_distance of frozen_lake must lie in 1..max_steps, got {self.min_distance}")

    def _draw(self, rng: random.Random) -> None:
        self._rng = rng
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(_MAX_TRIES):
            start, goal = rng.sample(cells, 2)
            self.position: Cell = start
            self.goal: Cell = goal
            self.holes: set[Cell] = {
                cell for cell in cells if cell not in (self.position, self.goal) and rng.random() >= self.p
            }
            self._distances = self._distances_to_goal()
            if self.min_distance <= self._distances.get(self.position, -1) <= self.max_steps:
                return
        raise ValueError(
            f"no frozen_lake of size {self.size} with p {self.p} has a way of {self.min_distance} to {self.max_steps} "
            f"moves in {_MAX_TRIES} draws; raise p, or lower min_distance"
        )

    def _rules(self) -> str:
        instruction = _INSTRUCTION if self.render_mode == "text" else _PICTURE_INSTRUCTION
        return instruction.format(slippery=_SLIPPERY if self.is_slippery else "")

    def _moved(self, move: str | None) -> tuple[float, bool, bool, bool]:
        before = self.position
        if move is not None:
            cell = moved(self.position, self._slid(move))
            self.position = cell if self._inside(cell) else self.position
        success = self.position == self.goal
        return float(success), success, success or self.position in self.holes, self.position != before

    def codes(self) -> list[list[int]]:
        side = range(self.size)
        found = [[2 if (row, column) in self.holes else 1 for column in side] for row in side]
        found[self.goal[0]][self.goal[1]] = 3
        own = {2: 4, 3: 5}.get(found[self.position[0]][self.position[1]], 0)
        found[self.position[0]][self.position[1]] = own
        return found

    def best_moves(self) -> list[str]:
        """The moves that begin a shortest way to the goal, the ice not being slippery."""
        near = self._distances[self.position]
        return [move for move in MOVES if self._distances.get(moved(self.position, move), near) < near]

    def _distances_to_goal(self) -> dict[Cell, int]:
        found, waiting = {self.goal: 0}, deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for move in MOVES:
                near = moved(cell, move)
                if self._inside(near) and near not in self.holes and near not in found:
                    found[near] = found[cell] + 1
                    waiting.append(near)
        return found

    def _slid(self, move: str) -> str:
        if not self.is_slippery:
            return move
        names = list(MOVES)  # neighbours in this order are at right angles
        return names[(names.index(move) + self._rng.choice((-1, 0, 1))) % len(names)]

    def _inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size
