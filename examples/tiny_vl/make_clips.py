"""Make what the tiny video example needs: clips of moving shapes with questions, and faulty demonstrations.

    python examples/tiny_vl/make_clips.py --output examples/tiny_vl/artifacts

writes ``clips/train.parquet`` and ``clips/sft.parquet`` (frames as bytes) and ``clips/val.jsonl`` (frames as files in
``clips/frames``). The model is the one of :mod:`make_shapes`. What is there, made by the same recipe, is kept.

A clip has four frames of 48 x 48 pixels in a second, which are two grids of image tokens. Two squares of different
colours move from one cell of the 3 x 3 grid to the next, and what leaves at an edge comes in at the other. An answer
names the two cells of the square that is asked for, then its direction: ``b c #### right``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from make_shapes import DEFAULT_OUTPUT, RECIPE_FILE, is_current, write_parquet
from PIL import Image, ImageDraw
from shapes import BACKGROUND, CELL, COLOURS, GRID

logger = logging.getLogger("make_clips")

TAG = "tiny_clips"
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SIDE, FRAMES, FPS = GRID * CELL, 4, 4.0
SIZE = SPEED = CELL // 2
"""Of a square, in pixels and pixels a frame."""
TRAIN_CLIPS, TRAIN_SEED = 4000, 11
VALIDATION_CLIPS, VALIDATION_SEED = 200, 1999
DEMONSTRATIONS_PER_CLIP, DEMONSTRATION_SEED = 8, 12
SLIP_PROBABILITY = 0.4
"""Of a demonstration's direction."""


@dataclass(frozen=True)
class Mover:
    """A square that moves evenly: two frames in a cell, two in the next."""

    colour: str
    direction: str
    column: int
    row: int
    jitter: int
    """In pixels, across its way."""

    def place(self, frame: int) -> tuple[int, int]:
        """Left and top."""
        step = DIRECTIONS[self.direction]
        start = [
            CELL * cell + (self.jitter if way == 0 else 0 if way > 0 else SPEED)
            for cell, way in zip((self.column, self.row), step, strict=True)
        ]
        return (start[0] + frame * SPEED * step[0]) % SIDE, (start[1] + frame * SPEED * step[1]) % SIDE

    def cell(self, frame: int) -> str:
        left, top = self.place(frame)
        return "abcdefghi"[(top + SIZE // 2) // CELL % GRID * GRID + (left + SIZE // 2) // CELL % GRID]


@dataclass(frozen=True)
class Clip:
    """A question about movement."""

    movers: tuple[Mover, Mover]
    asked: int

    @property
    def question(self) -> str:
        return f"Which way does the {self.movers[self.asked].colour} shape move?"

    @property
    def answer(self) -> str:
        return self.movers[self.asked].direction

    def solution(self, direction: str | None = None) -> str:
        """The cells in the first and the last frame, and the direction or another one."""
        mover = self.movers[self.asked]
        return f"{mover.cell(0)} {mover.cell(FRAMES - 1)} #### {direction or self.answer}"

    def demonstration(self, rng: random.Random, slip: float) -> str:
        """A solution, with probability ``slip`` to another direction."""
        wrong = [way for way in DIRECTIONS if way != self.answer]
        return self.solution(rng.choice(wrong) if rng.random() < slip else None)

    def frames(self) -> list[bytes]:
        """The frames as encoded images."""
        return [self.frame(number) for number in range(FRAMES)]

    def frame(self, number: int) -> bytes:
        image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
        draw = ImageDraw.Draw(image)
        for mover in self.movers:
            left, top = mover.place(number)
            for x in (left, left - SIDE):  # what leaves at an edge comes in at the other
                for y in (top, top - SIDE):
                    draw.rectangle([x, y, x + SIZE - 1, y + SIZE - 1], fill=COLOURS[mover.colour])
        file = BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def draw_clip(rng: random.Random) -> Clip:
    """Two squares anywhere: no single frame says which way they move."""
    first, second = (
        Mover(colour, rng.choice(list(DIRECTIONS)), rng.randrange(GRID), rng.randrange(GRID), rng.randrange(SIZE + 1))
        for colour in rng.sample(list(COLOURS), 2)
    )
    return Clip((first, second), rng.randrange(2))


def draw_clips(count: int, seed: int) -> list[Clip]:
    rng = random.Random(seed)
    return [draw_clip(rng) for _ in range(count)]


def make(output: Path) -> Path:
    """Make what is missing or was made by another recipe in ``output/clips``."""
    folder = output / "clips"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if not is_current(folder, recipe):
        write_data(folder)
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        logger.info("wrote clips and demonstrations to %s", folder)
    return folder


def write_data(folder: Path) -> None:
    (folder / "frames").mkdir(parents=True, exist_ok=True)
    rng = random.Random(DEMONSTRATION_SEED)
    clips = draw_clips(TRAIN_CLIPS, TRAIN_SEED)
    rows = [prompt_row(f"train-{number}", clip, clip.frames()) for number, clip in enumerate(clips)]
    write_parquet(folder / "train.parquet", rows)
    demonstrations = [
        row | {"id": f"demo-{turn}-{number}", "response": clip.demonstration(rng, SLIP_PROBABILITY)}
        for turn in range(DEMONSTRATIONS_PER_CLIP)
        for number, (row, clip) in enumerate(zip(rows, clips, strict=True))
    ]
    write_parquet(folder / "sft.parquet", demonstrations)
    with (folder / "val.jsonl").open("w", encoding="utf-8") as file:
        for number, clip in enumerate(draw_clips(VALIDATION_CLIPS, VALIDATION_SEED)):
            names = [f"frames/val-{number}-{frame}.png" for frame in range(FRAMES)]
            for name, frame in zip(names, clip.frames(), strict=True):
                (folder / name).write_bytes(frame)
            file.write(json.dumps(prompt_row(f"val-{number}", clip, names)) + "\n")


def prompt_row(row_id: str, clip: Clip, frames: Sequence[bytes | str]) -> dict[str, Any]:
    return {
        "id": row_id,
        "tag": TAG,
        "prompt": f"<video>{clip.question}",
        "videos": [{"video": list(frames), "fps": FPS}],
        "ground_truth": clip.answer,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(options.output)


if __name__ == "__main__":
    main()
