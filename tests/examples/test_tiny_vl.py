"""The tiny vision-language example: its files are what its pages say, and its answers what the pictures show."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from roll.cli import main
from tests import vision_models
from tests.vision_models import shapes

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_recipes_read_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "examples/tiny_vl/make_shapes.py"
    folder = tmp_path / "examples/tiny_vl/artifacts"
    subprocess.run([sys.executable, script, "--output", folder], check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "data/val.jsonl").open()]
    assert len(rows) == 200
    assert Image.open(folder / "data" / rows[0]["images"][0]).size == (48, 48)
    (folder / "seed0/warm_start").mkdir()
    (folder / "seed0/warm_start/model").symlink_to(folder / "seed0/init")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, script.with_name("make_clips.py"), "--output", folder], check=True)
    rows = [json.loads(line) for line in (folder / "clips/val.jsonl").open()]
    assert len(rows) == 200
    assert [Image.open(folder / "clips" / name).size for name in rows[0]["videos"][0]["video"]] == [(48, 48)] * 4
    (folder / "seed0/clips_warm_start").mkdir()
    (folder / "seed0/clips_warm_start/model").symlink_to(folder / "seed0/init")
    for name in ("sft_config", "rlvr_config", "clips_sft_config", "clips_config"):
        assert main(["check", str(ROOT / f"examples/tiny_vl/{name}.yaml")]) == 0


def test_answers_are_what_the_pictures_show() -> None:
    for one in shapes.draw_pictures(200, 5):
        image = Image.open(io.BytesIO(one.png()))
        wanted = [seen for seen in one.shapes if one.is_asked_for(seen)]
        assert one.solution().endswith(f"#### {len(wanted)}")
        for seen in one.shapes:
            left, top = seen.place % 3 * 16, seen.place // 3 * 16
            colours = image.crop((left, top, left + 16, top + 16)).getcolors()
            assert shapes.COLOURS[seen.colour] in [colour for _, colour in colours]
    flawed = shapes.draw_picture(random.Random(0))
    assert flawed.demonstration(random.Random(0), 0.0) == flawed.solution()


def test_clips_move_as_their_answers_say() -> None:
    """Each pixel of the shape that is asked for is 8 pixels further in the next frame."""
    step = {"left": (0, -8), "right": (0, 8), "up": (-8, 0), "down": (8, 0)}
    clips, compared = vision_models.draw_clips(200, 5), 0
    for one in clips:
        colour = next(name for name in shapes.COLOURS if f" {name} " in one.question)
        seen = [(np.asarray(Image.open(io.BytesIO(frame))) == shapes.COLOURS[colour]).all(-1) for frame in one.frames()]
        for now, then in pairwise(seen):
            if now.sum() == then.sum() == 64:  # the other shape covers no part of it
                assert (np.roll(now, step[one.answer], axis=(0, 1)) == then).all()
                compared += 1
    assert compared > 300
    assert min(Counter(one.answer for one in clips).values()) > 30
    slips = random.Random(0)
    assert clips[0].demonstration(slips, 0.0) == clips[0].solution() != clips[0].demonstration(slips, 1.0)
