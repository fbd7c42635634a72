"""Sokoban as text or pictures: push every box onto a target."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.environments.actions import MOVES, ActionPattern, move_named, moved
from roll.environments.pictures import Pixels, Sprite, check_rendering, grid_picture

Cell = tuple[int, int]
Position = tuple[Cell, frozenset[Cell]]
"""Player and boxes."""

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
_SYMBOLS: dict[int | str, str] = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P", 6: "S"}
_NAMES = {
    WALL: "wall",
    FLOOR: "empty",
    TARGET: "target",
    BOX_ON_TARGET: "box on target",
    BOX: "box",
    PLAYER: "player",
    PLAYER_ON_TARGET: "player on target",
}
_WALL, _FLOOR, _TARGET = (90, 80, 70), (235, 230, 215), (240, 160, 170)
_BOX, _DONE, _PLAYER = (150, 100, 40), (40, 150, 60), (40, 90, 200)
_SPRITES = {
    WALL: Sprite(_WALL),
    FLOOR: Sprite(_FLOOR),
    TARGET: Sprite(_FLOOR, "cross", _TARGET),
    BOX_ON_TARGET: Sprite(_TARGET, "square", _DONE),
    BOX: Sprite(_FLOOR, "square", _BOX),
    PLAYER: Sprite(_FLOOR, "disc", _PLAYER),
    PLAYER_ON_TARGET: Sprite(_TARGET, "disc", _PLAYER),
}
_PICTURE_LEGEND = (
    "Dark cells are wall, crosses are targets, brown squares are boxes, green squares are boxes on targets, the blue "
    "disc is you"
)
_STEP_REWARD, _BOX_REWARD, _SUCCESS_REWARD = -0.1, 1.0, 10.0
"""As in gym-sokoban: a move, a box onto (or, negated, off) its target, all boxes on targets."""
_MAX_TRIES = 100
_WALK_TURN = 0.35
"""Probability that the random walk which carves the room turns."""


@dataclass
class Sokoban:
    """A random room, drawn from the seed and solvable: it is made by pulling the boxes away from their targets.

    Rewards are gym-sokoban's: -0.1 a move, +1 (-1) for a box pushed onto (off) a target, +10 for the last one.
    """

    dim_room: Sequence[int] = (6, 6)
    """Rows and columns, walls included."""
    num_boxes: int = 1
    search_depth: int = 300
    """Positions that the backward search looks at; the hardest of them begins the game."""
    max_steps: int = 10
    format_penalty: float = 0.0
    action_pattern: str | None = None
    grid_lookup: Mapping[int | str, str] = field(default_factory=lambda: dict(_SYMBOLS))
    """Symbols by code: 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target."""
    grid_vocab: Mapping[str, str] | None = None
    """Symbols to words for the rules."""
    show_instruction: bool = True
    """Put the rules of the game before the first observation."""
    render_mode: str = "text"
    """``rgb_array``: observations are pictures, for policies that see images."""
    cell_pixels: int = 32
    """Side of a cell of a picture."""

    def __post_init__(self) -> None:
        check_rendering("sokoban", self.render_mode, self.cell_pixels)
        if len(self.dim_room) != 2 or min(self.dim_room) < 5:
            raise ValueError(f"dim_room of sokoban is [rows, columns], each at least 5, got {list(self.dim_room)}")
        floor = (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
        if not 1 <= self.num_boxes <= floor // 4:
            raise ValueError(
                f"num_boxes of sokoban must lie in 1..{floor // 4} for the room {list(self.dim_room)}, "
                f"got {self.num_boxes}"
            )
        if self.search_depth < 1:
            raise ValueError(f"search_depth of sokoban must be at least 1, got {self.search_depth}")
        self.player: Cell = (0, 0)
        self.boxes: frozenset[Cell] = frozenset()
        self._pattern = ActionPattern(self.action_pattern)
        self._symbols = {int(code): symbol for code, symbol in self.grid_lookup.items()}
        if set(self._symbols) != set(range(7)):
            raise ValueError(f"grid_lookup of sokoban needs the codes 0 to 6, got {sorted(self._symbols)}")

    def reset(self, seed: int) -> tuple[str | list[Any], dict[str, Any]]:
        rng = random.Random(f"sokoban/{seed}")
        for _ in range(_MAX_TRIES):
            if self._draw_room(rng):
                break
        else:
            raise ValueError(f"no room {list(self.dim_room)} with {self.num_boxes} boxes in {_MAX_TRIES} draws")
        self._steps = 0
        text = self.render()
        rules = f"{self._rules()}\n"
        shown, info = rules if self.show_instruction else "", {"state": text, "instruction": rules}
        return (shown + text if self.render_mode == "text" else [shown, self.picture()]), info

    def step(self, action: str) -> tuple[str | list[Any], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        move = move_named(self._pattern.find(action))
        before, on_target = (self.player, self.boxes), len(self.boxes & self.targets)
        if move is not None:
            self.player, self.boxes = self.after(before, move)
        success = self.boxes <= self.targets
        reward = _STEP_REWARD + _BOX_REWARD * (len(self.boxes & self.targets) - on_target)
        reward += (_SUCCESS_REWARD if success else 0.0) + (self.format_penalty if move is None else 0.0)
        text = self.render()
        metrics = {"valid": float(move is not None), "effective": float((self.player, self.boxes) != before)}
        info = {"success": success, "valid": move is not None, "state": text, "metrics": metrics}
        observation = text if self.render_mode == "text" else [self.picture()]
        return observation, reward, success, not success and self._steps >= self.max_steps, info

    def after(self, position: Position, move: str) -> Position:
        """The position that ``move`` leads to: the same one where a wall or a second box is in the way."""
        player, boxes = position
        cell = moved(player, move)
        if cell not in self.floor:
            return position
        if cell not in boxes:
            return cell, boxes
        behind = moved(cell, move)
        if behind not in self.floor or behind in boxes:
            return position
        return cell, (boxes - {cell}) | {behind}

    def render(self) -> str:
        """The room as one line a row."""
        rows, columns = self.dim_room
        return "\n".join("".join(self._symbols[self._code((r, c))] for c in range(columns)) for r in range(rows))

    def picture(self) -> Pixels:
        """The room as uint8 pixels (rows * cell_pixels, columns * cell_pixels, 3)."""
        rows, columns = self.dim_room
        codes = [[self._code((row, column)) for column in range(columns)] for row in range(rows)]
        return grid_picture(codes, _SPRITES, self.cell_pixels)

    def sample_action(self, rng: random.Random) -> str:
        return rng.choice(list(MOVES))

    def _rules(self) -> str:
        words = self.grid_vocab or {self._symbols[code]: name for code, name in _NAMES.items()}
        legend = ", ".join(f"{symbol} is {name}" for symbol, name in words.items())
        if self.render_mode != "text":
            legend = _PICTURE_LEGEND
        return (
            "You are solving a Sokoban puzzle: push every box onto a target. Boxes can be pushed, not pulled. "
            f"{legend}. The actions are Up, Down, Left and Right."
        )

    def _code(self, cell: Cell) -> int:
        target = cell in self.targets
        if cell == self.player:
            return PLAYER_ON_TARGET if target else PLAYER
        if cell in self.boxes:
            return BOX_ON_TARGET if target else BOX
        return WALL if cell not in self.floor else TARGET if target else FLOOR

    def _draw_room(self, rng: random.Random) -> bool:
        """Carve a room, put boxes on targets, pull them away; false where nothing can be pulled."""
        self.floor = self._carve(rng)
        if len(self.floor) < 2 * self.num_boxes + 2:
            return False
        cells = rng.sample(sorted(self.floor), self.num_boxes + 1)
        self.targets = frozenset(cells[1:])
        solved: Position = (cells[0], self.targets)
        found = self._pulled(solved)
        deepest = max(found.values())
        ends = sorted((player, sorted(boxes)) for (player, boxes), pulls in found.items() if pulls == deepest)
        start, pulled = rng.choice(ends)
        self.player, self.boxes = start, frozenset(pulled)
        return deepest > 0 and not self.boxes <= self.targets

    def _carve(self, rng: random.Random) -> frozenset[Cell]:
        """Floor cells of a random walk through the room, three cells wide here and there."""
        rows, columns = self.dim_room
        cell = (rng.randrange(1, rows - 1), rng.randrange(1, columns - 1))
        move = rng.choice(list(MOVES))
        floor: set[Cell] = set()
        for _ in range(int(1.5 * (rows + columns))):
            if rng.random() < _WALK_TURN:
                move = rng.choice(list(MOVES))
            around = [cell, *(moved(cell, side) for side in rng.sample(list(MOVES), 2))]
            floor |= {one for one in around if 0 < one[0] < rows - 1 and 0 < one[1] < columns - 1}
            ahead = moved(cell, move)
            if 0 < ahead[0] < rows - 1 and 0 < ahead[1] < columns - 1:
                cell = ahead
        return frozenset(floor)

    def _pulled(self, solved: Position) -> dict[Position, int]:
        """Positions from which ``solved`` can be reached, with the number of pulls, breadth first."""
        found, waiting = {solved: 0}, [solved]
        for position in waiting:
            if len(found) >= self.search_depth:
                break
            player, boxes = position
            for move, (rows, columns) in MOVES.items():
                back = (player[0] - rows, player[1] - columns)
                if back not in self.floor or back in boxes:
                    continue
                ahead = moved(player, move)
                following = [(back, boxes)]
                if ahead in boxes:
                    following.append((back, (boxes - {ahead}) | {player}))
                for pulls, one in enumerate(following):
                    if one not in found:
                        found[one] = found[position] + pulls
                        waiting.append(one)
        return found
