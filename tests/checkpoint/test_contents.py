"""A checkpoint of which another configuration would leave something behind is refused, and says what and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from roll.checkpoint.contents import (
    FORMAT,
    STATE_NAME,
    CheckpointMismatchError,
    ModelContents,
    check_contents,
    read_contents,
    read_trainer_state,
)
from roll.config.reading.errors import ConfigError
from roll.config.strategies.registry import train_strategies
from roll.preflight import check_resumption
from tests.config.good import GOOD_SFT, changed, load
from tests.support.checkpoints import BODY, HEAD, PLAIN, write_checkpoint

DOWN, UP = "model.q_proj.lora_A.default.weight", "model.q_proj.lora_B.default.weight"
BASE = "model.q_proj.base_layer.weight"
FROZEN = ModelContents("fsdp2_train", {HEAD: [16, 4]}, [BODY], base="aa")
ADAPTED = ModelContents(
    "fsdp2_train", {DOWN: [4, 8], UP: [8, 4]}, [BASE, BODY, HEAD], scalings={"model.q_proj.weight": 2.0}, base="aa"
)


def adapted(**changes: Any) -> ModelContents:
    return ModelContents(**{**asdict(ADAPTED), **changes})


@pytest.mark.parametrize(
    ("written", "present", "words"),
    [
        (PLAIN, FROZEN, rf"trained weights of {BODY}, which model_args.freeze_module_prefix freezes"),
        (FROZEN, PLAIN, rf"{BODY} were frozen \(model_args.freeze_module_prefix\)"),
        (ADAPTED, PLAIN, r"trained weights of .*lora_A.*lora_target"),
        (PLAIN, ADAPTED, r"trained weights of .*holds nothing of .*lora_A.*lora_target"),
        (ADAPTED, adapted(trained={DOWN: [2, 8], UP: [8, 2]}), r"\[4, 8\] there and \[2, 8\] here \(.*lora_rank"),
        (ADAPTED, adapted(scalings={"model.q_proj.weight": 4.0}), r"scaled by 2 there and by 4 here \(.*lora_alpha"),
        (ADAPTED, adapted(base="bb"), r"frozen parameters were those of another model folder \(pretrain"),
        (PLAIN, ModelContents("fsdp2_train", {BODY: [9, 4], HEAD: [16, 4]}), r"\[8, 4\] there and \[9, 4\] here"),
        (PLAIN, ModelContents("fsdp2_train", {BODY: [8, 4], "score.weight": [1, 4]}), "lm_head.weight.*another model"),
        (FROZEN, ModelContents("fsdp2_train", {HEAD: [16, 4]}, ["model.other"]), "other layers: .*model.other"),
        (ModelContents("own_train", PLAIN.trained), PLAIN, "written by own_train, which own_train can go on from"),
    ],
)  # fmt: skip
def test_what_would_be_left_behind_is_named(written: ModelContents, present: ModelContents, words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        check_contents(written, present, Path("checkpoint-1/actor_train"))


def test_the_same_goes_on() -> None:
    for contents in (PLAIN, FROZEN, ADAPTED):
        again = ModelContents(**json.loads(json.dumps(asdict(contents))))
        check_contents(again, contents, Path())
    for strategy in train_strategies():
        check_contents(PLAIN, ModelContents(strategy, PLAIN.trained), Path())
    check_contents(FROZEN, ModelContents("fsdp2_train", FROZEN.trained, FROZEN.frozen, base=None), Path())


ASYNC = {"async_generation_ratio": 1, "actor_train.device_mapping": [0], "actor_infer.device_mapping": [1]}
REFUSALS: list[tuple[dict[str, ModelContents], dict[str, Any], str, str]] = [
    ({"actor_train": ModelContents("own_train", PLAIN.trained)}, {}, "actor_train.strategy_args.strategy_name",
     "written by own_train, which own_train can go on from"),
    ({"actor_train": PLAIN}, {"actor_train.model_args.freeze_module_prefix": "model"},
     "actor_train.model_args.freeze_module_prefix", f"trained weights of {BODY}"),
    ({"actor_train": FROZEN}, {}, "actor_train.model_args.freeze_module_prefix", f"{BODY} were frozen"),
    ({"actor_train": ADAPTED}, {}, "actor_train.model_args.lora_target", "holds adapters, and this role has none"),
    ({"actor_train": PLAIN}, {"actor_train.model_args.lora_target": "q_proj"}, "actor_train.model_args.lora_target",
     "holds a model without adapters"),
    ({"actor_train": ADAPTED}, {"actor_train.model_args.lora_target": "q_proj", "actor_train.model_args.lora_rank": 8},
     "actor_train.model_args.lora_rank", "adapters of rank 4"),
    ({"actor_train": ADAPTED},
     {"actor_train.model_args.lora_target": "q_proj", "actor_train.model_args.lora_rank": 4,
      "actor_train.model_args.lora_alpha": 16}, "actor_train.model_args.lora_alpha", "alpha is 8, here 16"),
    ({"actor_train": PLAIN, "critic": PLAIN}, {}, "resume_from_checkpoint", "a trained critic, which this run has not"),
    ({"sft_train": PLAIN}, {}, "resume_from_checkpoint", "holds nothing of actor_train; it holds sft_train"),
]  # fmt: skip


@pytest.mark.parametrize(("roles", "changes", "key", "words"), REFUSALS)
@pytest.mark.parametrize("by_path", [False, True])
def test_roll_check_refuses_before_anything_starts(
    tmp_path: Path, roles: dict[str, ModelContents], changes: dict[str, Any], key: str, words: str, by_path: bool
) -> None:
    checkpoint = write_checkpoint(tmp_path / "out/checkpoints", roles)
    resume = {"resume_from_checkpoint": str(checkpoint) if by_path else True, "output_dir": str(tmp_path / "out")}
    loaded = load(tmp_path, changed(changes | resume))
    with pytest.raises(ConfigError) as caught:
        check_resumption(loaded)
    (problem, *_) = [problem for problem in caught.value.problems if problem.key == key]
    assert words in str(problem) and "start a new run" in str(problem)


def test_what_goes_on_is_not_refused(tmp_path: Path) -> None:
    output = {"output_dir": str(tmp_path / "out")}
    check_resumption(load(tmp_path, changed(output | {"resume_from_checkpoint": True})))
    write_checkpoint(tmp_path / "out/checkpoints", {"actor_train": ADAPTED}, step=2)
    write_checkpoint(tmp_path / "out/checkpoints", {"actor_train": PLAIN}, ahead=True)
    check_resumption(load(tmp_path, changed(output)))
    check_resumption(load(tmp_path, changed(output | ASYNC | {"resume_from_checkpoint": True})))
    with pytest.raises(ConfigError, match=r"async_generation_ratio.*generated ahead"):
        check_resumption(load(tmp_path, changed(output | {"resume_from_checkpoint": True})))
    (tmp_path / "out/checkpoints/checkpoint-3/actor_train" / STATE_NAME).write_text("torn")
    lora = {"actor_train.model_args.lora_target": "q_proj", "actor_train.model_args.lora_rank": 4}
    check_resumption(load(tmp_path, changed(output | lora | {"resume_from_checkpoint": True})))
    write_checkpoint(tmp_path / "sft/checkpoints", {"sft_train": PLAIN})
    sft = {"output_dir": str(tmp_path / "sft"), "resume_from_checkpoint": True}
    check_resumption(load(tmp_path, changed(sft, GOOD_SFT)))


@pytest.mark.parametrize(("path", "words"), [("gone", "is not a folder"), ("", "holds no whole checkpoint")])
def test_a_path_that_is_not_there_is_a_mistake(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"resume_from_checkpoint.*{words}"):
        check_resumption(load(tmp_path, changed({"resume_from_checkpoint": str(tmp_path / path)})))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 1}', "format 1 is not the one known here"),
        ("[]", "format None"),
        ("\x80", "not readable"),
        (json.dumps({"format": FORMAT}), "no description of the model"),
        (f'{{"format": {FORMAT}, "model": {{"strategy": "fsdp2_train", "more": 1}}}}', "no description of the model"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / STATE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointMismatchError, match=words):
        read_contents(read_trainer_state(tmp_path), tmp_path)
