"""The command line: what it prints, what it masks, what it never imports."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll import cli, preflight
from roll.checkpoint.contents import ModelContents
from roll.config.loader import LoadedConfig, load_config
from roll.config.pipelines import definitions
from roll.config.reading.compose import parse_launcher_args
from roll.config.reading.masking import MASK
from roll.distributed import restarts
from roll.pipelines.rlvr.definition import RLVR
from tests.config.good import GOOD, GOOD_SFT, changed, write_rows
from tests.support.checkpoints import write_checkpoint


def as_hard_as(response: str, difficulty: float, scale: float = 1.0, **row: object) -> float:
    """A reward that needs a column."""
    return difficulty * scale


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(GOOD, sort_keys=False))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(GOOD_SFT, sort_keys=False))
    return tmp_path


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("command", ["check", "plan"])
def test_check_prints_the_plan(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "good.yaml", "--skip-files", "max_steps=30"]) == 0
    text = capsys.readouterr().out
    assert "64 prompts x 4 = 256 samples; 2 optimizer steps of 128; 2 ranks x 8 micro-batches of 8" in text
    assert "30 steps; 60 optimizer steps of actor_train; validation every 10" in text
    for fragment in ("actor_infer", "hf_infer", "shares devices with", "output/good", "math_rule", "owner/model"):
        assert fragment in text


@pytest.mark.usefixtures("good")
def test_names_are_never_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "good.yaml", "--skip-files", "exp_name='a[/b]:100:'", "pretrain='[red]m'"]) == 0
    text = capsys.readouterr().out
    assert "a[/b]:100:" in text and "[red]m" in text
    Path("good.yaml").write_text("gamma: '[/]:100:'\nactor_infer: {}\n")
    assert cli.main(["check", "good.yaml", "--skip-files"]) == 2
    assert "[/]:100:" in capsys.readouterr().err


@pytest.mark.usefixtures("good")
def test_check_of_sft(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "sft", "--skip-files"]) == 0
    assert "1 optimizer step of 8; 1 rank x 2 micro-batches of 4" in capsys.readouterr().out


@pytest.mark.usefixtures("good")
def test_wrong_configuration_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "good.yaml", "--skip-files", "max_step=30", "gamma=2"]) == 2
    error = capsys.readouterr().err
    assert "2 mistakes" in error and "max_steps" in error and "gamma" in error
    assert cli.main(["check", "good.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["run", "nowhere.yaml"]) == 2
    for folder in (".", "..", "/"):
        assert cli.main(["check", folder]) == 2
        assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["check"])
    assert capsys.readouterr().err.endswith("the following arguments are required: config\n")


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("written", ["./own/r.py:score", "own/r.py:score", "own.r:score"])
def test_a_reward_that_is_named_by_its_file(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "good.yaml", "--skip-files", f"rewards.math.worker_cls={written}"]) == 2
    assert "for example worker_cls: own.r.score" in capsys.readouterr().err
    if "/" in written:
        assert cli.main(["check", "good.yaml", "--skip-files", f"+loss={written}"]) == 2
        assert "for example loss: own.r.score" in capsys.readouterr().err


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("reward", "row", "lacks"),
    [
        ("math_rule", {"answers": "5"}, "ground_truth"),
        ("math_rule", {"ground_truth": "5"}, None),
        ("math_rule", {"reward_model": {"ground_truth": "5"}}, None),
        (f"{__name__}.as_hard_as", {"ground_truth": "5"}, "difficulty"),
        (f"{__name__}.as_hard_as", {"difficulty": 2}, None),
    ],
)
def test_columns_that_a_reward_needs(
    reward: str, row: dict[str, Any], lacks: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows()
    Path("train.jsonl").write_text(json.dumps({"prompt": "2 + 3?", "tag": "math"} | row))
    words = ["pretrain=.", "actor_train.data_args.messages=null", f"rewards.math.worker_cls={reward}", "~validation"]
    Path("config.json").write_text('{"model_type": "qwen2"}')
    assert cli.main(["check", "good.yaml", *words]) == (2 if lacks else 0), capsys.readouterr().err
    if lacks:
        assert f"rewards.math ({reward}) needs the column {lacks}, found prompt, tag" in capsys.readouterr().err


@pytest.mark.usefixtures("good")
def test_options_of_parts_are_checked_and_keys_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("+rewards.math.reward_kwargs.colour=red", "+tracker_kwargs.colour=3"):
        assert cli.main(["check", "good.yaml", "--skip-files", words]) == 2
        assert "colour" in capsys.readouterr().err
    assert cli.main(["check", "good.yaml", "--skip-files", "+tracker_kwargs.api_key=abc"]) == 2
    error = capsys.readouterr().err
    assert "WANDB_API_KEY" in error and "abc" not in error


def test_resolved_masks_secrets(
    good: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    data = changed(
        {"system_envs": {"WANDB_API_KEY": "${oc.env:MY_KEY}", "NCCL_DEBUG": "INFO"}, "exp_name": "${pretrain}"}
    )
    data["rewards"]["math"]["judge_api_key"] = "${oc.env:MY_KEY}"
    (good / "good.yaml").write_text(yaml.safe_dump(data))
    assert cli.main(["check", "good.yaml", "--resolved", "--skip-files"]) == 0
    text = capsys.readouterr().out
    resolved = yaml.safe_load(text)
    assert "very-secret" not in text
    assert resolved["system_envs"] == {"WANDB_API_KEY": MASK, "NCCL_DEBUG": "INFO"}
    assert resolved["exp_name"] == "owner/model"


@pytest.mark.usefixtures("good")
def test_run_hands_the_loaded_configuration_to_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoadedConfig[Any]] = []
    for pipeline in definitions():
        monkeypatch.setattr(type(pipeline), "run", lambda self, loaded: seen.append(loaded))
    asked: list[LoadedConfig[Any]] = []
    monkeypatch.setattr(preflight, "find_models", lambda loaded, say: asked.append(loaded))
    data_there = changed({"pretrain": "owner/model"})
    write_rows()
    Path("good.yaml").write_text(yaml.safe_dump(data_there))
    assert cli.main(["run", "good.yaml", "max_steps=3"]) == 0
    with pytest.raises(SystemExit) as stopped:
        cli.launch("sft", "nowhere", "nothing", ["--config_path", ".", "--config_name", "sft", "max_steps=5"])
    assert stopped.value.code == 0
    assert [loaded.plan.pipeline for loaded in seen] == ["rlvr", "sft"]
    assert asked == seen, "the hub is asked before the pipeline"
    assert [loaded.config.max_steps for loaded in seen] == [3, 5]
    with pytest.raises(SystemExit) as refused:
        cli.launch("sft", "nowhere", "nothing", [])
    assert refused.value.code == 2


@pytest.mark.usefixtures("good")
def test_an_output_folder_under_a_file_is_one_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows()
    Path("taken").touch()
    for command in ("run", "check"):
        assert cli.main([command, "good.yaml", "output_dir=taken/run"]) == 2
        error = capsys.readouterr().err
        assert "1 mistake" in error and "output_dir = 'taken/run'" in error and "name another folder" in error


@pytest.mark.usefixtures("good")
def test_a_full_disk_is_said_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    told: dict[str, Any] = {}
    monkeypatch.setattr(restarts.supervised, "tell", lambda **facts: told.update(facts))
    assert cli.run(load_config(None, "good.yaml", check_files=False), work) == cli.EXIT_FAILED
    assert told == {"end": restarts.WRONG}
    error = capsys.readouterr().err
    assert "No space left on device" in error and "GB are free in" in error and "Traceback" not in error


@pytest.mark.usefixtures("good")
def test_a_checkpoint_of_an_unknown_backend_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RLVR, "pipeline_class", "roll.nowhere.Run")
    write_rows()
    unknown = ModelContents("of_another_version", {"lm_head.weight": [4]})
    write_checkpoint(Path("out/checkpoints"), {"actor_train": unknown})
    words = ["good.yaml", "output_dir=out", "resume_from_checkpoint=true"]
    for command in ("run", "check"):
        assert cli.main([command, *words]) == 2
        error = capsys.readouterr().err
        assert "good.yaml: actor_train.strategy_args.strategy_name = 'fsdp2_train'" in error
        assert "was written by of_another_version" in error and "start a new run" in error
    with pytest.raises(SystemExit) as refused:
        cli.launch("rlvr", "nowhere", "nothing", ["--config_path", ".", "--config_name", "good", *words[1:]])
    assert refused.value.code == 2


def test_launcher_arguments() -> None:
    arguments = parse_launcher_args(["a=1", "--config_path", "dir", "+b.c=2", "--config_name", "x", "~d"], "p", "n")
    assert (arguments.config_path, arguments.config_name) == ("dir", "x")
    assert arguments.overrides == ["a=1", "+b.c=2", "~d"]
    default = parse_launcher_args([], "p", "n")
    assert (default.config_path, default.config_name, default.overrides) == ("p", "n", [])
    with pytest.raises(SystemExit):
        parse_launcher_args(["--confg_name", "x"], "p", "n")


def test_neither_a_check_nor_a_translation_imports_a_heavy_package(good: Path) -> None:
    program = (
        "import sys; from roll.config.pipelines import definitions; definitions(); from roll.cli import main;"
        "status = main(['check', 'good.yaml', '--skip-files']);"
        "status = status or main(['translate', '--quiet', 'trainer.strategy=fsdp2']);"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'datasets', 'pyarrow', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=good, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_models_of_an_evaluation_have_different_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "tiny/evaluate_config.yaml", "--model", "a/checkpoint-2", "--model", "b/checkpoint-2"]
    assert cli.main(words) == 2
    assert "a second model named checkpoint-2: write NAME=PATH" in " ".join(capsys.readouterr().err.split())


def test_options_of_a_harness_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "tiny/evaluate_config.yaml", "--tasks", "gsm8k"])
    assert "are read with --harness only" in capsys.readouterr().err
