"""The tiny vision-language example: its files are what its pages say, and its task cannot be learnt without seeing."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from roll.cli import main
from roll.protocol.images import EncodedImage
from roll.protocol.vision import VisionInputs, token_types, vision_inputs, vision_token_ids
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import create_decoder
from tests import vision_models
from tests.strategies.hf_infer.helpers import run
from tests.vision_models import shapes, tiny_vl_model

ROOT = Path(__file__).parents[2]
STEPS, ROWS, PICTURES = 200, 32, 2000


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


@pytest.mark.long
def test_blind_models_learn_less() -> None:
    """Imitation of right answers, with the pictures and with a grey one in place of each."""
    seeing, blind = (greedy_accuracy(train(grey), grey) for grey in (False, True))
    assert blind < 0.35, "always saying 1 is right in three of ten"
    assert seeing > blind + 0.1, (seeing, blind)


def grey() -> EncodedImage:
    file = io.BytesIO()
    Image.new("RGB", (48, 48), (128, 128, 128)).save(file, "PNG")
    return EncodedImage.of(file.getvalue())


def prompts(tokenizer: Any, pictures: list[Any], is_blind: bool) -> list[tuple[list[int], VisionInputs]]:
    """Token ids and images."""
    made = []
    for one in pictures:
        image = grey() if is_blind else EncodedImage.of(one.png())
        vision = vision_inputs([image], vision_models.PROCESSING, whole=False)
        pads = tiny_vl_model.IMAGE * 9
        text = (
            f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{one.question}<|im_end|>\n<|im_start|>assistant\n"
        )
        made.append((tokenizer(text)["input_ids"], vision))
    return made


def train(is_blind: bool) -> tuple[Any, Any]:
    tokenizer = vision_models.tokenizer()
    model = tiny_vl_model.make_model(tokenizer, 0).train()
    pictures = shapes.draw_pictures(PICTURES, 1)
    rows = prompts(tokenizer, pictures, is_blind)
    answers = [tokenizer(one.solution())["input_ids"] + [tokenizer.eos_token_id] for one in pictures]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    rng = random.Random(0)
    for _ in range(STEPS):
        chosen = [rng.randrange(PICTURES) for _ in range(ROWS)]
        length = max(len(rows[i][0]) + len(answers[i]) for i in chosen)
        ids = torch.full((ROWS, length), tokenizer.pad_token_id)
        labels = torch.full((ROWS, length), -100)
        for row, i in enumerate(chosen):
            start, end = len(rows[i][0]), len(rows[i][0]) + len(answers[i])
            ids[row, :end] = torch.tensor([*rows[i][0], *answers[i]])
            labels[row, start:end] = ids[row, start:end]
        model(
            input_ids=ids,
            attention_mask=(ids != tokenizer.pad_token_id).long(),
            pixel_values=torch.cat([rows[i][1].pixel_values() for i in chosen]),
            image_grid_thw=torch.cat([rows[i][1].grids() for i in chosen]),
            mm_token_type_ids=token_types(ids, model.config),
            labels=labels,
        ).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def greedy_accuracy(trained: tuple[Any, Any], is_blind: bool) -> float:
    model, tokenizer = trained
    pictures = shapes.draw_pictures(200, 999)
    engine = GenerationEngine(create_decoder(model, 96), str, (tokenizer.eos_token_id,), 64, 96)
    params = SamplingParams(16, temperature=0.0)
    requests = [
        GenerationRequest(str(i), ids, params, vision=vision)
        for i, (ids, vision) in enumerate(prompts(tokenizer, pictures, is_blind))
    ]
    outputs = run(engine, requests)
    answers = [tokenizer.decode(outputs[str(i), 0].token_ids, skip_special_tokens=True) for i in range(len(pictures))]
    assert not set(vision_token_ids(model.config)) & {t for one in outputs.values() for t in one.token_ids}
    return sum(text.split("#### ")[-1] == str(one.answer) for text, one in zip(answers, pictures, strict=True)) / 200
