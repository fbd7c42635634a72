"""Grids of coloured shapes as pixels, for policies that see images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RENDER_MODES = ("text", "rgb_array")
"""ROLL's names, which are gymnasium's."""
Shape = Literal["none", "disc", "square", "cross"]
Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]


class Sprite:
    """Look of a cell: a ground, and a shape on it.

    Args:
        ground: red, green, blue.
        shape: drawn in ``colour`` over 70% of the cell.
    """

    def __init__(self, ground: Colour, shape: Shape = "none", colour: Colour = (0, 0, 0)) -> None:
        self.ground, self.shape, self.colour = ground, shape, colour

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


def grid_picture(codes: Sequence[Sequence[int]], sprites: Mapping[int, Sprite], cell: int) -> Pixels:
    """The grid ``codes`` (rows, columns) as uint8 pixels (rows * cell, columns * cell, 3)."""
    drawn = {code: sprite.pixels(cell) for code, sprite in sprites.items()}
    return np.concatenate([np.concatenate([drawn[code] for code in row], axis=1) for row in codes])


def check_rendering(name: str, render_mode: str, cell_pixels: int) -> None:
    """Raise ValueError for options that an environment cannot be drawn with."""
    if render_mode not in RENDER_MODES:
        raise ValueError(f"render_mode of {name} must be {' or '.join(RENDER_MODES)}, got {render_mode!r}")
    if not 4 <= cell_pixels <= 256:
        raise ValueError(f"cell_pixels of {name} must lie in 4..256, got {cell_pixels}")
