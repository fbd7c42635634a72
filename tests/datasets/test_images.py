"""Rows with images: what is read, where it stands in the prompt, what is refused, and what is counted."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from roll.config.roles import DataArguments
from roll.datasets import DataError, PromptDataset, SftDataset
from roll.datasets.images import ImageReader
from roll.datasets.preferences import JudgedColumns, JudgedDataset
from roll.datasets.reading import SourceRow
from roll.datasets.sft import spans_of
from roll.datasets.vision_model import VisionModel, load_processing
from roll.protocol.images import EncodedImage, ImageError, ImageProcessing
from roll.protocol.vision import vision_inputs
from tests import vision_models
from tests.datasets.conftest import Write, rows_of

QUESTION = "How many shapes are there?"
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.save(tmp_path_factory.mktemp("vl") / "model", "qwen3_vl")


@pytest.fixture(scope="module")
def words() -> Any:
    return vision_models.tokenizer()


@pytest.fixture(scope="module")
def vision(folder: Path, words: Any) -> VisionModel:
    found = VisionModel.load(str(folder), words, trust_remote_code=False)
    assert found is not None
    return found


def png(seed: int = 0, size: tuple[int, int] = (48, 48)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def build(words: Any, files: str, vision: VisionModel | None, prompt_length: int = 200, **options: Any) -> Any:
    data_args = DataArguments(file_name=files, **options)
    return PromptDataset.build(data_args, words, prompt_length, {"shapes": None}, vision=vision)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_the_settings_are_those_of_the_model(vision: VisionModel, folder: Path, words: Any) -> None:
    assert vision.processing == vision_models.PROCESSING
    assert vision.placeholder == f"{START}{PAD}{END}"
    (folder.parent / "text").mkdir()
    (folder.parent / "text" / "config.json").write_text('{"model_type": "qwen2"}')
    assert VisionModel.load(str(folder.parent / "text"), words, trust_remote_code=False) is None
    limited = ImageReader.of(DataArguments(file_name="x", image_max_pixels=1024), vision)
    assert limited.model is not None
    assert limited.model.processing == replace(vision.processing, max_pixels=1024)


def test_patches_are_those_of_transformers(vision: VisionModel) -> None:
    """Bit for bit, from any file: resized up, resized down, untouched; grey and transparent images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    ours, half = vision.processing, [0.5] * 3
    limits = {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels}
    theirs = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=limits, image_mean=half, image_std=half)
    for seed, size in enumerate([(48, 48), (200, 31), (7, 9), (150, 120)]):
        image = EncodedImage.of(png(seed, size))
        expected = theirs(images=[image.decode()], return_tensors="pt")
        found = vision_inputs([image], ours)
        assert torch.equal(found.pixel_values(), expected["pixel_values"])
        assert found.grids().tolist() == expected["image_grid_thw"].tolist()
        assert found.pixel_values().shape == (found.grid_thw.prod(-1).sum(), ours.patch_dim)
        (resized,) = found.resized_images()
        again = theirs(images=[resized], return_tensors="pt")["pixel_values"]
        assert torch.equal(again, expected["pixel_values"])  # an engine's own processor has nothing left to resize
    for processing, size in product((ImageProcessing(), ours), [(48, 48), (333, 97), (5, 5), (1000, 10), (64, 4000)]):
        factor = processing.patch_size * processing.merge_size
        expected = smart_resize(*size, factor, processing.min_pixels, processing.max_pixels)
        assert processing.resized(*size) == expected, size


def test_every_form_of_an_image(words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel) -> None:
    """Bytes, what `datasets` writes, paths, data URIs; one or a list; marked or not; inside messages or not."""
    data = png()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(data)
    (tmp_path / "b.png").write_bytes(data)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    part = {"type": "image"}
    content: list[dict[str, Any]] = [part, {"type": "text", "text": QUESTION}]
    own: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": uri}}, content[1]]
    marked = f"<image>{QUESTION}"
    rows: list[dict[str, Any]] = [
        *({"prompt": marked, "images": images} for images in (["a.png"], "b.png", [str(tmp_path / "b.png")])),
        {"prompt": QUESTION, "image": uri},
        {"prompt": [{"role": "user", "content": content}], "images": [uri]},
        {"prompt": [{"role": "user", "content": own}]},
    ]
    prompts = []
    for number, row in enumerate(rows):
        files = write_jsonl([row], f"{number}.jsonl")
        prompts += build(words, files, vision, image_folder=str(tmp_path / "folder"))
    prompts += build(words, parquet(tmp_path / "bytes.parquet", [{"prompt": marked, "images": [data]}]), vision)
    as_struct = {"prompt": marked, "images": [{"bytes": data, "path": None}]}
    prompts += build(words, parquet(tmp_path / "struct.parquet", [as_struct]), vision)
    text = f"<|im_start|>user\n{START}{PAD * 9}{END}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    expected = words(text)["input_ids"]
    for prompt in prompts:
        assert prompt.token_ids == expected
        assert prompt.vision.num_tokens == [9]
        assert prompt.vision.images[0].data.tobytes() == data
    reader = ImageReader(vision)
    image = Image.open(io.BytesIO(data))
    assert reader.encoded(SourceRow(Path("x"), 1, {}), image, 0).decode().tobytes() == image.tobytes()


def test_where_images_stand(words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel) -> None:
    for number, size in enumerate([(48, 48), (32, 64)]):
        (tmp_path / f"{number}.png").write_bytes(png(number, size))
    rows = [
        {"prompt": "first <image> then <image> which?", "images": ["0.png", "1.png"]},
        {"prompt": "text only"},
        {"prompt": "also", "images": ["0.png"], "image_flag": False},
    ]
    two, text, flagged = build(words, write_jsonl(rows), vision)
    assert two.prompt_text.split("user\n")[1].startswith(f"first {START}{PAD}{END} then {START}{PAD}{END} which?")
    image = words.convert_tokens_to_ids(PAD)
    runs = words.decode(two.token_ids).split(START)
    assert [one.count(PAD) for one in runs[1:]] == [9, 8] == two.vision.num_tokens
    assert text.vision is flagged.vision is None
    assert image not in [*text.token_ids, *flagged.token_ids]
    assert two.vision.grid_thw.tolist() == [[1, 6, 6], [1, 8, 4]]


@pytest.mark.parametrize(("row", "message"), rows_of("bad_rows", "images"))
def test_an_unreadable_image_is_a_counted_bad_row(
    row: dict[str, Any], message: str, words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel
) -> None:
    (tmp_path / "ok.png").write_bytes(png())
    (tmp_path / "cut.png").write_bytes(png(size=(90, 90))[:-3000])
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "strip.png").write_bytes(png(size=(402, 2)))
    files = write_jsonl([row, {"prompt": "<image>y", "images": ["ok.png"]}])
    with pytest.raises(DataError, match=message):
        build(words, files, vision)
    kept = build(words, files, vision, on_bad_row="skip")
    assert len(kept) == 1
    assert kept.counts.bad == 1


def test_too_long_prompts_are_counted_and_never_cut_inside_an_image(
    words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "large.png").write_bytes(png(size=(400, 400)))
    rows = [{"prompt": "<image>x", "images": [name]} for name in ("a.png", "large.png")]
    for options in ({}, {"filter_overlong_prompts": False, "truncation": "left"}):
        kept = build(words, write_jsonl(rows), vision, prompt_length=30, **options)
        assert (len(kept), kept.counts.too_long) == (1, {"shapes": 1})
    shrunk = build(words, write_jsonl(rows), vision, prompt_length=30, image_max_pixels=48 * 48)
    assert [prompt.vision.num_tokens for prompt in shrunk] == [[9], [9]]


def test_rows_from_the_cache_have_their_images(
    words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(png())
    files = write_jsonl([{"prompt": "<image>x", "images": ["a.png"]}])
    options = {"use_cache": True}
    first, again = (build(words, files, vision, **options)[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert torch.equal(first.vision.pixel_values(), again.vision.pixel_values())
    (tmp_path / "a.png").write_bytes(png(size=(90, 90)))
    with pytest.raises(DataError, match="have changed since it was prepared"):
        build(words, files, vision, **options)[0]
    limited = build(words, files, vision, **options, image_max_pixels=48 * 48)[0]  # another entry
    assert limited.vision.num_tokens == [9]


@pytest.mark.parametrize("train_on", ["last", "assistant"])
def test_demonstrations_with_images(
    words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel, train_on: Any
) -> None:
    """An image widens the row in front of the turns that carry the loss, which stay exactly theirs."""
    for name, size in (("a.png", (48, 48)), ("b.png", (96, 48))):
        (tmp_path / name).write_bytes(png(size=size))
    turns = [("user", "<image>x"), ("assistant", "b"), ("user", "and <image> y"), ("assistant", "#### 12")]
    messages = [dict(zip(("role", "content"), turn, strict=True)) for turn in turns]
    plain = [messages[0] | {"content": "x"}, messages[1]]
    rows = [{"messages": messages, "images": ["a.png", "b.png"]}, {"messages": plain}]
    data_args = DataArguments(file_name=write_jsonl(rows), messages="messages")
    seen, text = SftDataset.build(data_args, words, 200, vision=vision, train_on=train_on)
    assert seen.vision is not None and len(set(seen.vision.num_tokens)) == 2 and text.vision is None
    pad = words.convert_tokens_to_ids(PAD)
    assert seen.input_ids.count(pad) == sum(seen.vision.num_tokens)
    learned = words.decode([token for token, flag in zip(seen.input_ids, seen.response_mask, strict=True) if flag])
    assert learned.split("<|im_end|>")[:-1] == (["b", "#### 12"] if train_on == "assistant" else ["#### 12"])
    assert train_on == "last" or seen.spans == spans_of(seen.response_mask)
    assert not any(flag for flag, token in zip(seen.response_mask, seen.input_ids, strict=True) if token == pad)
    spelt = DataArguments(file_name=write_jsonl([{"prompt": "x", "solution": f"{PAD} y"}]))
    with pytest.raises(DataError, match="the text spells a placeholder itself"):
        SftDataset.build(spelt, words, 100, vision=vision)


def test_images_of_a_program_laid_on_white_and_refused(
    words: Any, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, row = np.zeros((48, 48, 3), np.uint8), SourceRow(Path("env"), 1, {})
    assert ImageReader(None).encoded(row, pixels, 0).decode().tobytes() == pixels.tobytes()
    file = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(file, "PNG")
    assert EncodedImage.of(file.getvalue()).decode().getpixel((0, 0)) == (255, 255, 255), "it lies on white"
    with pytest.raises(DataError, match="expected bytes or a path, found ndarray"):
        ImageReader(None).encoded(row, pixels[0], 0)
    with pytest.raises(DataError, match="the model sees none"):
        build(words, write_jsonl([{"prompt": "<image>x", "images": ["a.png"]}]), None)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="40 x 40 pixels are more than the limit of 1000"):
        EncodedImage.of(png(size=(40, 40))).decode()
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(DataError, match="CLIPImageProcessor"):
        load_processing(str(tmp_path))


@pytest.mark.parametrize("score_input", ["tokens", "chat"])
def test_judged_responses_to_images(
    words: Any, write_jsonl: Write, tmp_path: Path, vision: VisionModel, score_input: Any
) -> None:
    """Both responses follow the same images, which a set from the cache has too; a cut never goes through one."""
    (tmp_path / "a.png").write_bytes(png())
    sides = [[{"role": "user", "content": "<image>x"}, {"role": "assistant", "content": text}] for text in "by"]
    rows = [
        {"id": "column", "prompt": "x", "images": ["a.png"], "chosen": "b #### 1", "rejected": "y"},
        {"id": "sides", "images": ["a.png"], "chosen": sides[0], "rejected": sides[1]},
        {"id": "text", "prompt": "x", "chosen": "b", "rejected": "y"},
        {"id": "spelt", "prompt": "x", "chosen": f"b{PAD}", "rejected": "y"},
    ]

    def judged(data_args: DataArguments, limit: int) -> JudgedDataset:
        options = {"score_input": score_input, "vision": vision}
        return JudgedDataset.build(data_args, words, limit, JudgedColumns(), "pairs", **options)

    for kept, number in ((rows[:1], 1), (rows[1:2], 1), (rows[::2], 2), ([rows[0], rows[3]], 1)):
        for _ in range(2):
            options = {"on_bad_row": "skip", "filter_overlong_prompts": False}
            data_args = DataArguments(file_name=write_jsonl(kept), truncation="left", **options)
            built = judged(data_args, 100)
            assert len(built) == number
            seen = built[0]
            assert seen.vision is not None and seen.vision.num_tokens == [9]
            assert [side.count(words.convert_tokens_to_ids(PAD)) for side in seen.sides] == [9, 9]
            assert seen.prompt_ids.count(words.convert_tokens_to_ids(PAD)) == 9
            assert number == 1 or built[1].vision is None
    with pytest.raises(DataError, match="none of 1 pairs fits"):
        data_args = DataArguments(file_name=write_jsonl(rows[:1]), truncation="left", filter_overlong_prompts=False)
        judged(data_args, 16)
