"""Record of a batch, against a batch written by hand."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from roll.config.run import SampleLogConfig
from roll.datasets.preferences import JudgedRow
from roll.datasets.types import SftRow
from roll.pipelines.sample_records import SampleRecorder, episode_notes
from roll.protocol import DataProto
from roll.protocol.columns import object_array
from roll.protocol.vision import IMAGES
from roll.report.page import write_page
from roll.report.run_files import read_run
from roll.rollout.episodes import build_episode_batch
from roll.tracking import METRICS_NAME
from roll.tracking.run_record import RECORD_FOLDER, SAMPLES_NAME, SampleLog, decoded, read_blocks
from tests import vision_models
from tests.support.episodes import random_groups


class Letters:
    """Token 0 is padding, 1 is ``a`` and so on."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(96 + token) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(96 + token)


def batch() -> DataProto:
    """Two rows of a group, the second with two turns around a given token, and one row of another group."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
    attention = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]).bool()
    log_probs = torch.where(mask, torch.tensor([-0.5, -1.0, -0.25, -2.0, -0.125, -9.0]), 0.0)
    advantages = torch.where(mask, torch.tensor([[1.0], [0.0], [-0.5]]), 0.0)
    advantages[1] = torch.tensor([0.0, 0.5, 0.5, 0.0, 2.0, 0.0])
    tensors = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 0], [1, 6, 7, 8, 9, 0], [2, 3, 0, 0, 0, 0]]),
        "attention_mask": attention,
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "old_log_probs": torch.where(mask, log_probs + 0.001, 0.0),
        "advantages": advantages,
        "weight_versions": torch.tensor([[0, 0, 3, 3, 3, 0], [0, 2, 2, 0, 3, 0], [0] * 6], dtype=torch.int32),
        "turn_ids": torch.tensor([[-1, -1, 0, 0, 0, -1], [-1, 0, 0, -1, 1, -1], [-1, 0, -1, -1, -1, -1]]),
        "turn_rewards": torch.tensor([[0, 0, 0, 0, 1.0, 0], [0, 0, 0.5, 0, 0.25, 0], [0, 0, 0, 0, 0, 0]]),
        "scores": torch.tensor([1.0, 0.75, float("nan")]),
        "response_level_rewards": torch.tensor([0.5, -0.5, 0.0]),
        "group_ids": torch.tensor([0, 0, 1]),
        "episode_ids": torch.tensor([0, 1, 2]),
    }
    words: dict[str, list[Any]] = {
        "prompt_id": ["p0", "p0", "p1"],
        "domain": ["d"] * 3,
        "tag": ["t"] * 3,
        "finish_reason": ["stop", "length", "stop"],
    }
    return DataProto.from_dict(tensors, non_tensors=words)


def recorded(tmp_path: Path, write: Any, **settings: int) -> list[dict[str, Any]]:
    log = SampleLog(tmp_path / "samples.jsonl", 1 << 30)
    recorder = SampleRecorder(log, SampleLogConfig(**settings))
    write(recorder)
    recorder.close()
    return [decoded(data) for data in read_blocks(tmp_path / "samples.jsonl")]


def test_rows_of_a_training_batch(tmp_path: Path) -> None:
    notes: list[Any] = [({"text": "ab"}, {"metrics": {"part": 0.5}}), ({"text": "ax"}, {})]
    notes.append(({}, {"error": "broken", "outcome": "failed"}))
    old = batch().batch["old_log_probs"]
    (block,) = recorded(tmp_path, lambda recorder: recorder.policy(4, batch(), lambda: notes, Letters(), old))
    first, second, third = block["samples"]
    assert [block["pieces"][place] for place in first["tokens"]] == ["c", "d", "e"]
    assert (first["log_probs"], first["mismatch"]) == ([-250, -2000, -125], [100, 100, 100])
    wanted = {"advantages": 1.0, "versions": 3, "score": 1.0, "reward": 0.5, "metrics": {"part": 0.5}}
    assert {name: first[name] for name in wanted} == wanted and "given" not in first
    assert [block["pieces"][place] for place in second["tokens"]] == ["f", "g", "h", "i"]
    assert (second["given"], second["turns"]) == ([[2, 3]], [[0, 2, 0.5], [3, 4, 0.25]])
    assert (second["advantages"], second["versions"]) == ([0.5, 0.5, 0.0, 2.0], [[2, 2], [3, 1]])
    assert (second["mismatch"][2], second["finish_reason"], second["response_tokens"]) == (0, "length", 3)
    assert "score" not in third
    assert (third["error"], third["outcome"], third["group"]) == ("broken", "failed", "1")
    prompts = [block["prompts"][sample["prompt"]] for sample in block["samples"]]
    assert [prompt["text"] for prompt in prompts] == ["ab", "ax", "b"]
    assert "decoded" not in prompts[0]
    assert prompts[1]["decoded"] == "a", "the ids of the second prompt say another text than its own"


def test_routes_of_the_last_layer(tmp_path: Path) -> None:
    """uint8 (B, L, layers, k); 255: not told."""
    told = batch()
    routes = torch.full((3, 6, 2, 2), 255, dtype=torch.uint8)
    routes[0, :4, 1] = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    routes[:, :, 0] = 9
    told.batch["routed_experts"] = routes
    (block,) = recorded(tmp_path, lambda recorder: recorder.policy(0, told, list, Letters(), None))
    assert [sample.get("experts") for sample in block["samples"]] == [[[4, 5], [6, 7], None], None, None]


@pytest.mark.parametrize(("most", "groups"), [(3, ["0", "0", "1"]), (2, ["0", "0"]), (1, ["0"])])
def test_whole_groups_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, groups: list[str]
) -> None:
    monkeypatch.setattr("roll.pipelines.sample_records.MAX_TOKENS", 2)
    (block,) = recorded(tmp_path, lambda r: r.policy(0, batch(), list, Letters(), None), max_samples_per_step=most)
    assert [sample["group"] for sample in block["samples"]] == groups
    first = block["samples"][0]
    assert (len(first["tokens"]), len(first["log_probs"]), first["cut"]) == (2, 2, 1)
    assert "mismatch" not in first


def test_demonstrations_and_pairs(tmp_path: Path) -> None:
    pair = JudgedRow("r", "t", [1, 2], [[3, 4], [5]], [], [], 0.5)
    columns = {
        "response_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]).bool(),
        "ref_log_probs": torch.tensor([[0, 0, -1.0, -2.0], [0, 0, -3.0, 0]]),
    }

    def write(recorder: SampleRecorder) -> None:
        tokenizer: Any = Letters()
        recorder.demonstrations(0, [SftRow("s", "t", [1, 2, 3], 1)], tokenizer)
        recorder.pairs(1, [pair], DataProto.from_dict(columns), tokenizer)
        recorder.texts(
            "validation", 2, [{"prompt_id": "v", "prompt": "q", "response": "r", "score": np.float32(1)}], "set"
        )

    sft, dpo, validation = recorded(tmp_path, write)
    assert (sft["prompts"][0]["text"], [sft["pieces"][t] for t in sft["samples"][0]["tokens"]]) == ("a", ["b", "c"])
    assert [(s["kind"], s["ref_log_probs"], s["metrics"]) for s in dpo["samples"]] == [
        ("chosen", [-1000, -2000], {"margin": 0.5}),
        ("rejected", [-3000], {"margin": 0.5}),
    ]
    assert dpo["samples"][0]["prompt"] == dpo["samples"][1]["prompt"] == 0
    (shown,), (prompt,) = validation["samples"], validation["prompts"]
    assert (validation["kind"], shown["response"], prompt["domain"]) == ("validation", "r", "set")


def test_rows_of_episodes(tmp_path: Path) -> None:
    """Every sampled token of every call once, in its turn, with the note of its own episode."""
    groups = random_groups(np.random.default_rng(0), groups=3, episodes=4)
    made = build_episode_batch(groups, "trajectory", 0)
    made.batch["advantages"] = made.batch["response_mask"].float()
    episodes = [episode for group in groups for episode in group.members]
    for number, episode in enumerate(episodes):
        episode.metrics["number"] = number
    (block,) = recorded(
        tmp_path,
        lambda r: r.policy(0, made, lambda: episode_notes(groups), Letters(), None),
        max_samples_per_step=10**6,
    )
    found: dict[int, list[str]] = {}
    for sample, own in zip(block["samples"], made.batch["episode_ids"].tolist(), strict=True):
        assert sample["metrics"] == {"number": own}
        assert sample["outcome"] == episodes[own].outcome
        for begin, end, _ in sample.get("turns", ()):
            pieces = "".join(block["pieces"][place] for place in sample["tokens"][begin:end])
            found.setdefault(own, []).append(pieces)
    for number, episode in enumerate(episodes):
        said = ["".join(chr(96 + token) for token in call.response_ids) for call in episode.calls if call.response_ids]
        assert sorted("".join(found.get(number, []))) == sorted("".join(said))


def test_images_are_kept_once_and_small(tmp_path: Path) -> None:
    """The page finds each by its name; later samples of the same image name it only."""
    words = vision_models.tokenizer()
    prompts = [vision_models.prompt(words, seed, size=(200, 100)) for seed in (1, 2)]
    file = tmp_path / RECORD_FOLDER / SAMPLES_NAME
    recorder = SampleRecorder(SampleLog(file, 1 << 20), SampleLogConfig())
    seen = batch()
    seen.non_tensor_batch[IMAGES] = object_array(IMAGES, [prompts[0].vision, prompts[0].vision, prompts[1].vision])
    names = [one.vision.file_names for one in prompts if one.vision is not None]
    notes = [({"text": "x", "images": names[row]}, {}) for row in (0, 0, 1)]
    for step in range(2):
        recorder.policy(step, seen, lambda: notes, Letters(), None)  # type: ignore[arg-type]
    recorder.close()
    first, images, second = map(decoded, read_blocks(file))
    assert [first["step"], images["kind"], second["step"]] == [0, "images", 1]
    assert sorted(images["images"]) == sorted(name for own in names for name in own)
    copy = Image.open(io.BytesIO(base64.b64decode(images["images"][names[0][0]])))
    assert copy.size == (128, 64) and images["samples"] == []
    (tmp_path / METRICS_NAME).write_text(json.dumps({"step": 0, "time": 0.0}) + "\n")
    page = tmp_path / "report.html"
    assert write_page([read_run(tmp_path)], page) == 6
    text = page.read_text()
    assert "img-src data:" in text and text.count('id="p0"') == 1 and text.count('id="s0-') == 2
