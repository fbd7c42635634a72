"""Rows with videos: what is read, where it stands in the prompt, which frames are taken, and the patches of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from roll.config.roles import DataArguments, ModelArguments, StrategyArguments, WorkerConfig
from roll.datasets import DataError, PromptDataset, SftDataset
from roll.datasets.images import ImageReader
from roll.datasets.store import from_json, to_json
from roll.datasets.vision_model import VisionModel, load_video_processing
from roll.pipelines.rlvr.data import seen_by_engine
from roll.protocol.images import EncodedImage, EngineTime, VideoProcessing
from roll.protocol.vision import _PATCHES, VisionInputs, vision_inputs
from tests import vision_models
from tests.datasets.conftest import Write

START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
KINDS = ("qwen2_5_vl", "qwen3_vl")
TORCHVISION = os.environ.get("ROLL_TORCHVISION") or str(Path(sys.prefix) / "roll-torchvision")
FRAMES = vision_models.frames(3, 9)


@pytest.fixture(scope="module")
def words() -> Any:
    return vision_models.tokenizer()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, words: Any) -> dict[str, VisionModel]:
    found = {}
    for kind in KINDS:
        folder = vision_models.save(tmp_path_factory.mktemp("vl") / kind, kind)  # type: ignore[arg-type]
        loaded = VisionModel.load(str(folder), words, trust_remote_code=False)
        assert loaded is not None
        found[kind] = loaded
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With ``frame-0.png`` ... of 48 x 48 pixels."""
    for number, frame in enumerate(FRAMES):
        (tmp_path / f"frame-{number}.png").write_bytes(frame.data.tobytes())
    return tmp_path


def names(count: int) -> list[str]:
    return [f"frame-{number}.png" for number in range(count)]


def build(words: Any, files: str, vision: VisionModel | None, **options: Any) -> Any:
    return PromptDataset.build(DataArguments(file_name=files, **options), words, 400, {"shapes": None}, vision=vision)


@pytest.mark.parametrize("kind", KINDS)
def test_where_videos_stand(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel], kind: str
) -> None:
    """Marked, unmarked, in the column, in a message; next to an image; of a rate of its own; an odd number."""
    text = {"type": "text", "text": "x"}
    rows: list[dict[str, Any]] = [
        {"prompt": "<video>x", "videos": [names(4)]},
        {"prompt": "x", "videos": [names(4)]},
        {"prompt": [{"role": "user", "content": [{"type": "video"}, text]}], "videos": [{"video": names(4)}]},
        {"prompt": [{"role": "user", "content": [{"type": "video", "video": names(4)}, text]}]},
        {"prompt": "<image>a<video>x", "images": ["frame-0.png"], "videos": [{"frames": names(3), "fps": 1}]},
    ]
    files = [write_jsonl([row], f"{number}.jsonl") for number, row in enumerate(rows)]
    *same, mixed = [build(words, file, models[kind])[0] for file in files]
    if kind == "qwen2_5_vl":
        video, later = f"{START}{PAD * 18}{END}", f"{START}{PAD * 18}{END}"
    else:
        grid = f"{START}{PAD * 9}{END}"
        video = f"{START}<0.2 seconds>{grid}<1.2 seconds>{grid}{END}"
        later = f"{START}<0.5 seconds>{grid}<2.0 seconds>{grid}{END}"
    image = f"{START}{'<|image_pad|>' * 9}{END}"
    for prompt in same:
        expected = words(f"<|im_start|>user\n{video}x<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        assert prompt.token_ids == expected
        assert prompt.vision.grid_thw.tolist() == [[2, 6, 6]]
        assert [one.digest for one in prompt.vision.pictures] == [one.digest for one in FRAMES[:4]]
    assert (
        mixed.token_ids == words(f"<|im_start|>user\n{image}a{later}x<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    )
    assert mixed.vision.grid_thw.tolist() == [[1, 6, 6], [2, 6, 6]]
    assert mixed.vision.videos[0].seconds_per_grid(mixed.vision.processing) == 2.0


def test_frames_as_bytes_and_folders_and_settings_that_do_not_fit(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel]
) -> None:
    rows = [{"prompt": "<video>x", "videos": [[{"bytes": frame.data.tobytes(), "path": None} for frame in FRAMES[:4]]]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "bytes.parquet")
    (folder / "data").mkdir()
    files = write_jsonl([{"prompt": "<video>x", "clips": [names(4)]}], "data/paths.jsonl")
    (by_bytes,) = build(words, str(folder / "bytes.parquet"), models["qwen3_vl"])
    (by_path,) = build(words, files, models["qwen3_vl"], video_folder=str(folder), videos="clips")
    assert by_bytes.token_ids == by_path.token_ids
    assert torch.equal(by_bytes.vision.pixel_values(), by_path.vision.pixel_values())
    settings, images = folder / "video_preprocessor_config.json", vision_models.PROCESSING
    settings.write_text('{"image_mean": [0.4, 0.5, 0.5]}')
    with pytest.raises(DataError, match="image_mean of videos is"):
        load_video_processing(str(folder), images, timed=True)
    settings.write_text('{"size": {"shortest_edge": 4096, "longest_edge": 9000}}')
    found = load_video_processing(str(folder), images, timed=True)
    assert (found.min_pixels, found.max_pixels, found.max_frames) == (4096, 9000, 768)


def test_models_and_engines_that_do_not_see_videos(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel]
) -> None:
    rows = write_jsonl([{"prompt": "<video>x", "videos": [names(4)]}])
    with pytest.raises(DataError, match="column 'videos' has 1 videos, and the model sees none"):
        build(words, rows, None)
    blind = replace(models["qwen3_vl"], without_videos="this engine does not generate from videos")
    with pytest.raises(DataError, match="column 'videos': this engine does not generate from videos"):
        build(words, rows, blind)
    (text,) = build(words, write_jsonl([{"prompt": "x"}]), blind)
    assert text.vision is None


def test_an_engine_that_places_videos_differently(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel]
) -> None:
    """Rows are bad ones by what their video needs; the others stay."""
    model = models["qwen2_5_vl"]
    assert model.tokens_per_second == 4.0
    placed = replace(model, engine_time=EngineTime(model.tokens_per_second, "float32"))
    short = {"prompt": "<video>x", "videos": [{"video": names(4), "fps": 8}]}
    long = {"prompt": "<video>x", "videos": [names(4)]}
    message = (
        "row 1: video 1 of column 'videos': its seconds reach to position 4, its 3 rows and 3 columns to 2: the text "
        "behind it is 2 positions further in vllm than in the trainer; take fewer seconds, larger frames "
        r"\(video_min_pixels\), Qwen3-VL, or strategy_name: hf_infer"
    )
    with pytest.raises(DataError, match=message):
        build(words, write_jsonl([long]), placed)
    (kept,) = build(words, write_jsonl([long, short]), placed, on_bad_row="skip")
    assert kept.vision.videos[0].fps == 8
    assert len(build(words, write_jsonl([long]), placed, video_min_pixels=5 * 16 * 5 * 16)) == 1, "larger frames"
    whole = replace(model.video, fps=7.0)
    video = whole.encoded(vision_models.frames(0, 16, (160, 16)), 7.0, model.processing)
    assert EngineTime(4.0, "float32").difference(video, model.processing) is None
    assert EngineTime(4.0, "bfloat16").difference(video, model.processing) == (
        "vllm rounds its 0.2857142984867096 seconds from one grid to the next to bfloat16 (0.28515625), and places its "
        "last grid at position 7; the trainer's is 8"
    )


@pytest.mark.parametrize(
    ("kind", "engine", "most", "time"),
    [
        ("qwen2_5_vl", "hf_infer", {}, None),
        ("qwen2_5_vl", "vllm", {}, EngineTime(4.0, "bfloat16")),
        ("qwen3_vl", "vllm", {}, None),
        ("qwen3_vl", "vllm", {"image": 2, "video": 1}, None),
        ("qwen3_vl", "sglang", {}, None),
    ],
)
def test_what_engines_generate_from(
    models: dict[str, VisionModel], kind: str, engine: str, most: dict[str, int], time: EngineTime | None
) -> None:
    options: dict[str, Any] = {"limit_mm_per_prompt": most} if most else {}
    role = WorkerConfig(
        name="actor_infer", model_args=ModelArguments(dtype="bf16"), strategy_args=StrategyArguments(engine, options)
    )
    seen = seen_by_engine(models[kind], role)
    assert seen.engine_time == time
    assert (seen.most_images, seen.most_videos) == (most.get("image"), most.get("video"))
    assert ("sglang does not generate from videos" in str(seen.without_videos)) == (engine == "sglang")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"most_videos": 0}, r"row 1: 1 videos, and the engine keeps room for 0; limit_mm_per_prompt: \{video: 1\} is"),
        ({"most_images": 1}, r"row 1: 2 images, and the engine keeps room for 1; limit_mm_per_prompt: \{image: 2\} is"),
    ],
)
def test_more_than_an_engine_keeps_room_for(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel], limits: dict[str, int], said: str
) -> None:
    row = {"prompt": "<image><image><video>x", "images": names(2), "videos": [names(4)]}
    with pytest.raises(DataError, match=said):
        build(words, write_jsonl([row]), replace(models["qwen3_vl"], **limits))  # type: ignore[arg-type]
    enough = replace(models["qwen3_vl"], most_images=2, most_videos=1)
    assert len(build(words, write_jsonl([row]), enough)) == 1


def test_demonstrations_and_the_cache(
    words: Any, write_jsonl: Write, folder: Path, models: dict[str, VisionModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn's mask is widened by what stands before it; rows from the cache have their frames."""
    monkeypatch.setenv("ROLL_CACHE_DIR", str(folder / "cache"))
    turns = [("user", "<video>x"), ("assistant", "b"), ("user", "y"), ("assistant", "#### 12")]
    row = {"messages": [dict(zip(("role", "content"), one, strict=True)) for one in turns], "videos": [names(5)]}
    options: dict[str, Any] = {"use_cache": True, "messages": "messages"}
    data_args = DataArguments(file_name=write_jsonl([row]), **options)
    for _ in range(2):
        (seen,) = SftDataset.build(data_args, words, 200, vision=models["qwen3_vl"], train_on="assistant")
        pieces = [words.decode(seen.input_ids[a:b]) for a, b in zip(seen.spans[::2], seen.spans[1::2], strict=True)]
        assert [piece.replace("<|im_end|>", "").strip() for piece in pieces] == ["b", "#### 12"]
        assert seen.vision is not None and seen.vision.num_tokens == [27]
    (folder / "frame-0.png").unlink()
    with pytest.raises(DataError, match=r"frame 1 of video 1 of column 'videos': 'frame-0\.png' does not exist"):
        SftDataset.build(data_args, words, 200, vision=models["qwen3_vl"], train_on="assistant")[0]


def by_hand(pictures: list[Image.Image], patch: int, merge: int) -> torch.Tensor:
    """Patches pixel by pixel, in the order of the tower: times, blocks of ``merge`` x ``merge`` patches, patches."""
    frames = [np.asarray(one, dtype=np.float64) / 255 for one in pictures]
    frames += frames[-1:] * (len(frames) % 2)
    high, wide = (side // (patch * merge) for side in frames[0].shape[:2])
    patches = []
    for time, row, column, y, x in product(
        range(len(frames) // 2), range(high), range(wide), range(merge), range(merge)
    ):
        top, left = (row * merge + y) * patch, (column * merge + x) * patch
        cut = [frame[top : top + patch, left : left + patch] for frame in frames[2 * time : 2 * time + 2]]
        patches.append([(one[:, :, channel] - 0.5) / 0.5 for channel in range(3) for one in cut])
    return torch.from_numpy(np.array(patches)).flatten(1).float()


@pytest.mark.parametrize("count", [4, 5])
def test_patches_by_hand(count: int) -> None:
    """Also of frames that are resized, and of an odd number of them."""
    for size in (None, (64, 32), (200, 100)):
        frames = vision_models.frames(1, count, size)
        video = vision_models.video_processing("qwen2_5_vl").encoded(frames, None, vision_models.PROCESSING)
        vision = vision_inputs([video], vision_models.PROCESSING)
        expected = by_hand(video.resized(), 8, 2)
        torch.testing.assert_close(vision.pixel_values(), expected, atol=1e-6, rtol=0)
        assert vision.pixel_values().shape == (vision.grid_thw.prod(-1).sum(), vision.processing.patch_dim)


PARITY = """
import io, json, sys
import numpy as np, torch, transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.video_utils import VideoMetadata

folder, kind = sys.argv[1:3]
cases = json.load(open(folder + "/cases.json"))
names = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
processor = getattr(transformers, names[kind]).from_pretrained(folder)
found = []
for case in cases:
    frames = np.load(f"{folder}/{case['name']}.npy")
    metadata = VideoMetadata(total_num_frames=len(frames), fps=case["fps"], frames_indices=list(range(len(frames))))
    options = dict(case["options"])
    sample = options.pop("sample")
    if sample:
        options["fps"] = 2.0
    made = processor(
        text=["a<|vision_start|><|video_pad|><|vision_end|>b"],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=sample,
        return_tensors="pt",
        **options,
    )
    np.save(f"{folder}/{case['name']}-patches.npy", made["pixel_values_videos"].numpy())
    seconds = made.get("second_per_grid_ts")
    found.append({
        "ids": made["input_ids"][0].tolist(),
        "grid": made["video_grid_thw"].tolist(),
        "seconds": None if seconds is None else [float(one) for one in seconds],
    })
json.dump(found, open(folder + "/found.json", "w"))
"""


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("torchvision") is None and not Path(TORCHVISION).is_dir(), reason="no torchvision: install-vllm-vision"
)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_patches_are_those_of_transformers(tmp_path: Path, words: Any, kind: Any) -> None:
    """The processor with its video processor, in a process that has torchvision.

    Frames that are resized are within a step of 8 bits or two of its, which resizes without Pillow.
    """
    folder = vision_models.save(tmp_path / "model", kind)
    cases: list[dict[str, Any]] = []
    for name, count, size, fps, sample in (
        ("plain", 4, (48, 48), 2.0, False),
        ("odd", 5, (64, 32), 1.0, False),
        ("resized", 4, (150, 90), 2.0, False),
        ("enlarged", 2, (10, 14), 2.0, False),
        ("sampled", 23, (48, 48), 8.0, True),
        ("sampled-odd", 31, (48, 32), 5.0, True),
    ):
        pixels = np.random.default_rng(len(cases)).integers(0, 256, (count, size[1] // 2, size[0] // 2, 3), np.uint8)
        whole = np.stack([np.asarray(Image.fromarray(one).resize(size)) for one in pixels])
        np.save(folder / f"{name}.npy", whole)
        cases.append({"name": name, "fps": fps, "options": {"sample": sample}})
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), TORCHVISION))}
    command = [sys.executable, "-c", PARITY, str(folder), kind]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    model = VisionModel.load(str(folder), words, trust_remote_code=False)
    assert model is not None
    for case, theirs in zip(cases, json.loads((folder / "found.json").read_text()), strict=True):
        frames = [EncodedImage.of(png(one)) for one in np.load(folder / f"{case['name']}.npy")]
        reader: Any = ImageReader.of(DataArguments(file_name="x"), model).model
        video = reader.video.encoded(frames, case["fps"], model.processing)
        vision = vision_inputs([video], model.processing)
        text = f"a{model.video_placeholder(video)}b"
        counts = iter([count for _, count in vision.runs])
        ids = []
        for token in words(text)["input_ids"]:
            ids += [token] * (next(counts) if token == model.video_token_id else 1)
        assert vision.grid_thw.tolist() == theirs["grid"], case
        assert ids == theirs["ids"], case
        if kind == "qwen2_5_vl":
            assert theirs["seconds"] == [video.seconds_per_grid(model.processing)], case
        patches = torch.from_numpy(np.load(folder / f"{case['name']}-patches.npy"))
        difference = float((vision.pixel_values() - patches).abs().max())
        exact = (video.width, video.height) == frames[0].size
        assert difference <= (1e-6 if exact else 2 * 2 / 255 + 1e-6), (case, difference)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_limits_of_pixels_and_frames() -> None:
    """Those of a frame and those of all together, in both families."""
    processing = vision_models.PROCESSING
    for timed in (False, True):
        free = VideoProcessing(timed, 256, 10**8)
        small = VideoProcessing(timed, 256, 10**8, frame_max_pixels=32 * 32)
        total = VideoProcessing(timed, 256, 10**8, total_pixels=8 * 32 * 32 // (1 if timed else 2))
        large = VideoProcessing(timed, 256, 10**8, frame_min_pixels=96 * 96)
        assert free.resized(8, 64, 64, processing) == (64, 64)
        assert small.resized(8, 64, 64, processing) == total.resized(8, 64, 64, processing) == (32, 32)
        assert large.resized(8, 64, 64, processing) == (96, 96)
        assert free.chosen(8, 1.0) == list(range(8))
        few = VideoProcessing(timed, 256, 10**8, max_frames=4)
        assert few.chosen(9, 1.0)[0] == 0 and len(few.chosen(9, 1.0)) == 4


def test_a_group_carries_its_frames_once_and_they_are_cut_once() -> None:
    video = vision_models.video_processing("qwen3_vl").encoded(
        vision_models.frames(900, 4), 2.0, vision_models.PROCESSING
    )
    vision = vision_inputs([video, *vision_models.frames(901, 1)], vision_models.PROCESSING)
    buffers: list[pickle.PickleBuffer] = []
    rows = pickle.loads(pickle.dumps([vision] * 8, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert sum(len(one.raw()) for one in buffers) < 1.1 * sum(len(one.data) for one in vision.pictures)
    before = _PATCHES.num_processed
    for one in (vision, *rows, VisionInputs.from_plain(from_json(to_json(vision.to_plain())))):
        assert torch.equal(one.pixel_values(), vision.pixel_values())
        assert one.image_keys == vision.image_keys
    assert _PATCHES.num_processed == before + 2
