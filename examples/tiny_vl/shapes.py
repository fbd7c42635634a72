"""Coloured shapes on a 3 x 3 grid, and how many there are of a kind.

A picture has 48 x 48 pixels: a cell of the grid is one image token of the tiny model. Cells are named a to i in reading
order. An answer lists the cells of the shapes that are asked for, then their number: ``b f #### 2``.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "circle", "cross")
PLURALS = {"square": "squares", "circle": "circles", "cross": "crosses"}
GRID, CELL, MOST = 3, 16, 6
BACKGROUND = (245, 245, 245)


@dataclass(frozen=True)
class Shape:
    """One shape."""

    place: int
    """In reading order, counted from 0."""
    colour: str
    shape: str

    @property
    def cell(self) -> str:
        return "abcdefghi"[self.place]


@dataclass(frozen=True)
class Picture:
    """A question about a scene."""

    shapes: tuple[Shape, ...]
    """In reading order."""
    jitter: tuple[int, ...]
    """Of each shape, in pixels."""
    colour: str | None
    """Only shapes of this colour are asked for."""
    shape: str | None
    """Only shapes of this form are asked for."""

    @property
    def question(self) -> str:
        if self.colour is not None:
            return f"How many {self.colour} shapes are there?"
        if self.shape is not None:
            return f"How many {PLURALS[self.shape]} are there?"
        return "How many shapes are there?"

    def is_asked_for(self, one: Shape) -> bool:
        return self.colour in (None, one.colour) and self.shape in (None, one.shape)

    @property
    def answer(self) -> int:
        return sum(map(self.is_asked_for, self.shapes))

    def solution(self) -> str:
        return answer_text([one for one in self.shapes if self.is_asked_for(one)])

    def demonstration(self, rng: random.Random, slip: float) -> str:
        """A solution in which each shape is judged wrongly with probability ``slip``."""
        return answer_text([one for one in self.shapes if self.is_asked_for(one) != (rng.random() < slip)])

    def png(self) -> bytes:
        """The scene as an encoded image."""
        image = Image.new("RGB", (GRID * CELL, GRID * CELL), BACKGROUND)
        draw = ImageDraw.Draw(image)
        for one, shift in zip(self.shapes, self.jitter, strict=True):
            left, top = one.place % GRID * CELL + 3 + shift, one.place // GRID * CELL + 3 + shift
            right, bottom = left + CELL - 7, top + CELL - 7
            colour = COLOURS[one.colour]
            if one.shape == "square":
                draw.rectangle([left, top, right, bottom], fill=colour)
            elif one.shape == "circle":
                draw.ellipse([left, top, right, bottom], fill=colour)
            else:
                draw.line([left, top, right, bottom], fill=colour, width=3)
                draw.line([left, bottom, right, top], fill=colour, width=3)
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def answer_text(shapes: list[Shape]) -> str:
    return " ".join([*(one.cell for one in shapes), "####", str(len(shapes))])


def draw_picture(rng: random.Random) -> Picture:
    """A scene of one to six shapes, and what is asked about it."""
    cells = sorted(rng.sample(range(GRID * GRID), rng.randint(1, MOST)))
    shapes = tuple(Shape(cell, rng.choice(list(COLOURS)), rng.choice(SHAPES)) for cell in cells)
    jitter = tuple(rng.randint(-1, 1) for _ in cells)
    kind = rng.choice(("colour", "shape", "all"))
    colour = rng.choice(list(COLOURS)) if kind == "colour" else None
    shape = rng.choice(SHAPES) if kind == "shape" else None
    return Picture(shapes, jitter, colour, shape)


def draw_pictures(count: int, seed: int) -> list[Picture]:
    rng = random.Random(seed)
    return [draw_picture(rng) for _ in range(count)]
