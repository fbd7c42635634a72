"""Games on a grid: the action in a model's text, and the grid as text or as coloured shapes."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

MOVES: dict[str, tuple[int, int]] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Name of a move to its change of row and column."""

_BY_NAME = {name.lower(): name for name in MOVES}


@dataclass(frozen=True)
class ActionPattern:
    """Place of the action in a response.

    ``pattern`` has one group (the action) or two (thought and action); the first match counts, the dot matches line
    breaks. None: the whole response, stripped.
    """

    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"action_pattern {self.pattern!r} is not a regular expression: {error}") from None
        if groups not in (1, 2):
            raise ValueError(
                f"action_pattern {self.pattern!r} has {groups} groups; it needs one (the action), as in "
                "'<answer>(.*?)</answer>', or two (thought and action)"
            )

    def find(self, text: str) -> str | None:
        """The action in ``text``, stripped; None where the pattern does not match."""
        if self.pattern is None:
            return text.strip()
        match = re.search(self.pattern, text, re.DOTALL)
        return None if match is None else match.group(match.re.groups).strip()


def moved(position: tuple[int, int], move: str) -> tuple[int, int]:
    """The cell next to ``position`` in the direction of ``move``."""
    change = MOVES[move]
    return position[0] + change[0], position[1] + change[1]


RENDER_MODES = ("text", "rgb_array")  # ROLL's names, which are gymnasium's
Shape = Literal["none", "disc", "square", "cross"]
Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]
Cell = tuple[int, int]


@dataclass(frozen=True)
class Sprite:
    """Look of a cell: a ground, and a shape in ``colour`` over 70% of it."""

    ground: Colour
    shape: Shape = "none"
    colour: Colour = (0, 0, 0)

    def pixels(self, size: int) -> Pixels:
        """uint8 (size, size, 3)."""
        place = (np.arange(size) + 0.5) / size - 0.5
        rows, columns = np.meshgrid(place, place, indexing="ij")
        inside = np.maximum(abs(rows), abs(columns)) < 0.35
        drawn = {
            "none": np.zeros_like(inside),
            "disc": rows**2 + columns**2 < 0.35**2,
            "square": inside,
            "cross": inside & (abs(abs(rows) - abs(columns)) < 0.12),
        }[self.shape]
        cell = np.empty((size, size, 3), dtype=np.uint8)
        cell[:] = self.ground
        cell[drawn] = self.colour
        return cell


@dataclass(kw_only=True)
class GridGame(ABC):
    """Options and rendering that games on a grid share; a game adds ``grid_lookup``, the symbols of cells by code."""

    instant: ClassVar[bool] = True
    name: ClassVar[str]
    sprites: ClassVar[Mapping[int, Sprite]]  # look of a cell by its code; the codes are 0, 1, ...
    gap: ClassVar[str] = ""  # text in front of every symbol
    max_steps: int = 10
    format_penalty: float = 0.0  # added to the reward of a step without a legal action
    action_pattern: str | None = None  # regular expression that finds the action in a response, see `ActionPattern`
    show_instruction: bool = True  # put the rules of the game before the first observation
    render_mode: str = "text"  # `rgb_array`: observations are pictures, for policies that see images
    cell_pixels: int = 32  # side of a cell of a picture

    def _check_options(self, symbols: Mapping[int | str, str]) -> None:
        """Raise ``ValueError`` for options that the game cannot be rendered with."""
        if self.render_mode not in RENDER_MODES:
            modes = " or ".join(RENDER_MODES)
            raise ValueError(f"render_mode of {self.name} must be {modes}, got {self.render_mode!r}")
        if not 4 <= self.cell_pixels <= 256:
            raise ValueError(f"cell_pixels of {self.name} must lie in 4..256, got {self.cell_pixels}")
        self._pattern = ActionPattern(self.action_pattern)
        self._symbols = {int(code): symbol for code, symbol in symbols.items()}
        if set(self._symbols) != set(self.sprites):
            codes = f"0 to {max(self.sprites)}"
            raise ValueError(f"grid_lookup of {self.name} needs the codes {codes}, got {sorted(self._symbols)}")

    @abstractmethod
    def _draw(self, rng: random.Random) -> None:
        """Begin a game."""

    @abstractmethod
    def _rules(self) -> str:
        """The text in front of the first observation."""

    @abstractmethod
    def _moved(self, move: str | None) -> tuple[float, bool, bool, bool]:
        """Make a move (None: no legal action); its reward, and whether the game is won, is over, and has changed."""

    def reset(self, seed: int) -> tuple[str | list[Any], dict[str, Any]]:
        # Seeded by a text, so that two games with the same seed do not draw the same numbers.
        self._draw(random.Random(f"{self.name}/{seed}"))
        self._steps = 0
        text, rules = self.render(), f"{self._rules()}\n"
        return self._observation(text, rules if self.show_instruction else ""), {"state": text, "instruction": rules}

    def step(self, action: str) -> tuple[str | list[Any], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        move = _BY_NAME.get((self._pattern.find(action) or "").lower())
        reward, success, is_over, changed = self._moved(move)
        reward += self.format_penalty if move is None else 0.0
        state, metrics = self.render(), {"valid": float(move is not None), "effective": float(changed)}
        info = {"success": success, "valid": move is not None, "state": state, "metrics": metrics}
        return self._observation(state), reward, is_over, not is_over and self._steps >= self.max_steps, info

    @abstractmethod
    def codes(self) -> list[list[int]]:
        """The codes of all cells, row by row."""

    def render(self) -> str:
        """The grid as one line per row."""
        return "\n".join("".join(self.gap + self._symbols[code] for code in row) for row in self.codes())

    def picture(self) -> Pixels:
        """The grid as uint8 pixels (rows * cell_pixels, columns * cell_pixels, 3)."""
        drawn = {code: sprite.pixels(self.cell_pixels) for code, sprite in self.sprites.items()}
        return np.concatenate([np.concatenate([drawn[code] for code in row], axis=1) for row in self.codes()])

    def sample_action(self, rng: random.Random) -> str:
        return rng.choice(list(MOVES))

    def _observation(self, text: str, *rules: str) -> str | list[Any]:
        """The grid as the policy sees it, after ``rules``; ``text``: :meth:`render`."""
        return "".join(rules) + text if self.render_mode == "text" else [*rules, self.picture()]
