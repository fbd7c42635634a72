"""Runs with images: engines and trainers see the same, resumed and recorded runs are the uninterrupted one, pairs are a
plain loop over single responses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from roll.config.reading.errors import ConfigError
from roll.config.roles import DataArguments
from roll.datasets import EpochOrder
from roll.datasets.preferences import JudgedColumns, JudgedDataset, JudgedRow
from roll.datasets.vision_model import VisionModel
from roll.preflight import check_parts
from tests import vision_models
from tests.pipelines.conftest import Run
from tests.strategies import vision_cases
from tests.support.tiny_runs import (
    GENERATING,
    HERE,
    FinishedRun,
    TinyWorld,
    agentic_settings,
    load_changed,
    role,
    supervised_layouts,
    training_args,
)
from tests.vision_models import tiny_vl_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]


STOPS = GENERATING | {"stop_token_ids": list(range(8, 384, 8))}
FOLDER = os.environ.get("ROLL_TORCHVISION") or str(Path(sys.prefix) / "roll-torchvision")
"""Where vLLM finds torchvision on a CPU."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


def make_pictures(folder: Path) -> TinyWorld:
    """A Qwen3-VL, prompts of one, two and no images, and demonstrations; one row has a broken image."""
    world = TinyWorld(folder)
    vision_models.save(world.model, "qwen3_vl", hidden=64)
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(vision_models.shapes.draw_pictures(40, 3)):
        (world.folder / f"{number}.png").write_bytes(one.png())
        names = [[f"{number}.png"], [], [f"{number}.png", f"{number // 2}.png"]][number % 3]
        row = {"id": str(number), "tag": "odd", "prompt": "<image>" * len(names) + one.question, "images": names}
        rows.append(row | {"ground_truth": str(one.answer), "response": one.solution()})
    (world.folder / "3.png").write_bytes(b"broken")
    for path, part in ((world.train, rows), (world.validation, rows[30:36]), (world.demonstrations, rows)):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return world


def shared_changes(world: TinyWorld) -> dict[str, Any]:
    """Two trainers with shared prompts and packing, two engines, a reference, checkpoints."""
    return {
        "pretrain": str(world.model),
        "reward_pretrain": str(world.model),
        "max_steps": 3,
        "save_steps": 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "actor_train.device_mapping": [0, 1],
        "actor_train.training_args": training_args(8, 1) | {"save_hf_model": True},
        "actor_train.use_prefix_sharing": True,
        "actor_train.use_sequence_packing": True,
        "actor_train.sequence_packing_args": {
            "algorithm": "load_balance",
            "max_packed_sequence_length_train": 160,
        },
        "actor_infer.device_mapping": [0, 1],
        "actor_infer.generating_args": STOPS,
        "reference": role("fsdp2_infer", [0, 1], infer_batch_size=4),
    }


def changes(world: TinyWorld) -> dict[str, Any]:
    """Those, with validations."""
    data = {"prompt": "prompt", "on_bad_row": "skip"}
    return shared_changes(world) | {
        "eval_steps": 3,
        "actor_train.data_args": data | {"file_name": [str(world.train)]},
        "validation": {"data_args": data | {"file_name": [str(world.validation)]}},
    }


@pytest.fixture(scope="module")
def finished(run: Run, pictures: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    output = tmp_path_factory.mktemp("vision")
    recorded = {"rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(output / "recorded")}}
    return run(changes(pictures) | recorded, output=output)


def test_trainers_compute_what_engines_sampled_from(finished: FinishedRun) -> None:
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert finished.values("actor/ratio_max") == pytest.approx([1.0] * 3, abs=1e-5)
    assert finished.values("actor/kl_loss")[0] == pytest.approx(0, abs=1e-9)
    assert finished.values("actor/kl_loss")[2] > 1e-7
    log = (finished.logs / "run.log").read_text()
    assert "40 rows read, 39 kept, 0 too long, 1 bad" in log


def test_samples_name_their_images(finished: FinishedRun, pictures: TinyWorld) -> None:
    rows = finished.samples(0)
    for row in rows:
        expected = [b"x"] * row["prompt"].count("<|image_pad|>")
        assert len(row.get("images", ())) == len(expected)
        for name, place in zip(
            row.get("images", ()), (int(row["prompt_id"]), int(row["prompt_id"]) // 2), strict=False
        ):
            image = finished.output / "rollouts" / "images" / name
            assert image.read_bytes() == (pictures.folder / f"{place}.png").read_bytes()
    assert any(row.get("images") for row in rows)
    assert (finished.output / "model" / "preprocessor_config.json").is_file(), "the export sees images, too"


def test_training_on_recorded_rollouts(run: Run, finished: FinishedRun, pictures: TinyWorld, tmp_path: Path) -> None:
    section = {"enable": True, "mode": "mock", "dump_dir": str(finished.output / "recorded")}
    again = run(changes(pictures) | {"rollout_mock": section, "eval_steps": 0}, output=tmp_path)
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "critic/advantages/max", "system/samples"):
        assert again.values(name) == finished.values(name), name
    assert "scheduler/collect_query_count" not in again.steps[0], "nothing was generated"
    weights = [load_file(one.output / "model" / "model.safetensors") for one in (finished, again)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def make_clips(folder: Path, kind: tiny_vl_model.Kind = "qwen3_vl", hidden: int = 64) -> TinyWorld:
    """Prompts of a video, of text, and of a video next to an image. One video has a single frame, another is too long
    for Qwen2.5-VL in vLLM."""
    world = TinyWorld(folder)
    vision_models.save(world.model, kind, hidden=hidden)
    rows: list[dict[str, Any]] = []
    for number, clip in enumerate(vision_models.draw_clips(24, 3)):
        frames = clip.frames()[: 1 if number == 3 else None]
        names = [f"{number}-{frame}.png" for frame in range(len(frames))]
        for name, frame in zip(names, frames, strict=True):
            (world.folder / name).write_bytes(frame)
        fps = 2.0 if number == 6 else 4.0
        video, picture = {"videos": [{"video": names, "fps": fps}]}, {"images": [names[0]]}
        marks, seen = [("<video>", video), ("", {}), ("<video><image>", video | picture)][number % 3]
        row = {"id": str(number), "tag": "odd", "prompt": marks + clip.question, **seen}
        rows.append(row | {"ground_truth": clip.answer, "response": clip.answer})
    for path, part in ((world.train, rows), (world.validation, rows[18:]), (world.demonstrations, rows)):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return world


def test_trainers_compute_what_engines_sampled_from_videos(run: Run, tmp_path: Path) -> None:
    """Engines, trainers with packing and shared prompts, a reference."""
    clips = make_clips(tmp_path / "clips")
    whole = run(changes(clips) | {"max_steps": 2, "eval_steps": 0}, output=tmp_path)
    assert max(whole.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert whole.values("actor/ratio_max") == pytest.approx([1.0] * 2, abs=1e-5)
    assert whole.values("actor/kl_loss")[0] == pytest.approx(0, abs=1e-9) and whole.values("actor/kl_loss")[1] > 1e-7
    assert "24 rows read, 23 kept, 0 too long, 1 bad" in (whole.logs / "run.log").read_text()
    rows = whole.samples(0)
    assert any(row.get("images") for row in rows)
    for row in rows:
        number = int(row["prompt_id"])
        frames = [(clips.folder / f"{number}-{frame}.png").read_bytes() for frame in range(4)]
        wanted = [frames, [], [*frames, frames[0]]][number % 3]
        assert [(tmp_path / "rollouts" / "images" / name).read_bytes() for name in row.get("images", ())] == wanted


def test_opd_03_a_teacher_sees_the_students_images(run: Run, pictures: TinyWorld, tmp_path: Path) -> None:
    """The student itself has nothing to teach about its own samples, with its images; another model has."""
    common = changes(pictures) | {"use_kl_loss": False, "max_steps": 1, "save_steps": 0, "eval_steps": 0}
    common |= {"pipeline": "opd", "is_pure_opd": True, "opd_form": "advantage", "reference": None}
    other = tmp_path / "other"
    shutil.copytree(pictures.model, other)
    weights = load_file(other / "model.safetensors")
    save_file({k: 1.2 * v for k, v in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    teachers = {}
    for name, folder in (("itself", pictures.model), ("other", other)):
        teachers[name] = role("fsdp2_infer", [0], infer_batch_size=4)
        teachers[name]["model_args"] |= {"model_name_or_path": str(folder)}
    (row,) = run(common | {"teacher": teachers}).steps
    assert row["opd/itself/kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(row["opd/other/kl"]) > 1e-3 and row["actor/grad_norm"] > 1e-3


@pytest.mark.skipif(not Path(FOLDER).is_dir(), reason="no torchvision: install-vllm-vision")
@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "bad"), [("qwen3_vl", 1), ("qwen2_5_vl", 2)])
def test_vllm_samples_from_videos_what_trainers_compute(
    run: Run, tmp_path: Path, kind: tiny_vl_model.Kind, bad: int
) -> None:
    world = make_clips(tmp_path / "clips", kind, hidden=128)  # vLLM has no kernel for smaller heads on a CPU
    path = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), FOLDER))}
    own = {name: value for name, value in changes(world).items() if "actor_infer." not in name}
    own |= {
        "max_steps": 2,
        "eval_steps": 0,
        "actor_train.device_mapping": [0],
        "actor_train.training_args": training_args(8, 2),
        "actor_infer": role("vllm", [1], generating_args=STOPS, system_envs=path),
        "reference": role("fsdp2_infer", [0], infer_batch_size=4),
    }
    finished = run(own, output=tmp_path)
    assert max(finished.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    log = (finished.logs / "run.log").read_text()
    assert f"24 rows read, {24 - bad} kept, 0 too long, {bad} bad" in log
    rows = finished.samples(0)
    assert any("<|video_pad|>" in row["prompt"] and len(row["images"]) in (4, 5) for row in rows)


@pytest.mark.matrix
@pytest.mark.parametrize("make", [make_pictures, make_clips], ids=["pictures", "clips"])
def test_demonstrations(make: Callable[[Path], TinyWorld], run: Run, tmp_path: Path) -> None:
    world = make(tmp_path / "world")
    data = {"file_name": str(world.demonstrations), "prompt": "prompt", "response": "response", "on_bad_row": "skip"}
    own = {"pretrain": str(world.model), "sft_train.device_mapping": [0, 1]}
    own |= {"sft_train.data_args": data, "sft_train.training_args": training_args(4, 1)}
    losses = run(own, "sft").values("sft_train/loss")
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def judged(pictures: TinyWorld) -> TinyWorld:
    """Right and wrong answers to questions about one, no and two images."""
    rows = [row for row in map(json.loads, pictures.demonstrations.read_text().splitlines()) if row["id"] != "3"][:24]
    pairs = [row | {"chosen": row["response"], "rejected": "#### 7"} for row in rows]
    pictures.preferences.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return pictures


def judged_changes(world: TinyWorld, learner: str) -> dict[str, Any]:
    return {"pretrain": str(world.model), "reference.model_args.model_name_or_path": str(world.model)} | {
        f"{learner}.data_args": {"file_name": str(world.preferences), "prompt": "prompt"}
    }


def plain_steps(
    world: TinyWorld,
    stream: str,
    model: torch.nn.Module,
    score_input: Any,
    loss_of: Callable[[JudgedRow], torch.Tensor],
) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of three steps on 8 pairs each, one pair at a time."""
    words = AutoTokenizer.from_pretrained(world.model)
    vision = VisionModel.load(str(world.model), words, trust_remote_code=False)
    data_args = DataArguments(file_name=str(world.preferences), prompt="prompt")
    built = JudgedDataset.build(
        data_args,
        words,
        160,
        JudgedColumns(),
        "pairs" if stream == "preferences" else "ranking",
        score_input=score_input,
        vision=vision,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    order, found = EpochOrder(len(built), 7, stream, True).of_epoch(0), []
    for step in range(3):
        optimizer.zero_grad()
        loss = sum((loss_of(built[int(row)]) for row in order[8 * step : 8 * step + 8]), torch.zeros(())) / 8
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((float(loss.detach()), float(norm)))
    return found


def sides_of(row: JudgedRow) -> list[dict[str, Any]]:
    """Each response to the row's prompt as a batch of its own."""
    prompt = vision_models.VisionPrompt(row.prompt_ids, row.vision)
    return [vision_cases.assembled([(prompt, response)]) for response in row.responses]


def test_pairs_of_responses_to_images(run: Run, judged: TinyWorld) -> None:
    """DPO with images is a plain loop over single responses."""
    policy, reference = (vision_cases.plain_model(judged.model) for _ in range(2))

    def loss_of(row: JudgedRow) -> torch.Tensor:
        own, tied = (
            [vision_cases.plain_outputs(model, side)["log_probs"].sum() for side in sides_of(row)]
            for model in (policy, reference)
        )
        return -torch.nn.functional.logsigmoid(0.1 * ((own[0] - own[1]) - (tied[0] - tied[1]).detach()))

    wanted = plain_steps(judged, "preferences", policy, "tokens", loss_of)
    assert wanted[2][0] < wanted[0][0] - 0.01, "three steps must change something"
    layout = supervised_layouts("actor_train")["two ranks, shared prompts"]
    done = run(judged_changes(judged, "actor_train") | layout, pipeline="dpo")
    found = list(zip(done.values("actor/loss"), done.values("actor/grad_norm"), strict=True))
    assert found == [pytest.approx(one, rel=1e-3, abs=2e-5) for one in wanted]


@pytest.mark.matrix
def test_a_reward_model_that_sees_images(run: Run, judged: TinyWorld) -> None:
    """Bradley-Terry on the same pairs, and the exported model gives the scores of a plain one."""
    model = vision_cases.plain_model(judged.model)
    size = model.config.text_config.hidden_size
    drawn = torch.zeros(1, size).normal_(std=(size + 1) ** -0.5, generator=torch.Generator().manual_seed(7))
    model.lm_head.weight = torch.nn.Parameter(drawn)  # one row, in the place of the vocabulary's

    def loss_of(row: JudgedRow) -> torch.Tensor:
        scores = []
        for side in sides_of(row):
            hidden = model.model(**vision_cases.plain_inputs(model, side)).last_hidden_state[0]
            scores.append(hidden[int(side["attention_mask"].sum()) - 1] @ model.lm_head.weight[0])
        return -torch.nn.functional.logsigmoid(scores[0] - scores[1])

    wanted = plain_steps(judged, "rm", model, "chat", loss_of)
    changes = judged_changes(judged, "reward_train")
    del changes["reference.model_args.model_name_or_path"]
    done = run(changes | supervised_layouts("reward_train")["two ranks, shared prompts"], pipeline="rm")
    found = list(zip(done.values("reward/loss"), done.values("reward/grad_norm"), strict=True))
    assert found == [pytest.approx(one, rel=1e-3, abs=2e-5) for one in wanted]


def sign_changes(world: TinyWorld) -> dict[str, Any]:
    """Signs, and engines with prefix caches."""
    signs = {"env_type": f"{HERE}.agentic_environments.Signs", "max_steps": 3, "max_tokens_per_step": 6}
    signs |= {"env_config": {"turns": 3}}
    around = {"pre_step_template": "Turn {turn_idx}: ", "next_step_template": " {actions_left} left."}
    manager = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
    return shared_changes(world) | {
        "custom_envs": {"signs": signs | around | {"env_manager_cls": manager}},
        "train_env_manager.tags": ["signs"],
        "actor_train.sequence_packing_args.max_packed_sequence_length_train": 512,
        "actor_infer.strategy_args.strategy_config": {"prefix_cache_tokens": 4096},
    }


def test_a_policy_learns_from_what_an_environment_shows(run: Run, pictures: TinyWorld, tmp_path: Path) -> None:
    """Every observation has a picture of 9 tokens: what is trained is what was sampled, with its images, and a resumed
    run plays the episodes of the uninterrupted one."""
    whole = run(sign_changes(pictures), "agentic", tmp_path)
    assert max(whole.values("actor/train_infer_log_diff_abs_max")) < 1e-4
    assert whole.values("actor/kl_loss")[0] == pytest.approx(0, abs=1e-9)
    assert whole.values("actor/kl_loss")[2] > 1e-7
    for name in ("agent/retokenized_tokens", "agent/trained_once_violations", "agent/breaks"):
        assert whole.values(name) == [0.0] * 3, name
    assert all(0 < hit < 1 for hit in whole.values("engine/prefix_hit")), "second turns have the first in the cache"
    for row in whole.samples(0):
        for number, turn in enumerate(row["turns"]):
            assert turn["prompt"].count("<|image_pad|>") == 9 and len(turn["images"]) == 1
            assert (tmp_path / "rollouts" / "images" / turn["images"][0]).is_file()
            assert f"Turn {number + 1}: " in turn["prompt"] and f"{3 - number} left." in turn["prompt"]
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "checkpoints" / "checkpoint-2")}
    resumed = run(sign_changes(pictures) | checkpoint, "agentic")
    sampled, again = (
        [[(turn["response_ids"], turn["images"]) for turn in row["turns"]] for row in one.samples(2)]
        for one in (whole, resumed)
    )
    assert again == sampled


def test_pictures_for_a_policy_of_text_are_refused(world: TinyWorld, tmp_path: Path) -> None:
    lake = {"env_type": "frozen_lake", "env_config": {"render_mode": "rgb_array"}}
    loaded = load_changed(
        agentic_settings(world, tmp_path), {"custom_envs": {"lake": lake}, "train_env_manager.tags": ["lake"]}
    )
    with pytest.raises(ConfigError, match=r"env_config.render_mode.*is a model of text"):
        check_parts(loaded)
